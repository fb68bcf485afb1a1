"""What to expect of codes before any was coded: the posterior's own probabilities, as a curve.

The posterior has some of its mass near every level that a weight may be rounded to (`Quantised.probabilities`). The
writer knows it and the reader does not, and the whole table would take more bytes than it saves. So the file holds the
few numbers of the curve that is closest to it,

    P(|code| = k) ∝ k^a 2^(−bk),

for small weights were cut, and large ones are rare. The curve is the mean of a Dirichlet prior, worth as many
observations as serve the file best; what is coded adds to it (`adaptive.py`). A plain network has no posterior, and its
own codes take the place of the posterior's masses.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bayeslim.coding.coders import Coder
from bayeslim.coding.logarithms import ONE, log2, power
from bayeslim.quantise import Codebook, Quantised

Masses = NDArray[np.float64]

HALF_EXPONENTS = (0, 1, 2, 4, 6, 8, 12, 16)
"""2a of the curves."""

RATES = 32
"""How many b there are: from 4 downwards, four of them to a halving."""

WEIGHTS = (4, 16, 64, 256)
"""How many observations a curve may be worth."""


@dataclass(frozen=True)
class Curve:
    """The sizes to expect, by places in `HALF_EXPONENTS`, the b of `bits_a_step` and `WEIGHTS`."""

    exponent: int
    rate: int
    weight: int

    def code(self, coder: Coder) -> Curve:
        """Pass it through a coder."""
        exponent, rate = coder.uniform(self.exponent, len(HALF_EXPONENTS)), coder.uniform(self.rate, RATES)
        return Curve(exponent, rate, coder.uniform(self.weight, len(WEIGHTS)))

    @property
    def worth(self) -> int:
        """How many observations."""
        return WEIGHTS[self.weight]

    def below(self, count: int) -> list[int]:
        """The shares of all sizes below each of 1 to `count` and below `count` + 1, in integers."""
        half, step = HALF_EXPONENTS[self.exponent], bits_a_step(self.rate)
        costs = [step * size - half * log2(size) // 2 for size in range(1, count + 1)]
        least = min(costs)
        return list(itertools.accumulate((power(cost - least) + 1 for cost in costs), initial=0))


def bits_a_step(rate: int) -> int:
    """ONE times b."""
    return power((RATES - 1 - rate) * ONE // 4) << 6


def closest_curve(masses: Masses) -> Curve:
    """The curve that has the least cross-entropy to these masses of the sizes 1, 2, ..."""
    sizes = np.arange(1, len(masses) + 1)
    exponents = np.array(HALF_EXPONENTS)[:, None, None] / 2
    steps = np.array([bits_a_step(rate) / ONE for rate in range(RATES)])[None, :, None]
    logs = exponents * np.log2(sizes) - steps * sizes
    logs -= np.log2(np.exp2(logs - logs.max(-1, keepdims=True)).sum(-1, keepdims=True)) + logs.max(-1, keepdims=True)
    exponent, rate = divmod(int((logs @ masses).argmax()), RATES)
    return Curve(exponent, rate, 0)


@dataclass(frozen=True)
class Expected:
    """What a posterior says of one parameter.

    Attributes:
        sizes: how probable each size of a code is, from 1.
        columns: how many non-zeros each column is to have.
    """

    sizes: Masses
    columns: Masses | None = None


def expectations(quantised: Quantised) -> dict[str, Expected]:
    """What the posterior that a network was rounded by says of its codes, by parameter."""
    sizes = _expected_sizes(quantised)
    columns = {name: present.flatten().cpu().numpy() for name, present in quantised.presence.items()}
    return {name: Expected(masses, columns.get(name)) for name, masses in sizes.items()}


def _expected_sizes(quantised: Quantised) -> dict[str, Masses]:
    """Of the sizes that are written: files leave out common factors, and levels of a codebook that no weight has."""
    found = {}
    for name, probabilities in quantised.probabilities.items():
        grid, masses = quantised.grids[name], probabilities.cpu().numpy()
        used = np.unique(quantised.codes[name].cpu().numpy())
        if isinstance(grid, Codebook):
            levels = grid.values.cpu().numpy()
            found[name] = np.zeros(len(levels))
            for sign in (1, -1):  # a size is the rank among the levels of one sign
                ranked = used[(sign * levels[used] > 0)]
                ranked = ranked[np.abs(levels[ranked]).argsort()]
                found[name][: len(ranked)] += masses[ranked]
        else:
            middle = len(masses) // 2
            factor = int(np.gcd.reduce(used)) if grid.scale.numel() == 1 else 1
            every = slice(max(factor, 1) - 1, None, max(factor, 1))
            found[name] = (masses[middle + 1 :] + masses[:middle][::-1])[every]
    return found
