"""A budget of bits, spent where the posterior says that they matter."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeslim.quantise.allocate import TooSmall, allocate
from bayeslim.quantise.fitting import nearest_losses
from bayeslim.quantise.source import Source

WIDTHS = tuple(range(1, 9))
"""The widths that a budget is spent on."""


class Spending:
    """The losses of all widths, measured once; `at` says which to take for a budget.

    Args:
        source: what is to be rounded.
    """

    def __init__(self, source: Source):
        self.source = source
        self.options: list[list[tuple[float, float]]] = []
        for weights in source.weights.values():
            counts = weights.counts.tolist()
            losses = [nearest_losses(weights, bits).tolist() for bits in WIDTHS]
            self.options += [
                [(bits * count, loss[unit]) for bits, loss in zip(WIDTHS, losses, strict=True)]
                for unit, count in enumerate(counts)
            ]

    def at(self, mean_bits: float) -> dict[str, Tensor]:
        """The widths (units,) by name with the least loss for a mean width over the kept weights.

        Raises:
            ValueError: if even the smallest widths take more.
        """
        kept = self.source.kept
        try:
            chosen = allocate(self.options, mean_bits * kept)
        except TooSmall as error:
            raise ValueError(
                f"A budget of {mean_bits:g} bits a weight is impossible: the least is {error.args[0] / kept:g}. "
                "Cut weights first (bl.prune), or ask for more."
            ) from None
        found, start = {}, 0
        for name, weights in self.source.weights.items():
            own = [WIDTHS[place] for place in chosen[start : start + weights.units]]
            found[name] = torch.tensor(own, device=weights.values.device)
            start += weights.units
        return found
