"""Adaptive models: the counts of the symbols coded so far give the probabilities of the next one.

After n₀ zeros and n₁ ones, the next bit is 1 with probability (n₁ + ½) / (n₀ + n₁ + 1). This costs at most
½ log2 n + 1 bits more than the best fixed probability (Krichevsky & Trofimov 1981). Larger alphabets are binary trees
of such bits.

A bit may have several contexts, from coarse to fine. The probability in each context is the prior mean of the next one,
with the weight of two observations: a fine context takes over once it has counts of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from bayeslim.coding.coders import Coder

_ONE = 1 << 24
_CONTEXT_PSEUDOCOUNT = 2
_MAX_TREE_PSEUDOCOUNT = 4


class Bits:
    """Adaptive bits with a pair of counts per context."""

    def __init__(self) -> None:
        self._counts: defaultdict[Hashable, list[int]] = defaultdict(lambda: [0, 0])

    def code(self, coder: Coder, value: int, *contexts: Hashable) -> int:
        """Code one bit and update the counts.

        Args:
            coder: the writer or reader.
            value: the bit; a reader ignores it.
            *contexts: from coarse to fine.
        """
        return _code_bit(coder, value, [self._counts[context] for context in contexts])


def _code_bit(coder: Coder, value: int, counts: Sequence[list[int]], pseudocount: int = 1) -> int:
    """Code a bit by the counts (zeros, ones) in its contexts, and update the counts."""
    probability = _ONE >> 1
    for zeros, ones in counts:
        probability = (ones * _ONE + pseudocount * probability) // (zeros + ones + pseudocount)
        pseudocount = _CONTEXT_PSEUDOCOUNT
    value = coder.bit(value, min(max(probability, 1), _ONE - 1), _ONE)
    for count in counts:
        count[value] += 1
    return value


class Naturals:
    """Adaptive numbers 0, 1, 2, ... in Elias γ code: the number of binary digits in unary, then the digits.

    The unary part and the first two digits after the leading one are adaptive; the other digits are uniform.
    """

    def __init__(self, largest: int):
        self._max_length, self._bits = (largest + 1).bit_length(), Bits()

    def code(self, coder: Coder, value: int, *contexts: Hashable) -> int:
        """Code one number and update the counts; see `Bits.code`."""
        contexts = (None, *contexts)
        wanted, length = (value + 1).bit_length(), 1
        while length < self._max_length:
            if not self._bits.code(coder, int(wanted > length), *((context, length) for context in contexts)):
                break
            length += 1
        found = 1
        for place in range(length - 2, -1, -1):
            digit = (value + 1) >> place & 1
            adaptive = length - 2 - place < 2
            digit = self._bits.code(coder, digit, (length, found)) if adaptive else coder.bit(digit, 1, 2)
            found = found << 1 | digit
        return found - 1


class Symbols:
    """Adaptive symbols 0 to count − 1: a binary tree of adaptive bits."""

    def __init__(self, count: int):
        self._depth, self._count = (count - 1).bit_length(), count
        # A node's key is the path from the root as binary digits, behind a leading one.
        self._trees: defaultdict[Hashable, defaultdict[int, list[int]]] = defaultdict(
            lambda: defaultdict(lambda: [0, 0])
        )

    def code(self, coder: Coder, value: int, *contexts: Hashable) -> int:
        """Code one symbol and update the counts."""
        trees, node = [self._trees[context] for context in (None, *contexts)], 1
        for place in range(self._depth - 1, -1, -1):
            bit = 0
            first_of_second_half = (node << 1 | 1) << place
            if first_of_second_half - (1 << self._depth) < self._count:
                # Deep nodes see few symbols, whose frequencies are mostly chance: they keep closer to one half.
                pseudocount = min(1 << (self._depth - 1 - place), _MAX_TREE_PSEUDOCOUNT)
                bit = _code_bit(coder, value >> place & 1, [tree[node] for tree in trees], pseudocount)
            node = node << 1 | bit
        return node - (1 << self._depth)
