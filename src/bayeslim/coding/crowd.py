"""How many non-zeros to expect in a row before any was coded: the posterior's own number, spread over all rows.

The posterior says of every weight how probable it is that it is not zero (`Quantised.presence`); summed and divided by
the rows, how many non-zeros a row has on average, λ. The writer knows it and the reader does not, so the file holds it,
in a few bits, and the number of a row's non-zeros is expected to be geometric,

    P(count ≥ n) = 2^(−bn),     2^b = 1 + 1/λ.

Of rows in the order of these numbers the file says how many more the i-th has than the one after it. That is geometric
with a mean of about λ/i, as for exponential numbers it would be exactly (Rényi 1953): 2^b = 1 + i/λ. What is coded adds
to either (`adaptive.py`). A plain network has no posterior, and its own non-zeros take the place of the posterior's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bayeslim.coding.coders import Coder
from bayeslim.coding.logarithms import ONE, POWER_BITS, log2, power

RATES = 48
"""How many b there are: from 8 downwards, three of them to a halving."""

_LARGEST = 8


@dataclass(frozen=True)
class Crowd:
    """How many non-zeros rows are to have, by which of the b it is."""

    rate: int = 0

    def code(self, coder: Coder) -> Crowd:
        """Pass it through a coder."""
        return Crowd(coder.uniform(self.rate, RATES))

    @property
    def bits(self) -> int:
        """ONE times b, of a row's count."""
        return _LARGEST * power(self.rate * ONE // 3) << (32 - POWER_BITS)

    def bits_of_more(self, place: int) -> int:
        """ONE times b, of what the row at a place from 1 has more than the one after it."""
        share = power(self.bits)  # 1 / (1 + 1/λ)
        return log2(share + place * ((1 << POWER_BITS) - share)) - log2(share)


def closest_crowd(expected: float, rows: int) -> Crowd:
    """That of so many non-zeros in so many rows."""
    bits = math.log2(1 + rows / expected) if expected > 0 else math.inf
    return Crowd(min(max(round(3 * math.log2(_LARGEST / bits)), 0), RATES - 1) if bits < _LARGEST else 0)
