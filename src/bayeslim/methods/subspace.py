"""Subspace inference: Hamiltonian Monte Carlo in the few directions that gradient descent itself moves in.

    w = ŵ + P z          p(z|D) ∝ p(D|ŵ + P z) p(ŵ + P z)          z of a few dimensions

ŵ is the mean of networks along a run of stochastic gradient descent with momentum and a constant learning rate, and the
columns of P are the principal directions of these networks around ŵ, each as long as their standard deviation along it.
The prior of z is the prior of the weights on the subspace. A few directions cannot have the posterior's whole spread;
`temperature` widens it (Izmailov et al. take the number of weights over that of directions as an upper end).

Izmailov et al. 2019, arXiv:1907.07504
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from bayeslim.errors import BayeslimError
from bayeslim.methods.batch_statistics import measuring, norms_of
from bayeslim.methods.full_batch import FullBatch
from bayeslim.methods.moving import Moving
from bayeslim.methods.particle_method import ParticleMethod
from bayeslim.posteriors.particles import Particles
from bayeslim.progress import progress as progress_bar
from bayeslim.results import Fit
from bayeslim.samplers.chain import Chain
from bayeslim.samplers.leapfrog import Trace, hamiltonian_monte_carlo
from bayeslim.samplers.run import between_ranks, joined, ordered_by, prepare, rank_and_world, run_alone, seed_of_chain
from bayeslim.samplers.schedule import Schedule
from bayeslim.stochastic import evaluating
from bayeslim.types import call, device_of, split_batch, to_device

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian


@dataclass(frozen=True)
class Subspace(ParticleMethod):
    """Hamiltonian Monte Carlo in a subspace; the network is left at the mean of the draws.

    Attributes:
        rank: how many directions.
        snapshots: how many networks along the run they are the directions of.
        burn_in: the part of the run before the first of these.
        momentum: of gradient descent.
        samples: how many networks each chain keeps.
        warmup: iterations of a chain before the first of them.
        leapfrog: the most steps of a trajectory.
        temperature: T of the target p(z|D)^(1/T).
        chains: how many chains, on every rank; each rank has a subspace of its own.
    """

    rank: int = 5
    snapshots: int = 20
    burn_in: float = 0.0
    momentum: float = 0.9
    samples: int = 100
    warmup: int = 200
    leapfrog: int = 20
    temperature: float = 1.0
    chains: int = 1

    name: ClassVar[str] = "subspace"

    def __post_init__(self) -> None:
        for setting, least in (("rank", 1), ("snapshots", 2), ("samples", 1), ("leapfrog", 1), ("chains", 1)):
            if getattr(self, setting) < least:
                raise ValueError(f"{setting} must be at least {least}. Got {getattr(self, setting)}.")
        if self.rank >= self.snapshots:
            raise ValueError(f"{self.rank} directions need more snapshots than that. Got {self.snapshots}.")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive. Got {self.temperature}.")
        Schedule(burn_in=self.burn_in).check()

    def optimizer(self, bnn: Bayesian, lr: float) -> torch.optim.Optimizer:
        """Stochastic gradient descent, whose path spans the subspace."""
        params = [p for p in bnn.parameters() if p.requires_grad]
        return torch.optim.SGD(params, lr=lr, momentum=self.momentum)

    def observe(self, bnn: Bayesian) -> None:
        """Keep the network, if it is time."""
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
        dtype: torch.dtype | None = None,
        accumulate: int = 1,
        device: torch.device | str | None = None,
        seed: int | None = None,
        progress: bool = True,
        **training: Any,
    ) -> Fit:
        """Follow gradient descent, and sample in the subspace it spans.

        Args:
            bnn: the network, which should be trained already.
            loader: batches of inputs and targets; the chains hold all of them.
            epochs: of gradient descent.
            lr: its learning rate, constant, so large that it wanders.
            dtype: to keep the networks in; the network's own if not given.
            accumulate: batches whose gradients are averaged for one step.
            device: where to run, "auto" for a GPU if there is one; None for where the network is.
            seed: makes the run repeat; drawn if not given.
            progress: show a progress bar.
            **training: `validate`, `callbacks`, `clip` and `autocast`, as in `bayeslim.train.fit`.

        Returns:
            with `details`: acceptance and divergences of every chain, the spread along each direction, and the part of
            the path's variance that they have.
        """
        begun, (rank, world) = time.monotonic(), rank_and_world()
        total = epochs * prepare(bnn, loader, accumulate, device)
        base = seed_of_chain(int(torch.randint(2**62, ())) if seed is None else seed, rank)
        moving = Moving.all_of(bnn)
        previous = bnn.state.pop("posterior", None)
        path = Chain(moving.names, (), Schedule(burn_in=self.burn_in).kept(total, self.snapshots))
        bnn.step, bnn.state["path"] = 0, path
        try:
            with ordered_by(loader, base):
                optimizer = self.optimizer(bnn, lr)
                result = run_alone(
                    bnn, loader, optimizer, lambda done: 1.0, epochs=epochs, accumulate=accumulate,
                    progress=progress, **training,
                )  # fmt: skip
                potential = FullBatch(bnn, moving, loader, self.temperature)
                centre, directions, share = self._span(path.particles(bnn), potential)
                potential.put(centre)
                _settle_norms(bnn, loader)
                with evaluating(bnn):
                    within = _Within(potential, centre, directions)
                    traces = [self._chain(within, progress and rank == 0) for _ in range(self.chains)]
                    found = [potential.particles(centre + trace.draws @ directions.T, dtype) for trace in traces]
        except BaseException:
            if previous is not None:
                bnn.state["posterior"] = previous
            raise
        finally:
            bnn.state.pop("path", None)
        self.keep(bnn, between_ranks(joined(found)))
        result.details.update(
            chains=self.chains * world,
            acceptance=[trace.acceptance for trace in traces],
            divergences=[trace.divergences for trace in traces],
            spread=directions.norm(dim=0).tolist(),
            explained=share,
        )
        result.seconds = time.monotonic() - begun
        return result

    def _span(self, path: Particles, potential: FullBatch) -> tuple[Tensor, Tensor, float]:
        """The mean of a path (D,), its directions (D, rank), and the part of its variance that they have."""
        networks = torch.stack([potential.flat(path.particle(k)) for k in range(path.count)])
        rank = min(self.rank, path.count - 1)
        if rank < 1:
            raise BayeslimError("One network spans no direction. Follow gradient descent for more steps.")
        centre = networks.mean(0)
        _, sizes, vectors = torch.linalg.svd((networks - centre) / (path.count - 1) ** 0.5, full_matrices=False)
        if not float(sizes[0]) > 0:
            raise BayeslimError("Gradient descent did not move, so it spans no direction. Use a larger lr.")
        usable = max(1, int((sizes[:rank] > 1e-6 * sizes[0]).sum()))
        directions = (vectors[:usable] * sizes[:usable, None]).T.contiguous()
        variances = sizes.double().square()
        return centre, directions, float(variances[:usable].sum() / variances.sum())

    def _chain(self, within: _Within, shown: bool) -> Trace:
        return hamiltonian_monte_carlo(
            within,
            within.directions.new_zeros(within.directions.shape[1]),
            samples=self.samples,
            warmup=self.warmup,
            leapfrog=self.leapfrog,
            watch=lambda iterations: progress_bar(iterations, "hmc", enabled=shown),
        )


@dataclass(frozen=True)
class _Within:
    """The potential of z, U(ŵ + P z)."""

    potential: FullBatch
    centre: Tensor
    directions: Tensor

    def __call__(self, z: Tensor) -> tuple[float, Tensor]:
        energy, gradient = self.potential(self.centre + self.directions @ z)
        return energy, self.directions.T @ gradient


def _settle_norms(bnn: Bayesian, loader: Any) -> None:
    """The statistics of batch norms belong to the weights: measure them again, over all the data of this rank."""
    norms = norms_of(bnn.model)
    with measuring(bnn.model, momentum=None):
        for norm in norms:
            norm.reset_running_stats()
        for batch in loader if norms else ():
            call(bnn.model, to_device(split_batch(batch), device_of(bnn.model))[0])
