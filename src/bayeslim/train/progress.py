"""A progress bar for long loops: one line on a terminal, a plain line every few seconds in a log.

    bar = progress(loader, "epoch 3/20")
    for batch in bar:
        bar.show(nll=0.31, kl=12.5)

It writes to stderr, and nothing at all with `enabled=False`, inside of `showing(False)`, or with `BAYESLIM_PROGRESS=0`
in the environment.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, Self, TypeVar

T = TypeVar("T")

REDRAW_SECONDS = 0.1
LOG_SECONDS = 5.0
BAR_CHARACTERS = 20
_shown: ContextVar[bool] = ContextVar("shown", default=True)


class Progress(Generic[T]):
    """A bar to iterate over, or to move with `advance`; see `progress`."""

    def __init__(self, items: Iterable[T], description: str, total: int | None, unit: str, enabled: bool):
        self.items, self.description, self.total, self.unit, self.enabled = items, description, total, unit, enabled
        self.done = 0
        self._values: dict[str, float | str] = {}
        self._file = sys.stderr
        self._started = self._drawn = time.monotonic()

    def __iter__(self) -> Iterator[T]:
        with self:
            for item in self.items:
                yield item
                self.advance()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.enabled:
            self._write(end=True)
        self.enabled = False

    def advance(self, steps: int = 1) -> None:
        """Count `steps` as done, and redraw if it is due; the end is drawn on exit."""
        self.done += steps
        if self.done == self.total:
            return
        now = time.monotonic()
        if self.enabled and now - self._drawn >= (REDRAW_SECONDS if self._file.isatty() else LOG_SECONDS):
            self._drawn = now
            self._write(end=False)

    def show(self, **values: float | str) -> None:
        """Show these numbers beside the bar from the next redraw on."""
        self._values.update(values)

    def line(self) -> str:
        """Format the bar: count, rate, elapsed and remaining time, and the numbers shown."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        rate = self.done / seconds
        count = f"{_short(self.done)}{self.unit}"
        if self.total:
            filled = min(BAR_CHARACTERS, BAR_CHARACTERS * self.done // self.total)
            count = f"{'#' * filled:.<{BAR_CHARACTERS}} {_short(self.done)}/{_short(self.total)}{self.unit}"
        parts = [f"{self.description} {count}".strip(), f"{_short(rate)}{self.unit}/s", _clock(seconds)]
        if self.total and 0 < self.done < self.total:
            parts.append(f"{_clock((self.total - self.done) / rate)} left")
        parts += [f"{k} {v if isinstance(v, str) else format(v, '.4g')}" for k, v in self._values.items()]
        return "  ".join(parts)

    def _write(self, end: bool) -> None:
        text = self.line() + "\n"
        if self._file.isatty():
            # a longer line would wrap, and a carriage return would not clear all of it
            text = f"\r{self.line()[: shutil.get_terminal_size().columns - 1]}\x1b[K" + "\n" * end
        self._file.write(text)
        self._file.flush()


def progress(
    items: Iterable[T] = (), description: str = "", total: int | None = None, unit: str = "", enabled: bool = True
) -> Progress[T]:
    """Show the progress of a loop.

    >>> [x for x in progress([1, 2, 3], "counting", enabled=False)]
    [1, 2, 3]

    Args:
        items: the items to iterate over; leave it out to move the bar with `advance` inside a `with`.
        description: text before the bar.
        total: number of steps; by default the length of `items`, where it has one.
        unit: the unit of a step, such as "B" for bytes.
        enabled: whether to write anything.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    enabled = enabled and _shown.get() and os.environ.get("BAYESLIM_PROGRESS") != "0"
    return Progress(items, description, total, unit, enabled)


@contextmanager
def showing(enabled: bool) -> Iterator[None]:
    """Show the progress bars that this thread begins inside, or none of them."""
    token = _shown.set(enabled and _shown.get())
    try:
        yield
    finally:
        _shown.reset(token)


def _short(number: float) -> str:
    """Format a number in three digits, such as 45.3M; up to 99,999 in full."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size and number >= 1e5:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}" if isinstance(number, int) or number >= 100 else f"{number:.3g}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
