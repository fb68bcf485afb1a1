"""The path of standard deviations over training: whether they still move at its end."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bayeslim.errors import BayeslimWarning

LAST_FRACTION, MAX_STD_CHANGE, MAX_STEADY_CHANGE = 0.2, 1.1, 1.01
"""σ still moves if it changed by more than the first factor, on (geometric) average, over this last fraction of epochs.
From the second factor on it still moves if it did not slow down: if it moved at more than half of its average pace."""


class Widths:
    """Averages of log σ after every epoch.

    Args:
        log_stds: returns the present log σ of every parameter.
    """

    def __init__(self, log_stds: Callable[[], Sequence[Tensor]]):
        self._log_stds = log_stds
        self._start = [log_std.detach().clone() for log_std in log_stds()]
        self._path: list[tuple[float, float]] = []
        self.measure()

    @torch.no_grad()
    def measure(self) -> None:
        """Average log σ, and its distance from the start, over the weights that are left."""
        values = torch.cat([log_std.flatten() for log_std in self._log_stds()])
        start = torch.cat([log_std.flatten() for log_std in self._start]).to(values)
        left = values.isfinite() & start.isfinite()
        self._path.append((float(values[left].mean()), float((values[left] - start[left]).abs().mean())))

    @property
    def epochs(self) -> int:
        """The number of epochs measured."""
        return len(self._path) - 1

    @property
    def last(self) -> int:
        """The number of epochs that are the end of training."""
        return min(self.epochs, max(1, round(LAST_FRACTION * self.epochs)))

    @property
    def change(self) -> float:
        """The factor by which σ changed at the end, on (geometric) average."""
        return math.exp(self._path[-1][0] - self._path[-1 - self.last][0])

    def warn_if_moving(self) -> None:
        """Warn if σ still moved at the end."""
        distance = self._path[-1][1]
        step = abs(distance - self._path[-1 - self.last][1])
        is_steady = step > 0.5 * distance * self.last / max(1, self.epochs)
        moved = max(abs(math.log(self.change)), step)
        if moved <= math.log(MAX_STEADY_CHANGE if is_steady else MAX_STD_CHANGE):
            return
        warnings.warn(
            f"Standard deviations were still moving when training ended: by a factor of {math.exp(moved):.2f} in the "
            f"last {self.last} of {self.epochs} epochs. Uncertainty is {'under' if self.change > 1 else 'over'}stated. "
            "Train for more epochs, or use a larger Variational(std_rate=...).",
            BayeslimWarning,
            stacklevel=4,
        )
