"""Standard normal noise, fast on every device and repeatable from torch's own seed.

On a CPU torch draws normals one by one in a single thread, which would cost more than the rest of a training step of a
small network. Here each call takes one 64-bit seed from torch's generator and lets numpy fill the values in chunks, one
stream each, in as many threads as torch may use: several times faster, and the values depend on the seed alone, never
on the number of threads.

In double precision, and where they are few, these are numpy's normals. Of many in single precision sixteen random bits
each choose one of 65,536 parts of equal probability of N(0, 1) within ±3, and the value is that part's mean, in half
the time; then every value goes to the tails with the probability that these have, to one of 65,536 parts of them. So
the distribution function is within 1/65,536 of the normal one, variance and kurtosis within 6e-9 and 7e-7, and the
largest value is 5.54, which a normal one exceeds once in 33 million draws.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor

ALONE, CHUNK = 1 << 16, 1 << 15
"""Up to how many values one stream fills them all, before a second thread wakes up; and how many it fills of more."""

SMALL = 1 << 12
"""Below this many values torch's own generator is quicker than seeding a stream."""

MANY = 1 << 15
"""From this many values on, single precision is drawn by parts."""

PARTS, EDGE = 1 << 16, 3.0
"""How many parts N(0, 1) is cut into between −EDGE and EDGE, and how many beyond."""

BEYOND = math.erfc(EDGE / math.sqrt(2))
"""The probability of the tails."""

_pool: ThreadPoolExecutor | None = None

_current: ContextVar[torch.Generator | None] = ContextVar("generator", default=None)
"""Each thread has its own, so that predictions in several threads do not draw from each other's."""


def _forget_pool() -> None:
    """A forked process has none of its parent's threads and would wait for them for ever."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def standard_normal(
    shape: tuple[int, ...] | torch.Size,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw ε ~ N(0, 1) of a shape.

    >>> _ = torch.manual_seed(0)
    >>> first = standard_normal((1000, 1000))
    >>> _ = torch.manual_seed(0)
    >>> bool((first == standard_normal((1000, 1000))).all())
    True
    """
    values, draws = _begun(torch.Size(shape), dtype, torch.device(device), generator)
    _fill(draws)
    return values


def standard_normal_like(tensor: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Draw ε ~ N(0, 1) of a tensor's shape, dtype and device."""
    values, draws = _begun(tensor.shape, tensor.dtype, tensor.device, generator)
    _fill(draws)
    return values


def standard_normals_like(
    tensors: Mapping[str, Tensor], names: Iterable[str], *, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Draw ε like some of the tensors: the values of one call each, one after the other, but in all threads at once."""
    begun = {n: _begun(tensors[n].shape, tensors[n].dtype, tensors[n].device, generator) for n in names}
    _fill([draw for _, draws in begun.values() for draw in draws])
    return {name: values for name, (values, _) in begun.items()}


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Whatever is drawn inside leaves the global generators (torch's, Python's and numpy's) as they were."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 - users' modules may draw from it
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


@contextmanager
def drawing_from(generator: torch.Generator | None) -> Iterator[None]:
    """Draw all of this library's noise inside from `generator`, in this thread alone; None changes nothing."""
    token = _current.set(_current.get() if generator is None else generator)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def seeding_torch_from(generator: torch.Generator | None) -> Iterator[None]:
    """Seed torch's global generator from `generator` inside, for `torch.distributions`, which take no generator."""
    if generator is None:
        yield
        return
    with drawing_from(generator):
        seed = random_seed()
    with kept_random_state():
        torch.manual_seed(seed)
        yield


def current_generator(device: torch.device | str = "cpu") -> torch.Generator | None:
    """Get the generator of noise in this thread; None for torch's own, under a compiler and on another device."""
    if torch.compiler.is_compiling():
        return None
    generator = _current.get()
    return generator if generator is not None and generator.device.type == torch.device(device).type else None


def on_device(generator: torch.Generator | None, device: torch.device) -> torch.Generator | None:
    """Make a generator for a device, seeded from one that lives elsewhere."""
    if generator is None or generator.device.type == device.type:
        return generator
    with drawing_from(generator):
        return torch.Generator(device).manual_seed(random_seed())


def random_seed() -> int:
    """Draw a seed from the current generator."""
    generator = _current.get()
    device = "cpu" if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(2**62, generator=generator))


def _begun(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> tuple[Tensor, list[_Draw]]:
    """The values, and what is still to be drawn of them: nothing where torch has done it already."""
    if generator is None:
        generator = current_generator(device)
    ours = device.type == "cpu" and dtype in (torch.float32, torch.float64) and shape.numel() >= SMALL
    if not ours or torch.compiler.is_compiling():
        return torch.randn(shape, dtype=dtype, device=device, generator=generator), []
    seed = int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))
    values = torch.empty(shape, dtype=dtype, device=device)
    return values, [_Draw(values.numpy().reshape(-1), seed)]


