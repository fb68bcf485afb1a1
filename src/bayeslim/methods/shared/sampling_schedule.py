"""The step sizes of a chain, and which of its steps are kept.

    constant      lr
    polynomial    lr (1 + κ t/T)^(−γ), down to a tenth at the end (Welling & Teh 2011, γ = 0.55)
    cyclical      lr ½ (1 + cos π r), r the fraction of a cycle that is done (Zhang et al. 2020, arXiv:1902.03932)

Steps are kept after the burn-in, at equal distances of the chain's own time Σ lr. Where step sizes fall, single steps
would need weights in proportion to them; steps that lie equally far apart in time have equal weights. In cyclical runs
every cycle first explores, without noise, and then samples; the burn-in is the fraction of a cycle that explores.
(Scales of weights are measured in the first cycle, which then explores with noise.)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

Kind = Literal["constant", "polynomial", "cyclical"]

DECAY_EXPONENT = 0.55
"""γ."""
FINAL_FRACTION = 0.1
"""The last step size of a polynomial schedule, as a fraction of the first."""
_STRETCH = FINAL_FRACTION ** (-1 / DECAY_EXPONENT) - 1


@dataclass(frozen=True)
class SamplingSchedule:
    """The schedule of a chain.

    Attributes:
        kind: how step sizes change.
        burn_in: the fraction of the run, or of every cycle, from which no network is kept.
        cycles: number of cycles of a cyclical run.
    """

    kind: Kind = "constant"
    burn_in: float = 0.5
    cycles: int = 4

    def check(self) -> None:
        """Raise if a setting is out of range."""
        if self.kind not in get_args(Kind):
            raise ValueError(f"schedule must be one of {', '.join(get_args(Kind))}. Got {self.kind!r}.")
        if not 0 <= self.burn_in < 1:
            raise ValueError(f"burn_in is a fraction of the run, in [0, 1). Got {self.burn_in}.")
        if not isinstance(self.cycles, int) or self.cycles < 1:
            raise ValueError(f"cycles must be a whole number, at least 1. Got {self.cycles!r}.")

    @property
    def windows(self) -> int:
        """Number of sampling windows of the run."""
        return self.cycles if self.kind == "cyclical" else 1

    def factor(self, done: float) -> float:
        """Return the factor on the step size at a fraction of the run.

        >>> [round(SamplingSchedule("cyclical", cycles=2).factor(done), 2) for done in (0, 0.25, 0.49, 0.5, 0.75)]
        [1.0, 0.5, 0.0, 1.0, 0.5]
        >>> round(SamplingSchedule("polynomial").factor(1.0), 3)
        0.1
        """
        if self.kind == "polynomial":
            return float((1 + done * _STRETCH) ** -DECAY_EXPONENT)
        if self.kind == "cyclical":
            return 0.5 * (1 + math.cos(math.pi * self._phase(done)))
        return 1.0

    def explores(self, done: float) -> bool:
        """Return whether a cycle explores without noise at a fraction of the run."""
        return self.kind == "cyclical" and self._phase(done) < self.burn_in

    def _phase(self, done: float) -> float:
        # rounded, so that the last step before the end of a cycle counts as the start of the next
        return round(done * self.cycles, 9) % 1

    def burn_in_steps(self, total: int) -> int:
        """Count the steps before the first that may be kept."""
        return self._windows(total)[0][0]

    def kept(self, total: int, samples: int, thinning: int | None = None) -> tuple[int, ...]:
        """List the steps to keep, counted from 1; fewer than `samples` if there are fewer.

        Args:
            total: steps of the run.
            samples: number of steps to keep.
            thinning: steps between two of them, counted back from the end; if not given they are spread over the steps
                after the burn-in.

        >>> SamplingSchedule(burn_in=0.5).kept(100, 5)
        (60, 70, 80, 90, 100)
        >>> SamplingSchedule("cyclical", burn_in=0.5, cycles=2).kept(100, 4)
        (38, 50, 88, 100)
        >>> SamplingSchedule("cyclical", burn_in=0.5, cycles=2).kept(100, 4, thinning=2)
        (48, 50, 98, 100)
        """
        if total < self.windows:
            raise ValueError(f"{self.cycles} cycles need at least as many steps. Got {total}: train for more epochs.")
        found: list[int] = []
        for index, (first, last) in enumerate(self._windows(total)):
            quota = samples * (index + 1) // self.windows - samples * index // self.windows
            if thinning is not None:
                found += sorted(range(last, first, -thinning)[:quota])
            else:
                found += self._spread(first, last, quota, total)
        return tuple(found)

    def _windows(self, total: int) -> list[tuple[int, int]]:
        """List the sampling windows as (first, last], each at least one step long."""
        ends = [round(total * (index + 1) / self.windows) for index in range(self.windows)]
        starts = [0, *ends[:-1]]
        return [
            (min(start + int(self.burn_in * (end - start)), end - 1), end)
            for start, end in zip(starts, ends, strict=True)
        ]

    def _spread(self, first: int, last: int, quota: int, total: int) -> list[int]:
        # in cyclical runs every step has the same weight, as in the paper: lr is zero at the end of a cycle
        even = self.kind == "cyclical"
        times = [1.0 if even else self.factor((step - 1) / total) for step in range(first + 1, last + 1)]
        passed = list(accumulate(times))
        quota = min(quota, len(times))
        wanted = [(index + 1) / quota * passed[-1] * (1 - 1e-12) for index in range(quota)]
        return sorted({first + 1 + bisect_left(passed, time) for time in wanted})
