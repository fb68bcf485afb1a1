"""Standard normal noise, fast on a CPU and repeatable from torch's own seed.

On a CPU torch draws normals in one thread, which would take longer than the rest of a training step of a small network.
Large draws here take one 64-bit seed from torch's generator. Numpy then fills the values in chunks, each with a stream
of its own, in as many threads as torch may use. The values depend on the seed alone, not on the number of threads.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor

MIN_VALUES_FOR_NUMPY = 1 << 12
"""Below this many values, torch's own generator is faster than seeding a stream."""

VALUES_PER_STREAM = 1 << 16
"""A stream fills at most this many values. It is part of what a seed means: another number gives other values."""

# Safe for several threads at once: the executor locks its queue, and a task never waits for another one.
_pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="bayeslim-noise")

_current: ContextVar[torch.Generator | None] = ContextVar("generator", default=None)
"""Each thread has its own, so that predictions in several threads do not draw from each other's."""


_vmapped: ContextVar[bool] = ContextVar("vmapped", default=False)
"""Whether this thread draws under `vmap`."""


def _replace_pool() -> None:
    """Make a new pool in a forked process: threads are not forked."""
    global _pool
    _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="bayeslim-noise")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_pool)


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
    values, chunks = _start(torch.Size(shape), dtype, torch.device(device), generator)
    _fill(chunks)
    return values


def standard_normal_like(tensor: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Draw ε ~ N(0, 1) of a tensor's shape, dtype and device."""
    return standard_normal(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator)


def standard_normals(tensors: Sequence[Tensor], *, generator: torch.Generator | None = None) -> list[Tensor]:
    """Draw ε like each tensor, in parallel, with the values of one call after another."""
    started = [_start(t.shape, t.dtype, t.device, generator) for t in tensors]
    _fill([chunk for _, chunks in started for chunk in chunks])
    return [values for values, _ in started]


def standard_normals_like(
    tensors: Mapping[str, Tensor], names: Iterable[str], *, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Draw ε like the named tensors, by name, as `standard_normals` does."""
    names = list(names)
    return dict(zip(names, standard_normals([tensors[n] for n in names], generator=generator), strict=True))


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the global generators of torch, Python and numpy on exit."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 - users' modules may draw from it
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


class RandomStream:
    """A random state of its own for one of several computations in turn.

    It begins as torch's present state. Inside, torch draws from it, and the next time goes on where it left off.
    Outside, torch's own state is unchanged.

    Args:
        device: where the computation draws, beside the CPU.
    """

    def __init__(self, device: torch.device):
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index])
        self._other = [generator.get_state() for generator in self._generators]

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()

    def _swap(self) -> None:
        """Exchange the state of the generators and the one that waits."""
        now = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, self._other, strict=True):
            generator.set_state(state)
        self._other = now


@contextmanager
def drawing_from(generator: torch.Generator | None) -> Iterator[None]:
    """Draw the library's noise in this thread from `generator`; None changes nothing."""
    token = _current.set(_current.get() if generator is None else generator)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def seeding_torch_from(generator: torch.Generator | None) -> Iterator[None]:
    """Seed torch's global generator, which `torch.distributions` draw from."""
    if generator is None:
        yield
        return
    with drawing_from(generator):
        seed = random_seed()
    with kept_random_state():
        torch.manual_seed(seed)
        yield


@contextmanager
def vmapped() -> Iterator[None]:
    """Draw the library's noise inside with torch alone, in this thread.

    Under `vmap` every network then has noise of its own. Numpy would draw one value for all of them.
    """
    token = _vmapped.set(True)
    try:
        yield
    finally:
        _vmapped.reset(token)


def is_transformed() -> bool:
    """Tell whether a compiler or `vmap` transforms the code that asks."""
    return torch.compiler.is_compiling() or _vmapped.get()


def current_generator(device: torch.device | str = "cpu") -> torch.Generator | None:
    """Get this thread's generator for a device; None for torch's, as in a compiler."""
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


_Chunk = tuple[np.ndarray[Any, Any], int, int]
"""Values to fill, the seed of their draw, and the index of the chunk in it."""


def _start(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> tuple[Tensor, list[_Chunk]]:
    """Allocate values and list the chunks for numpy; none where torch has drawn them."""
    if generator is None:
        generator = current_generator(device)
    by_numpy = (
        device.type == "cpu" and dtype in (torch.float32, torch.float64) and shape.numel() >= MIN_VALUES_FOR_NUMPY
    )
    if not by_numpy or is_transformed():
        return torch.randn(shape, dtype=dtype, device=device, generator=generator), []
    seed = int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))
    values = torch.empty(shape, dtype=dtype, device=device)
    flat = values.numpy().reshape(-1)
    starts = range(0, len(flat), VALUES_PER_STREAM)
    return values, [(flat[start : start + VALUES_PER_STREAM], seed, index) for index, start in enumerate(starts)]


def _fill(chunks: list[_Chunk]) -> None:
    """Fill all chunks: this thread and its helpers take one after the other."""
    if not chunks:
        return
    waiting = iter(chunks)

    def work() -> None:
        for values, seed, index in waiting:
            stream = np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed, spawn_key=(index,))))
            stream.standard_normal(dtype=values.dtype.type, out=values)

    helpers = [_pool.submit(work) for _ in range(1, min(torch.get_num_threads(), len(chunks)))]
    work()
    for helper in helpers:
        if not helper.cancel():  # a helper that has not started has nothing left to do
            helper.result()
