"""Range coding: a message as one number, by nested intervals of integers (Martin 1979).

A symbol owns the part [start, start + size) of `total`; the interval shrinks to that part, which costs
log2(total / size) bits. All arithmetic is on integers, so every machine writes and reads the same bytes.

A model is written once, as a function that passes its symbols to a `Coder`. The `Writer` writes the symbols that it is
given; the `Reader` ignores them and returns those in the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from bayeslim.errors import CorruptFile

TOTAL_BITS = 32
"""Totals are at most 2 to this power, so that probabilities are exact to one part in 2²⁴."""

_WORD, _MIN_RANGE = 1 << 64, 1 << 56


class Writer:
    """A coder that writes symbols; `finish` returns the bytes."""

    def __init__(self) -> None:
        self._low, self._range, self._bytes = 0, _WORD - 1, bytearray()

    @property
    def bits(self) -> float:
        """Bits coded so far."""
        return 8 * len(self._bytes) + 64 - math.log2(self._range)

    def symbol(self, value: int, starts: Callable[[int], int], count: int) -> int:
        """Code one of `count` symbols.

        Args:
            value: the symbol; a reader ignores it.
            starts: the start of each symbol's part, strictly rising from starts(0) = 0 to starts(count), the total.
            count: the number of symbols.
        """
        start = starts(value)
        self._narrow(start, starts(value + 1) - start, starts(count))
        return value

    def bit(self, value: int, ones: int, total: int) -> int:
        """Code a bit that is 1 with probability ones / total."""
        self._narrow(*((0, ones) if value else (ones, total - ones)), total)
        return value

    def uniform(self, value: int, count: int) -> int:
        """Code one of `count` equally probable symbols."""
        self._narrow(value, 1, count)
        return value

    def finish(self) -> bytes:
        """Return the shortest bytes that, followed by zeros, lie in the interval."""
        for length in range(2):  # a byte is enough, as the range is at least 2⁵⁶
            unit = 1 << (64 - 8 * length)
            inside = -(-self._low // unit) * unit
            if inside < self._low + self._range:
                break
        if inside >= _WORD:
            inside -= _WORD
            self._carry()
        return bytes(self._bytes) + inside.to_bytes(8, "big")[:length]

    def _narrow(self, start: int, size: int, total: int) -> None:
        if size < 1 or total > 1 << TOTAL_BITS:
            raise ValueError(
                f"A symbol needs a part of at least 1 and a total of at most 2**{TOTAL_BITS}. Got {size} of {total}."
            )
        step = self._range // total
        self._low += step * start
        self._range = step * size
        if self._low >= _WORD:
            self._low -= _WORD
            self._carry()
        while self._range < _MIN_RANGE:
            self._bytes.append(self._low >> 56)
            self._low = (self._low << 8) & (_WORD - 1)
            self._range <<= 8

    def _carry(self) -> None:
        place = len(self._bytes) - 1
        while self._bytes[place] == 255:
            self._bytes[place] = 0
            place -= 1
        self._bytes[place] += 1


class Reader:
    """A coder that reads the bytes of a `Writer`.

    Raises:
        CorruptFile: on reading past the end.
    """

    def __init__(self, data: bytes):
        self._data, self._place, self._range = data, 8, _WORD - 1
        self._offset = int.from_bytes(data[:8].ljust(8, b"\0"), "big")

    @property
    def bits(self) -> float:
        """See `Writer`."""
        return 8 * self._place - math.log2(self._range)

    def symbol(self, value: int, starts: Callable[[int], int], count: int) -> int:
        """See `Writer`."""
        total = starts(count)
        step = self._range // total
        target = min(self._offset // step, total - 1)
        first, last = 0, count - 1
        while first < last:
            middle = (first + last + 1) >> 1
            if starts(middle) <= target:
                first = middle
            else:
                last = middle - 1
        start = starts(first)
        self._narrow(step, start, starts(first + 1) - start)
        return first

    def bit(self, value: int, ones: int, total: int) -> int:
        """See `Writer`."""
        step = self._range // total
        if self._offset < step * ones:
            self._narrow(step, 0, ones)
            return 1
        self._narrow(step, ones, total - ones)
        return 0

    def uniform(self, value: int, count: int) -> int:
        """See `Writer`."""
        step = self._range // count
        found = min(self._offset // step, count - 1)
        self._narrow(step, found, 1)
        return found

    def _narrow(self, step: int, start: int, size: int) -> None:
        self._offset -= step * start
        self._range = step * size
        if self._offset >= self._range:
            raise CorruptFile("The file holds a number that the encoder never writes: it was changed.")
        while self._range < _MIN_RANGE:
            if self._place >= len(self._data) + 8:
                raise CorruptFile("The file ends before its network does: it was truncated. Copy it again.")
            byte = self._data[self._place] if self._place < len(self._data) else 0
            self._place += 1
            self._offset = (self._offset << 8) | byte
            self._range <<= 8


Coder: TypeAlias = Writer | Reader
