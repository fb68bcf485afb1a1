"""KL schedules: the kl_weight of each step in  mean NLL + kl_weight · KL / num_data.

A schedule maps a position in training to a weight whose natural value is 1. Steps count optimizer steps from 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from bayeslim.errors import BayeslimError, check_number, check_settings
from bayeslim.io.registry import register


@dataclass(frozen=True)
class Position:
    """A position in training.

    Attributes:
        step: optimizer steps taken so far.
        steps_per_epoch: minibatches in an epoch, if known.
    """

    step: int
    steps_per_epoch: int | None = None

    def need_epoch_length(self, schedule: object) -> int:
        """Return `steps_per_epoch`, or raise an error that says how to give it."""
        if not self.steps_per_epoch:
            raise BayeslimError(
                f"{type(schedule).__name__} counts in epochs and needs the number of minibatches per epoch. "
                "Use bnn.fit, or bnn.optimizer(lr=..., steps_per_epoch=len(loader)) in your own loop."
            )
        return self.steps_per_epoch


class Schedule:
    """The base of KL schedules."""

    counts_epochs: ClassVar[bool] = True
    """Whether the weight depends on the number of minibatches in an epoch."""

    def __post_init__(self) -> None:
        check_settings(self)

    def weight(self, position: Position) -> float:
        """Return the weight of the KL at a position."""
        raise NotImplementedError


@register("schedule")
@dataclass(frozen=True)
class Uniform(Schedule):
    """The same weight at every step: 1 is the ELBO."""

    counts_epochs: ClassVar[bool] = False

    def weight(self, position: Position) -> float:
        """Return 1."""
        return 1.0


@register("schedule")
@dataclass(frozen=True)
class Blundell(Schedule):
    """Most of the KL of an epoch in its first minibatches (Blundell et al. 2015).

    π_i = 2^(M−i) / (2^M − 1), i = 1..M.

    The weight is M π_i, so that it averages 1 over an epoch; written as M 2^(−i) / (1 − 2^(−M)) it is finite for any M.

    >>> [round(Blundell().weight(Position(step, 3)), 4) for step in range(3)]
    [1.7143, 0.8571, 0.4286]
    """

    def weight(self, position: Position) -> float:
        """Return M π_i at minibatch i of the epoch."""
        m = position.need_epoch_length(self)
        i = position.step % m + 1
        return m * math.exp2(-i) / -math.expm1(-m * math.log(2))


@register("schedule")
@dataclass(frozen=True)
class Warmup(Schedule):
    """A linear increase from 0 to 1.

    Attributes:
        end: the epoch at which the weight reaches 1.
        start: the epoch until which it is 0.
    """

    end: float
    start: float = 0.0

    def __post_init__(self) -> None:
        check_number("end", self.end, least=0)
        check_number("start", self.start, least=0)

    def weight(self, position: Position) -> float:
        """Return a weight linear in the epoch, clipped to [0, 1]."""
        epoch = position.step / position.need_epoch_length(self)
        if self.end <= self.start:
            return float(epoch >= self.start)
        return min(1.0, max(0.0, (epoch - self.start) / (self.end - self.start)))


@register("schedule")
@dataclass(frozen=True)
class Cyclic(Schedule):
    """A linear warm-up that starts again every `period` epochs (Fu et al. 2019).

    Attributes:
        period: epochs in a cycle.
        ramp: the fraction of a cycle in which the weight rises from 0 to 1; then it stays at 1.
    """

    period: float
    ramp: float = 0.5

    def __post_init__(self) -> None:
        check_number("period", self.period, above=0)
        check_number("ramp", self.ramp, least=0)

    def weight(self, position: Position) -> float:
        """Return a weight linear within the ramp of a cycle, then 1."""
        epoch = position.step / position.need_epoch_length(self)
        phase = (epoch % self.period) / self.period
        return min(1.0, phase / self.ramp) if self.ramp > 0 else 1.0
