"""MultiSWAG: a mixture of SWAG Gaussians, each around its own mode.

    q(θ) = (1/M) Σ_m N(θ_m, Σ_m),        θ_m, Σ_m the moments of training from the m-th random start (`SWAG`)

A deep ensemble finds the modes, and SWAG their width. The posterior consists of networks drawn from the mixture,
equally many from each Gaussian, each with batch norms measured for its own weights.

Wilson & Izmailov 2020, arXiv:2002.08791
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import nn

from bayeslim.bayesian import Bayesian
from bayeslim.io.registry import register
from bayeslim.methods.shared.abreast import Stack
from bayeslim.methods.shared.averaging import GaussianAveraging, averaged
from bayeslim.methods.shared.batch_statistics import drawn
from bayeslim.methods.shared.chain_run import joined
from bayeslim.methods.shared.learned_noise import average_noise_, noise_of
from bayeslim.methods.shared.members import joined_members, new_members
from bayeslim.methods.shared.particle_method import ParticleMethod
from bayeslim.methods.shared.refit import restored_on_failure
from bayeslim.methods.shared.reinitialise import (
    OptimizerOf,
    check_optimizer_of,
    check_resettable,
    reinitialise_,
    trainable,
)
from bayeslim.results import Fit
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.seeding import seed_of_chain, seeded


@register("method")
@dataclass(frozen=True, kw_only=True)
class MultiSWAG(GaussianAveraging, ParticleMethod):
    """Networks drawn around several modes; further settings as in `GaussianAveraging`.

    The network itself is set to the last one drawn, as their mean is not a useful network.

    Attributes:
        members: number of modes.
        samples: number of networks drawn around each.
    """

    members: int = 3
    samples: int = 10

    name: ClassVar[str] = "multi-swag"
    stands_at: ClassVar[Literal["mean", "last"]] = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.members) is not int or self.members < 1:
            raise ValueError(f"members must be a whole number, at least 1. Got {self.members!r}.")

    def fit(
        self,
        bnn: Bayesian,
        loader: Any,
        *,
        epochs: int = 10,
        start: Callable[[], nn.Module] | None = None,
        optimizer: OptimizerOf | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        **training: Any,
    ) -> Fit:
        """Train every member from a random start, and draw networks around each.

        Learned noise of the likelihood is averaged over the members.

        Args:
            bnn: the network. Members of a pruned network start from its weights, since its zeros belong to them.
            loader: batches of inputs and targets, read by each member.
            epochs: passes over the loader of every member.
            start: a function that makes a new network, for modules that cannot draw new random weights themselves.
            optimizer: a function that makes an optimizer of the parameters; Adam if not given.
            checkpoint: a folder to save to after every epoch; an interrupted run resumes from it exactly.
            seed: makes the run repeatable, and leaves the global random state unchanged.
            **training: options of `bayeslim.train.fit`, except `lr_schedule` and `patience`.

        Returns:
            the history of all members, each epoch with the number of its member (from 1).
        """
        check_optimizer_of(optimizer, "Every member needs its own optimizer.")
        self.check_fit(bnn, loader, epochs, training)
        if start is None and not bnn.masks:
            check_resettable(bnn.model)
        step, result, found, noises = bnn.step, Fit(), [], []
        begin = {name: value.clone() for name, value in bnn.state_dict().items()}
        with restored_on_failure(bnn):
            for member in range(self.members):
                own = None if seed is None else seed_of_chain(seed, member)
                folder = None if checkpoint is None else Path(checkpoint) / f"member-{member + 1}"
                with seeded(own, rank_and_world()[0], loader):
                    bnn.load_state_dict(begin)
                    bnn.step = step
                    if not bnn.masks:
                        reinitialise_(bnn.model, start)
                    done, trajectory = averaged(
                        self, bnn, loader, self.rank, epochs=epochs, checkpoint=folder,
                        optimizer=None if optimizer is None else optimizer(trainable(bnn)), **training,
                    )  # fmt: skip
                    found.append(drawn(bnn, trajectory.gaussian(self.scale), loader, self.samples))
                    noises.append(noise_of(bnn.likelihood))
                result.history += [{"member": member + 1, **epoch} for epoch in done.history]
                result.seconds += done.seconds
                result.resumed_from += done.resumed_from
                result.stopped = done.stopped
            average_noise_(bnn.likelihood, noises)
        self.keep(bnn, joined(found))
        return result

    def fit_stack(
        self, stack: Any, networks: Sequence[Bayesian], loader: Any, *, epochs: int = 10, **training: Any
    ) -> Fit:
        """Train the members of all networks at once, and draw networks around each."""
        self.check_fit(stack, loader, epochs, training)
        members = new_members(networks, self.members)
        every, loaders = Stack.of(members), loader.repeated(self.members)
        every.num_data, every.seed = stack.num_data, stack.seed
        result, trajectory = averaged(self, every, loaders, self.rank, epochs=epochs, **training)
        joined_members(every, networks, members, result)
        found = [
            drawn(one, trajectory.of(place).gaussian(self.scale), own, self.samples)
            for place, (one, own) in enumerate(zip(members, loaders.loaders, strict=True))
        ]
        for place, network in enumerate(networks):
            self.keep(network, joined(found[place * self.members : (place + 1) * self.members]))
        return result