class _Words(ISeedSequence):
    """A stream's seed as it is.

    SFC64 throws its first twelve rounds away, which mix a seed and a number well enough; numpy's own mixing before that
    would take ten times as long as all the rest of making a stream.
    """

    def __init__(self, seed: int, index: int):
        self.words = np.array([seed, index, 0], dtype=np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray[Any, Any]:
        """The three words that SFC64 asks for."""
        return self.words


class _Draw:
    """Values to fill, flat, with their seed, which has a stream for every chunk of them."""

    def __init__(self, values: np.ndarray[Any, Any], seed: int):
        self.values, self.seed = values, seed
        self.by_parts = values.dtype == np.float32 and len(values) >= MANY
        self.chunk = ALONE if len(values) <= ALONE else CHUNK

    def fill(self, index: int) -> None:
        """Fill a chunk."""
        stream = np.random.Generator(np.random.SFC64(_Words(self.seed, index)))  # type: ignore[arg-type]
        values = self.values[index * self.chunk : (index + 1) * self.chunk]
        if index == 0:
            self.first = stream
        if self.by_parts:
            parts = stream.bit_generator.random_raw(-(-len(values) // 4)).view(np.uint16)
            np.take(_means_of_parts(), parts[: len(values)], out=values, mode="clip")
        else:
            stream.standard_normal(dtype=values.dtype.type, out=values)

    def finish(self) -> None:
        """Send every value to the tails with their probability p; the first chunk's stream goes on with that.

        Hits come as a Poisson process of rate −log(1 − p), so that each value is hit with probability p, by itself.
        """
        if self.by_parts:
            count = len(self.values)
            words = self.first.bit_generator.random_raw(self.first.poisson(-math.log1p(-BEYOND) * count))
            self.values[(words >> 16) % count] = _means_of_tails()[words & (PARTS - 1)]


def _fill(draws: list[_Draw]) -> None:
    """Fill all values; every thread, this one among them, takes one chunk after the other while there are any.

    So nobody waits for a thread that is slow to wake up.
    """
    if not draws:
        return
    chunks = [(draw, k) for draw in draws for k in range(-(-len(draw.values) // draw.chunk))]
    waiting = iter(chunks)

    def work() -> None:
        for draw, index in waiting:
            draw.fill(index)

    helpers = [_helpers().submit(work) for _ in range(1, min(torch.get_num_threads(), len(chunks)))]
    work()
    for helper in helpers:
        if not helper.cancel():
            helper.result()
    for draw in draws:
        draw.finish()


@cache
def _means_of_parts() -> np.ndarray[Any, Any]:
    return np.asarray(_means(BEYOND / 2, 1 - BEYOND / 2, PARTS).float())


@cache
def _means_of_tails() -> np.ndarray[Any, Any]:
    lower = _means(0, BEYOND / 2, PARTS // 2)
    return np.asarray(torch.cat([lower, -lower]).float())


def _means(low: float, high: float, parts: int) -> Tensor:
    """Of N(0, 1) between two quantiles, in parts of equal probability p: the mean from a to b is (φ(a) − φ(b)) / p."""
    edges = torch.special.ndtri(torch.linspace(low, high, parts + 1, dtype=torch.float64, device="cpu"))
    return -torch.exp(-0.5 * edges.square()).diff() / math.sqrt(2 * math.pi) * parts / (high - low)


def _helpers() -> ThreadPoolExecutor:
    global _pool
    if _pool is None or _pool._max_workers < torch.get_num_threads() - 1:
        _pool = ThreadPoolExecutor(torch.get_num_threads() - 1, thread_name_prefix="bayeslim-noise")
    return _pool
