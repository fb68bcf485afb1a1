"""A budget of bits, spent where it lowers the expected loss most."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeslim.quantise.allocate import TooSmall, allocate
from bayeslim.quantise.fitting import nearest_losses
from bayeslim.quantise.source import Source

WIDTHS = tuple(range(1, 9))
"""The bits per weight that a layer or unit may get."""


class Spending:
    """The expected losses of all widths, computed once, and the best widths for any budget."""

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
        """Choose the bits (units,) by name with the least loss.

        Their mean per non-zero weight is at most `mean_bits`.

        Raises:
            ValueError: if even the fewest bits exceed the budget.
        """
        kept = self.source.kept
        try:
            chosen = allocate(self.options, mean_bits * kept)
        except TooSmall as error:
            raise ValueError(
                f"A budget of {mean_bits:g} bits per weight is impossible: the least is {error.args[0] / kept:g}. "
                "Raise the budget, or cut weights first (bl.prune)."
            ) from None
        found, start = {}, 0
        for name, weights in self.source.weights.items():
            own = [WIDTHS[place] for place in chosen[start : start + weights.units]]
            found[name] = torch.tensor(own, device=weights.values.device)
            start += weights.units
        return found
