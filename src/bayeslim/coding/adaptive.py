"""Models that learn as they code: counts of what was seen so far are the probabilities of what comes.

With n₀ zeros and n₁ ones seen, the next bit is 1 with probability (n₁ + ½) / (n₀ + n₁ + 1), which costs at most
½ log2 n + 1 bits more than the best fixed probability (Krichevsky & Trofimov 1981). Larger alphabets are trees of such
bits. Instead of one half, something else may be expected before anything was seen (`expected.py`).

A bit may have several contexts, from coarse to fine. The probability of each is the prior mean of the next, worth as
much as two observations, so that a fine context takes over only once it has seen something.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from bayeslim.coding.coders import Coder
from bayeslim.coding.expected import Curve
from bayeslim.coding.logarithms import POWER_BITS, power

_ONE_BITS = 24
_ONE = 1 << _ONE_BITS
_BACKING = 2
_MOST_BACKING = 4


class Bits:
    """Adaptive bits, one for every context that is asked for."""

    def __init__(self) -> None:
        self._counts: defaultdict[Hashable, list[int]] = defaultdict(lambda: [0, 0])

    def code(self, coder: Coder, value: int, *contexts: Hashable, guess: int = _ONE >> 1, backing: int = 1) -> int:
        """Pass one bit through the coder and learn from it.

        Args:
            coder: which way.
            value: the bit, for those that write.
            *contexts: from coarse to fine.
            guess: how probable a 1 is, in parts of 2²⁴, before anything was seen.
            backing: how many observations that is worth.
        """
        return _learn(coder, value, [self._counts[context] for context in contexts], guess, backing)


def _learn(coder: Coder, value: int, counts: Sequence[list[int]], guess: int, backing: int) -> int:
    """Pass one bit, by the zeros and ones seen in each of its contexts, and count it there."""
    probability = guess
    for zeros, ones in counts:
        probability = (ones * _ONE + backing * probability) // (zeros + ones + backing)
        backing = _BACKING
    if not 0 < probability < _ONE:
        probability = 1 if probability < 1 else _ONE - 1
    value = coder.bit(value, probability, _ONE)
    for count in counts:
        count[value] += 1
    return value


class Naturals:
    """Adaptive numbers 0, 1, 2, ...: how many binary digits they have, one by one, then the digits (Elias γ).

    The first two digits after the leading one are learned as well; the others are taken as they come.
    """

    def __init__(self, largest: int):
        self._digits, self._bits = (largest + 1).bit_length(), Bits()

    def code(
        self, coder: Coder, value: int, *contexts: Hashable, bits_a_step: int | None = None, backing: int = 1
    ) -> int:
        """Pass one number through the coder and learn from it.

        Args:
            coder: which way.
            value: the number, for those that write.
            *contexts: from coarse to fine.
            bits_a_step: that P(value ≥ n) = 2^(−bn) is expected, as b in the unit of logarithms.
            backing: how many observations that is worth.
        """
        contexts = (None, *contexts)
        digits, length, guess = (value + 1).bit_length(), 1, _ONE >> 1
        while length < self._digits:
            # Numbers of so many digits start at 2^(length − 1) − 1, longer ones at 2^length − 1.
            if bits_a_step is not None:
                guess = power(bits_a_step << (length - 1)) >> (POWER_BITS - _ONE_BITS)
            longer = ((context, length) for context in contexts)
            if not self._bits.code(coder, int(digits > length), *longer, guess=guess, backing=backing):
                break
            length += 1
        found = 1
        for place in range(length - 2, -1, -1):
            digit = (value + 1) >> place & 1
            learned = length - 2 - place < 2
            digit = self._bits.code(coder, digit, (length, found)) if learned else coder.bit(digit, 1, 2)
            found = found << 1 | digit
        return found - 1


class Symbols:
    """Adaptive symbols 0 to count - 1, as a binary tree of adaptive bits.

    Args:
        count: how many symbols.
        curve: how probable the symbols are expected to be, with sizes one larger than symbols.
    """

    def __init__(self, count: int, curve: Curve | None = None):
        self._depth, self._count = (count - 1).bit_length(), count
        self._below = None if curve is None else curve.below(count)
        self._worth = 0 if curve is None else curve.worth
        # Nodes go by their path from the root, as a number behind a leading one.
        self._trees: defaultdict[Hashable, defaultdict[int, list[int]]] = defaultdict(
            lambda: defaultdict(lambda: [0, 0])
        )
        self._guesses: dict[int, tuple[int, int]] = {}

    def code(self, coder: Coder, value: int, *contexts: Hashable) -> int:
        """Pass one symbol through the coder and learn from it."""
        trees, node = [self._trees[context] for context in (None, *contexts)], 1
        for place in range(self._depth - 1, -1, -1):
            guess = self._guesses.get(node)
            if guess is None:
                guess = self._guesses[node] = self._expected(node - (1 << (self._depth - 1 - place)) << 1, place)
            bit = 0
            if guess[1]:
                bit = _learn(coder, value >> place & 1, [tree[node] for tree in trees], *guess)
            node = node << 1 | bit
        return node - (1 << self._depth)

    def _expected(self, node: int, place: int) -> tuple[int, int]:
        """How probable the second half of a node is, and how many observations that is worth; 0 where there is none."""
        if (node | 1) << place >= self._count:
            return 0, 0
        if self._below is None:
            # Deep in the tree little is seen, and what is seen there is mostly chance.
            return _ONE >> 1, min(1 << (self._depth - 1 - place), _MOST_BACKING)
        start, middle, end = (min(half << place, self._count) for half in (node, node | 1, node + 2))
        share = self._below[end] - self._below[start]
        guess = _ONE * (self._below[end] - self._below[middle]) // share
        return guess, max(1, self._worth * share // self._below[-1])
