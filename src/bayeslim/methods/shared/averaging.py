"""What methods share that average the networks of a stretch of training: when it begins, and how fast it goes.

Training first comes down from the learning rate to a share of it, over the middle of the way to `start`, as Maddox et
al. do. From there on the rate stays high, so that training wanders about the optimum instead of settling in it, or
falls from high to low again and again; networks are taken at every so many steps, at the low end of the cycles.

Izmailov et al. 2018, arXiv:1803.05407 · Maddox et al. 2019, arXiv:1902.02476
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from bayeslim.errors import BayeslimError
from bayeslim.io.storage import INDEX
from bayeslim.methods.shared.trajectory import Trajectory
from bayeslim.results import Fit
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.fit import Epoch, fit
from bayeslim.train.loaders import number_of_batches

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian

FALLS_TO = 0.01
"""Where the learning rate of a cycle ends, in parts of where it starts."""


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """Settings of the stretch of training whose networks are averaged.

    Attributes:
        start: the part of training before the first network is taken.
        every: how often one is taken, "epoch" or a number of steps.
        rate: the learning rate from `start` on, as a share of the first.
        schedule: whether it is "constant" from there, or "cyclical", falling between any two networks taken.
    """

    start: float = 0.75
    every: Literal["epoch"] | int = "epoch"
    rate: float = 0.5
    schedule: Literal["constant", "cyclical"] = "constant"

    def __post_init__(self) -> None:
        if not 0 <= self.start < 1:
            raise ValueError(f"start is a part of training, in [0, 1). Got {self.start}.")
        if self.every != "epoch" and (type(self.every) is not int or self.every < 1):
            raise ValueError(f'every must be "epoch" or a number of steps, at least 1. Got {self.every!r}.')
        if not self.rate > 0:
            raise ValueError(f"rate is a share of the learning rate and must be positive. Got {self.rate}.")
        if self.schedule not in ("constant", "cyclical"):
            raise ValueError(f'schedule must be "constant" or "cyclical". Got {self.schedule!r}.')

    def factor(self, done: float, cycles: float) -> float:
        """What the learning rate is multiplied with when a fraction of training is done.

        Args:
            done: the fraction.
            cycles: how often a network would be taken in the whole of training.

        >>> [round(Averaging(start=0.5, rate=0.2).factor(done, 10), 2) for done in (0, 0.25, 0.35, 0.45, 0.9)]
        [1.0, 1.0, 0.6, 0.2, 0.2]
        """
        if done < self.start:
            way = min(1.0, max(0.0, (done / self.start - 0.5) / 0.4))
            return 1 - way * (1 - self.rate)
        if self.schedule == "constant":
            return self.rate
        # rounded, since a hair before the end of a cycle is the start of the next
        return self.rate * (1 - (1 - FALLS_TO) * (round(done * cycles, 9) % 1))

    def observe(self, bnn: Bayesian) -> None:
        """Take the network in, if it is time."""
        recording = bnn.state.get("recording")
        if recording is not None:
            recording.observe(bnn)


@dataclass(frozen=True, kw_only=True)
class GaussianAveraging(Averaging):
    """Settings of a Gaussian around the mean of the networks.

    Attributes:
        rank: K, how many of the last deviations make the low-rank part; 0 for the diagonal alone.
        scale: what the covariance Σ_diag + D Dᵀ / (K − 1) is multiplied with: ½ makes it the mean of two estimates.
            The diagonal alone is one estimate: its scale is 1 in the paper.
        samples: how many networks are drawn when training ends, where each has to be measured on data.
    """

    rank: int = 20
    scale: float = 0.5
    samples: int = 30

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
    """A run of training while it is watched."""

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
        """Take over what was before training was resumed, at a step: the averages, and the step it had begun at."""
        if self.behind:
            assert self.folder is not None
            folders = self.folder / "averages-0", self.folder / "averages-1"
            self.first = self.trajectory.read(folders, step, bnn)
            self.behind = False

    def finish_epoch(self, epoch: Epoch) -> None:
        """Written before the checkpoint of the epoch, and beside that of the one before, which it may go back to."""
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
    """Train, and leave the network at the mean of those taken on the way; its batch norms are as training left them.

    Args:
        method: when to take networks, and the learning rate.
        bnn: the network; training starts from where it is.
        loader: batches of inputs and targets.
        rank: how many deviations to keep; None for the mean alone.
        epochs: passes over the loader, in all.
        checkpoint: a folder to save to after every epoch; training goes on exactly from what it holds.
        callbacks: functions of an `Epoch`, called after each one in order.
        accumulate: batches whose gradients are averaged for one step.
        **training: further options of `bayeslim.train.fit`.
    """
    for option, why in (("lr_schedule", "start, rate and schedule are its settings"), ("patience", "it goes on")):
        if training.get(option) is not None:
            raise ValueError(f"{type(method).__name__} takes no {option}: {why}.")
    if epochs < 1 or accumulate < 1:
        raise ValueError(f"epochs and accumulate must be at least 1. Got {epochs} and {accumulate}.")
    in_epoch = math.ceil(number_of_batches(loader) / accumulate)
    every, total = in_epoch if method.every == "epoch" else method.every, epochs * in_epoch
    folder = None if checkpoint is None else Path(checkpoint)
    begin = int(method.start * total + 1e-9)
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
            f"Training ended ({result.stopped}) before a network was taken: after {begin} steps, at every {every}th. "
            "Train for more epochs, start earlier, or take one more often (every=10, in steps)."
        )
    own = dict(bnn.named_parameters())
    with torch.no_grad():
        for name, value in trajectory.mean.items():
            own[name].copy_(value)
    result.details["averaged"] = trajectory.count
    return result, trajectory
