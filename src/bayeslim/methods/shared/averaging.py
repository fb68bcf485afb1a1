"""The base of methods that average networks along training: their settings, schedule and training run.

The learning rate first falls to a fraction of its value, in the middle of the time before `start`, as in Maddox et al.
Then it stays constant, so that training moves around the optimum instead of converging, or it cycles from high to low.
Networks are taken every so many steps, at the low end of the cycles.

Izmailov et al. 2018, arXiv:1803.05407 · Maddox et al. 2019, arXiv:1902.02476
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, check_settings
from bayeslim.io.storage import INDEX
from bayeslim.methods.shared.refit import restored_on_failure
from bayeslim.methods.shared.trajectory import Trajectory
from bayeslim.posteriors import Posterior
from bayeslim.results import Fit
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.fit import Epoch, fit
from bayeslim.train.loaders import number_of_batches
from bayeslim.train.options import check_names, check_values
from bayeslim.train.seeding import seeded

CYCLE_END_FRACTION = 0.01
"""The learning rate at the end of a cycle, as a fraction of that at its start."""


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """Settings of the part of training whose networks are averaged.

    Attributes:
        start: the fraction of training before the first network is taken.
        every: how often a network is taken: "epoch" or a number of steps.
        rate: the learning rate from `start` on, as a fraction of the first.
        schedule: "constant" from `start` on, or "cyclical", falling between two networks taken.
    """

    start: float = 0.75
    every: Literal["epoch"] | int = "epoch"
    rate: float = 0.5
    schedule: Literal["constant", "cyclical"] = "constant"

    min_networks: ClassVar[int] = 1
    """The least number of networks for a result."""

    def __post_init__(self) -> None:
        check_settings(self)
        if not 0 <= self.start < 1:
            raise ValueError(f"start is a fraction of training, in [0, 1). Got {self.start}.")
        if self.every != "epoch" and (type(self.every) is not int or self.every < 1):
            raise ValueError(f'every must be "epoch" or a number of steps, at least 1. Got {self.every!r}.')
        if not self.rate > 0:
            raise ValueError(f"rate is a fraction of the learning rate and must be positive. Got {self.rate}.")
        if self.schedule not in ("constant", "cyclical"):
            raise ValueError(f'schedule must be "constant" or "cyclical". Got {self.schedule!r}.')

    def factor(self, done: float, cycles: float) -> float:
        """Return the factor on the learning rate at a fraction of training.

        Args:
            done: the fraction of training done.
            cycles: number of networks that would be taken in the whole of training.

        >>> [round(Averaging(start=0.5, rate=0.2).factor(done, 10), 2) for done in (0, 0.25, 0.35, 0.45, 0.9)]
        [1.0, 1.0, 0.6, 0.2, 0.2]
        """
        if done < self.start:
            way = min(1.0, max(0.0, (done / self.start - 0.5) / 0.4))
            return 1 - way * (1 - self.rate)
        if self.schedule == "constant":
            return self.rate
        # rounded, so that the last step before the end of a cycle counts as the start of the next
        return self.rate * (1 - (1 - CYCLE_END_FRACTION) * (round(done * cycles, 9) % 1))

    def steps_of(self, loader: Any, epochs: int, accumulate: int) -> tuple[int, int]:
        """Return the steps between two networks taken, and the steps of training."""
        per_epoch = math.ceil(number_of_batches(loader) / accumulate)
        return per_epoch if self.every == "epoch" else self.every, epochs * per_epoch

    def first_step(self, total: int) -> int:
        """Return the step after which networks are taken."""
        return int(self.start * total + 1e-9)

    def check_fit(self, bnn: Bayesian, loader: Any, epochs: int, training: Mapping[str, Any]) -> None:
        """Raise for refused options, and if too few networks would be taken."""
        reasons = {"lr_schedule": "it has the settings start, rate and schedule", "patience": "it averages to the end"}
        check_names(type(self).__name__, training, fit, reasons)
        if epochs < 1:
            raise ValueError(f"epochs must be at least 1. Got {epochs}.")
        check_values(training)
        every, total = self.steps_of(loader, epochs, training.get("accumulate") or 1)
        planned = total // every - self.first_step(total) // every
        if planned < self.min_networks:
            raise BayeslimError(
                f"{type(self).__name__} averages networks along training and needs at least {self.min_networks}. In "
                f"{epochs} epochs of {total // epochs} steps it would take {planned}: one every {every} steps after "
                f"step {self.first_step(total)}. Train for more epochs, start earlier (start=0.5), or take one more "
                "often (every=10, in steps)."
            )

    def fit(self, bnn: Bayesian, loader: Any, *, epochs: int = 10, seed: int | None = None, **training: Any) -> Fit:
        """Train, average networks along training, and measure batch norms for their mean.

        Args:
            bnn: the network; training starts from where it is.
            loader: batches of inputs and targets.
            epochs: passes over the loader in all.
            seed: makes the run repeatable, and leaves the global random state unchanged.
            **training: options of `bayeslim.train.fit`, except `lr_schedule` and `patience`. The papers' optimizer is
                SGD with momentum; Adam is used if none is given.
        """
        self.check_fit(bnn, loader, epochs, training)
        with restored_on_failure(bnn):
            rank = getattr(self, "rank", None)
            result, trajectory = averaged(self, bnn, loader, rank, epochs=epochs, seed=seed, **training)
            with seeded(seed, rank_and_world()[0], loader):
                found = self.found(bnn, trajectory, loader)
        bnn.state.update(found)
        return result

    def fit_stack(
        self,
        stack: Any,
        networks: Sequence[Bayesian],
        loader: Any,
        *,
        epochs: int = 10,
        **training: Any,
    ) -> Fit:
        """Average all networks along training at once, and measure each as `fit` does."""
        self.check_fit(stack, loader, epochs, training)
        rank = getattr(self, "rank", None)
        result, trajectory = averaged(self, stack, loader, rank, epochs=epochs, **training)
        stack.unstack(networks)
        for place, (network, own) in enumerate(zip(networks, loader.loaders, strict=True)):
            network.state.update(self.found(network, trajectory.of(place), own))
        return result

    def found(self, bnn: Bayesian, trajectory: Trajectory, loader: Any) -> dict[str, Posterior]:
        """Build the part of `bnn.state` that is kept, for a network at the mean."""
        raise NotImplementedError

    def observe(self, bnn: Bayesian) -> None:
        """Add the network to the averages if its step is due."""
        recording = bnn.state.get("recording")
        if recording is not None:
            recording.observe(bnn)


@dataclass(frozen=True, kw_only=True)
class GaussianAveraging(Averaging):
    """Settings of a Gaussian around the mean of the networks.

    Attributes:
        rank: K, the number of last deviations in the low-rank part; 0 for the diagonal alone.
        scale: the factor on the covariance Σ_diag + D Dᵀ / (K − 1). ½ makes it the mean of two estimates. The diagonal
            alone is one estimate, for which the paper uses 1.
        samples: number of networks drawn at the end of training, where batch norms of each must be measured on data.
    """

    rank: int = 20
    scale: float = 0.5
    samples: int = 30

    min_networks: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.rank) is not int or self.rank < 0 or self.rank == 1:
            raise ValueError(f"rank must be 0, or a whole number of deviations, at least 2. Got {self.rank!r}.")
        if not self.scale > 0:
            raise ValueError(f"scale must be positive. Got {self.scale}.")
        if type(self.samples) is not int or self.samples < 1:
            raise ValueError(f"samples must be a whole number, at least 1. Got {self.samples!r}.")


@dataclass
class _Recording:
    """The averages of a training run and the steps at which they are taken."""

    trajectory: Trajectory
    begin: int
    every: int
    first: int
    folder: Path | None
    behind: bool

    def observe(self, bnn: Bayesian) -> None:
        self.catch_up(bnn, bnn.step - 1)
        step = bnn.step - self.first
        if step > self.begin and step % self.every == 0:
            self.trajectory.add(bnn)

    def catch_up(self, bnn: Bayesian, step: int) -> None:
        """Load the averages of a resumed run at a step, and the step it began at."""
        if self.behind:
            assert self.folder is not None
            folders = self.folder / "averages-0", self.folder / "averages-1"
            self.first = self.trajectory.read(folders, step, bnn)
            self.behind = False

    def finish_epoch(self, epoch: Epoch) -> None:
        """Write the averages before the checkpoint, beside those of the epoch before."""
        if self.folder is not None and rank_and_world()[0] == 0:
            folder = self.folder / f"averages-{epoch.number % 2}"
            self.trajectory.write(folder, self.first, epoch.bnn.step)


def averaged(
    method: Averaging,
    bnn: Bayesian,
    loader: Any,
    rank: int | None,
    *,
    epochs: int,
    checkpoint: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Any] = (),
    accumulate: int = 1,
    **training: Any,
) -> tuple[Fit, Trajectory]:
    """Train, and set the network to the mean of the networks taken.

    Batch norms stay as training left them. `rank` is the number of deviations to keep; None keeps the mean alone.
    """
    every, total = method.steps_of(loader, epochs, accumulate)
    folder = None if checkpoint is None else Path(checkpoint)
    begin = method.first_step(total)
    resumes = folder is not None and (folder / INDEX).is_file()
    recording = _Recording(Trajectory(rank, bnn.sites.names), begin, every, bnn.step, folder, behind=resumes)
    bnn.state["recording"] = recording
    try:
        result = fit(
            bnn, loader, epochs=epochs, lr_schedule=lambda done: method.factor(done, total / every),
            checkpoint=checkpoint, callbacks=[*callbacks, recording.finish_epoch], accumulate=accumulate, **training,
        )  # fmt: skip
        recording.catch_up(bnn, bnn.step)
    finally:
        del bnn.state["recording"]
    trajectory = recording.trajectory
    if not trajectory.count:
        raise BayeslimError(
            f"No network was averaged: training ended ({result.stopped}) before the first was due, at a multiple of "
            f"{every} after {begin} steps. Train for more epochs, start earlier, or average more often (every=10, in "
            "steps)."
        )
    move_to_mean_(bnn, trajectory)
    result.details["averaged"] = trajectory.count
    return result, trajectory


@torch.no_grad()
def move_to_mean_(bnn: Bayesian, trajectory: Trajectory) -> None:
    """Set a network to the mean of the networks taken."""
    own = dict(bnn.named_parameters())
    for name, value in trajectory.mean.items():
        own[name].copy_(value)
