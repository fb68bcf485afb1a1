"""Standard normal noise, fast on every device and repeatable from torch's own seed.

On a CPU torch draws normals one by one in a single thread, which would cost more than the rest of a training step of a
small network. Here each call takes one 64-bit seed from torch's generator and lets numpy fill fixed-size chunks, one
stream each, in as many threads as torch may use: several times faster, and the values depend on the seed alone, never
on the number of threads.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 16
"""Values in one stream."""

SMALL = 1 << 12
"""Below this many values torch's own generator is quicker than seeding a stream."""

_pool: ThreadPoolExecutor | None = None


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
    if torch.compiler.is_compiling() or not _worthwhile(shape, dtype, torch.device(device)):
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)
    values = torch.empty(shape, dtype=dtype)
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
    _fill(values.view(-1).numpy(), seed)
    return values


def standard_normal_like(tensor: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Draw ε ~ N(0, 1) of a tensor's shape, dtype and device."""
    return standard_normal(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator)


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
    """What is drawn inside follows from `generator`, if there is one; then the global generators stay as they were."""
    if generator is None:
        yield
        return
    seed = int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator))
    with kept_random_state():
        torch.manual_seed(seed)
        yield


def _worthwhile(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype in (torch.float32, torch.float64) and math.prod(shape) >= SMALL


def _fill(values: np.ndarray, seed: int) -> None:
    chunks = [values[start : start + CHUNK] for start in range(0, values.size, CHUNK)]

    def draw(index: int) -> None:
        stream = np.random.Generator(np.random.SFC64([seed, index]))
        stream.standard_normal(dtype=values.dtype.type, out=chunks[index])

    threads = torch.get_num_threads()
    if threads == 1 or len(chunks) == 1:
        for index in range(len(chunks)):
            draw(index)
        return
    global _pool
    if _pool is None or _pool._max_workers != threads:
        _pool = ThreadPoolExecutor(threads, thread_name_prefix="bayeslim-noise")
    list(_pool.map(draw, range(len(chunks))))
