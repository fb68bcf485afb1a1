"""Subspace inference: a sampler, or Laplace, in the few directions along which gradient descent moves.

    w = ŵ + P z          p(z|D) ∝ p(D|ŵ + P z) p(ŵ + P z)          z with few dimensions

ŵ is the mean of networks along a run of stochastic gradient descent with momentum and a constant learning rate, and the
columns of P are the principal directions of these networks around ŵ, each as long as their standard deviation along it.
The prior of z is the prior of the weights on the subspace (`shared/coordinates.py`). Another method, `inner`, infers z
for the network as a function of z. A few directions cannot have the whole variance of the posterior; a sampler's
`temperature` widens it (Izmailov et al. use up to the number of weights divided by that of directions).

Izmailov et al. 2019, arXiv:1907.07504
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from bayeslim.bayesian import Bayesian, bayesianize_
from bayeslim.errors import BayeslimError
from bayeslim.io.registry import register, registered
from bayeslim.methods.base import Method
from bayeslim.methods.shared.batch_statistics import measure_again_
from bayeslim.methods.shared.chain_run import between_ranks, prepare, run_alone
from bayeslim.methods.shared.coordinates import (
    Coordinates,
    OnSubspace,
    flat,
    principal_directions,
    to_mode_,
    with_normal_prior,
)
from bayeslim.methods.shared.kept_networks import KeptNetworks
from bayeslim.methods.shared.learned_noise import average_noise_, noise_of
from bayeslim.methods.shared.moving import Moving
from bayeslim.methods.shared.particle_method import ParticleMethod, set_tensors
from bayeslim.methods.shared.refit import restored_on_failure
from bayeslim.methods.shared.sampling_schedule import SamplingSchedule
from bayeslim.posteriors.particles import Particles
from bayeslim.results import Fit
from bayeslim.stochastic import evaluating
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.seeding import ordered_by, seed_of_chain
from bayeslim.types import Params

STOCHASTIC = ("sgld", "psgld", "sghmc", "sgnht")
"""Methods that sample by stochastic gradients and need a number of epochs and a learning rate."""
INNER = ("hmc", *STOCHASTIC, "laplace")


def _by_default() -> Method:
    method: Method = registered("method", "hmc")()
    return method


@register("method")
@dataclass(frozen=True)
class Subspace(ParticleMethod):
    """Inference in a subspace; the network is set to the mean of the draws.

    Attributes:
        rank: number of directions.
        snapshots: number of networks along the run that span the subspace.
        burn_in: the fraction of the run before the first of these.
        momentum: of gradient descent.
        inner: the method that infers the coordinates: `HMC()`, `SGLD()`, `PSGLD()`, `SGHMC()`, `SGNHT()` or
            `Laplace()`, with its own settings, such as the number of networks to keep. `Laplace` has the full
            covariance around the mode in the subspace, from the exact Gauss-Newton matrix unless `curvature` is set.
            Every rank has its own subspace.
        draws: number of networks drawn from the Gaussian of `Laplace`.
    """

    rank: int = 5
    snapshots: int = 20
    burn_in: float = 0.0
    momentum: float = 0.9
    inner: Method = field(default_factory=_by_default)
    draws: int = 100

    name: ClassVar[str] = "subspace"

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting, least in (("rank", 1), ("snapshots", 2), ("draws", 1)):
            if getattr(self, setting) < least:
                raise ValueError(f"{setting} must be at least {least}. Got {getattr(self, setting)}.")
        if self.rank >= self.snapshots:
            raise ValueError(f"rank={self.rank} needs more than {self.rank} snapshots. Got snapshots={self.snapshots}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1). Got {self.momentum}.")
        SamplingSchedule(burn_in=self.burn_in).check()
        if not isinstance(self.inner, Method) or self.inner.name not in INNER:
            raise ValueError(
                "inner must be HMC(), SGLD(), PSGLD(), SGHMC(), SGNHT() or Laplace(), with its own settings. "
                f"Got {self.inner!r}."
            )
        asked: Any = self.inner
        if asked.subset != "all":
            raise ValueError(
                f'The coordinates of a subspace have no subsets. Use subset="all" in inner. Got {asked.subset!r}.'
            )
        if asked.name == "laplace" and asked.structure not in ("auto", "full"):
            raise ValueError(
                f'A subspace needs a full covariance. Use structure="full" in inner. Got {asked.structure!r}.'
            )

    def convert(self, bnn: Bayesian) -> None:
        """Check that the inner method supports the network."""
        self.inner.convert(bnn)

    def optimizer(self, bnn: Bayesian, lr: float) -> torch.optim.Optimizer:
        """Make the SGD optimizer whose path spans the subspace."""
        params = [p for p in bnn.parameters() if p.requires_grad]
        return torch.optim.SGD(params, lr=lr, momentum=self.momentum)

    def observe(self, bnn: Bayesian) -> None:
        """Keep the network if its step is due."""
        chain = bnn.state.get("path")
        if chain is not None:
            chain.observe(bnn)

    def fit(
        self,
        bnn: Bayesian,
        loader: Any,
        *,
        epochs: int = 10,
        lr: float = 0.01,
        inner_epochs: int | None = None,
        inner_lr: float | None = None,
        dtype: torch.dtype | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        accumulate: int = 1,
        device: torch.device | str | None = None,
        seed: int | None = None,
        progress: bool = True,
        **training: Any,
    ) -> Fit:
        """Follow gradient descent, and infer the coordinates of the subspace it spans.

        Args:
            bnn: the network, which should be trained already.
            loader: batches of inputs and targets; HMC and Laplace hold all of them.
            epochs: epochs of gradient descent.
            lr: its learning rate, constant, and large enough to keep moving.
            inner_epochs: the length of a chain, required for an inner sampler by stochastic gradients.
            inner_lr: its learning rate, also required; a coordinate of 1 is one standard deviation of the path.
            dtype: the dtype to keep the networks in; their own if not given.
            checkpoint: a folder for networks of the path, draws of coordinates, and the state of the run. An
                interrupted run resumes from it exactly.
            accumulate: batches whose gradients are averaged for one step.
            device: where to run: "auto" for a GPU if there is one, None for the device of the network.
            seed: makes the run repeatable; drawn if not given.
            progress: show a progress bar.
            **training: `validate`, `callbacks`, `clip` and `autocast`, as in `bayeslim.train.fit`.

        Returns:
            the result, with `details` of the inner method, the standard deviation of the path along each direction
            ("spread"), and the fraction of its variance that they have ("explained").
        """
        options = self._inner_options(inner_epochs, inner_lr)
        begun, (rank, world) = time.monotonic(), rank_and_world()
        folder = None if checkpoint is None else Path(checkpoint) / f"path-{rank + 1:03d}"
        if checkpoint is not None and isinstance(self.inner, ParticleMethod):
            options["checkpoint"] = Path(checkpoint) / "coordinates"
        total = epochs * prepare(bnn, loader, accumulate, device)
        base = int(torch.randint(2**62, ())) if seed is None else seed
        moving = Moving.all_of(bnn)
        steps = SamplingSchedule(burn_in=self.burn_in).kept(total, self.snapshots)
        path = KeptNetworks(moving.names, (), steps, folder=None if folder is None else folder / "samples")
        with restored_on_failure(bnn):
            bnn.step, bnn.state["path"] = 0, path
            try:
                with ordered_by(loader, seed_of_chain(base, rank)):
                    optimizer = self.optimizer(bnn, lr)
                    result = run_alone(
                        bnn, loader, optimizer, lambda done: 1.0, epochs=epochs, accumulate=accumulate,
                        checkpoint=folder, progress=progress, **training,
                    )  # fmt: skip
                    # another seed, so that chain and path have different noise
                    options |= {"dtype": dtype, "seed": base + 1, "progress": progress}
                    found, details = self._on_subspace(bnn, loader, path.particles(bnn).values, **options)
            finally:
                bnn.state.pop("path", None)
            average_noise_(bnn.likelihood, [noise_of(bnn.likelihood)], between_ranks=True)
        self.keep(bnn, between_ranks(found))
        result.details.update(details, chains=found.chains * world)
        result.seconds = time.monotonic() - begun
        return result

    def fit_stack(
        self,
        stack: Any,
        networks: Sequence[Bayesian],
        loader: Any,
        *,
        epochs: int = 10,
        lr: float = 0.01,
        inner_epochs: int | None = None,
        inner_lr: float | None = None,
        accumulate: int = 1,
        progress: bool = True,
        **training: Any,
    ) -> Fit:
        """Follow the paths of all networks at once, and infer the coordinates of each."""
        options = self._inner_options(inner_epochs, inner_lr) | {"progress": progress, "dtype": None}
        total = epochs * prepare(stack, loader, accumulate, None)
        steps = SamplingSchedule(burn_in=self.burn_in).kept(total, self.snapshots)
        path = KeptNetworks(Moving.all_of(stack).names, (), steps)
        stack.step, stack.state["path"] = 0, path
        optimizer = self.optimizer(stack, lr)
        result = run_alone(
            stack, loader, optimizer, lambda done: 1.0, epochs=epochs, accumulate=accumulate, progress=progress,
            **training,
        )  # fmt: skip
        stack.unstack(networks)
        values = path.particles(stack).values
        for place, (network, own) in enumerate(zip(networks, loader.loaders, strict=True)):
            seed = None if stack.seed is None else stack.seed + 1 + place
            found, _ = self._on_subspace(
                network, own, {n: v[:, place] for n, v in values.items()}, seed=seed, **options
            )
            self.keep(network, found)
        return result

    def _on_subspace(
        self, bnn: Bayesian, loader: Any, path: Params, **options: Any
    ) -> tuple[Particles, dict[str, Any]]:
        """Infer the coordinates of the subspace that networks of a path span.

        Returns:
            the networks, and details.
        """
        moving = Moving.all_of(bnn)
        centre, directions, share = principal_directions(flat(moving, path), self.rank)
        space = Coordinates(bnn, moving, centre, directions)
        set_tensors(bnn, space.weights(space.z))
        measure_again_(bnn.model, loader, between_ranks=False)
        with evaluating(bnn):
            found, details = self._infer(space, loader, **options)
        return found, details | {"spread": directions.norm(dim=0).tolist(), "explained": share}

    def _inner_options(self, epochs: int | None, lr: float | None) -> dict[str, Any]:
        given = {key: value for key, value in (("epochs", epochs), ("lr", lr)) if value is not None}
        name = type(self.inner).__name__
        if self.inner.name not in STOCHASTIC:
            if given:
                raise TypeError(
                    f"inner_epochs and inner_lr are for samplers by stochastic gradients. {name} takes neither."
                )
        elif len(given) < 2:
            raise TypeError(
                f"{name} needs inner_epochs=... and inner_lr=... for its steps in the subspace, where a coordinate of "
                "1 is one standard deviation of the path of gradient descent."
            )
        if self.inner.name == "laplace" and rank_and_world()[1] > 1:
            raise BayeslimError(
                "Every rank has its own subspace, and Laplace sums curvature over ranks. Use one process, or a sampler "
                "as inner."
            )
        return given

    def _infer(
        self, space: Coordinates, loader: Any, dtype: torch.dtype | None, **options: Any
    ) -> tuple[Particles, dict[str, Any]]:
        """Run the inner method on this rank; return its networks and details."""
        (bnn,), (rank, world), inner = space.owner, rank_and_world(), self.inner
        likelihood = copy.deepcopy(bnn.likelihood).requires_grad_(False)
        settings: dict[str, Any] = {"likelihood": likelihood, "num_data": bnn.data_size()}
        if isinstance(inner, ParticleMethod):
            within = bayesianize_(space, inner, prior=OnSubspace(space), **settings)
            details = within.fit(loader, **options).details
            found = inner.posterior(within)
            draws = found.values["z"].unflatten(0, (world, -1))[rank]
            return space.particles(draws, dtype, found.chains // world), details
        space, prior = with_normal_prior(space)
        asked: Any = inner
        columns = "exact" if asked.curvature in ("auto", "signs") else asked.curvature  # exact is cheap here
        within = bayesianize_(space, replace(asked, structure="full", curvature=columns), prior=prior, **settings)
        with evaluating(within):
            to_mode_(within, loader)
        within.fit(loader, **options)
        return space.particles(within.posterior_.sample(self.draws)["z"], dtype, 1), {}
