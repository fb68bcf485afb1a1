"""Standard normal noise, fast on every device and repeatable from torch's own seed.

On a CPU torch draws normals one by one in a single thread, which would cost more than the rest of a training step of a
small network. Here each call takes one 64-bit seed from torch's generator and lets numpy fill the values in chunks, one
stream each, in as many threads as torch may use: several times faster, and the values depend on the seed alone, never
on the number of threads.

Rough noise, for activations (the local estimator, in training and in predictions that ask for it), takes sixteen random
bits a value and half the time. They choose one of 65,536 parts of N(0, 1) of equal probability, and the value is that
part's mean, scaled a little (by 7e-7) so that the variance is one; the kurtosis is 2.9998 and the largest value 4.39.
Draws of weights are never rough.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    values, streams = _begun(torch.Size(shape), dtype, torch.device(device), generator)
    _fill(streams)
    return values


def standard_normal_like(tensor: Tensor, *, generator: torch.Generator | None = None, rough: bool = False) -> Tensor:
    """Draw ε ~ N(0, 1) of a tensor's shape, dtype and device; roughly (see above) where that is quicker, if asked."""
    values, streams = _begun(tensor.shape, tensor.dtype, tensor.device, generator)
    _fill(streams, rough and tensor.dtype == torch.float32)
    return values


def standard_normals_like(
    tensors: Mapping[str, Tensor], names: Iterable[str], *, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Draw ε like some of the tensors: the values of one call each, one after the other, but in all threads at once."""
    begun = {n: _begun(tensors[n].shape, tensors[n].dtype, tensors[n].device, generator) for n in names}
    _fill([stream for _, streams in begun.values() for stream in streams])
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


def drawing_from(generator: torch.Generator | None) -> AbstractContextManager[None]:
    """What is drawn inside follows from `generator`, if there is one; then the global generators stay as they were."""
    return nullcontext() if generator is None else _drawing_from(generator)


@contextmanager
def _drawing_from(generator: torch.Generator) -> Iterator[None]:
    seed = int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator))
    with kept_random_state():
        torch.manual_seed(seed)
        yield


_Stream = tuple["np.ndarray[Any, Any]", int, int]  # values to fill, a seed, and which of the seed's streams fills them


def _begun(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> tuple[Tensor, list[_Stream]]:
    """The values, with the streams that are still to fill them; none where torch has drawn them already."""
    size = shape.numel()
    ours = device.type == "cpu" and dtype in (torch.float32, torch.float64) and size >= SMALL
    if not ours or torch.compiler.is_compiling():
        return torch.randn(shape, dtype=dtype, device=device, generator=generator), []
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
    values = torch.empty(size, dtype=dtype)
    flat, chunk = values.numpy(), ALONE if size <= ALONE else CHUNK
    return values.view(shape), [(flat[k : k + chunk], seed, k // chunk) for k in range(0, size, chunk)]


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


def _fill(streams: list[_Stream], rough: bool = False) -> None:
    """Fill the values; every thread, this one among them, takes one stream after the other while there are any.

    So nobody waits for a thread that is slow to wake up.
    """
    if not streams:
        return
    waiting = iter(streams)

    def work() -> None:
        for values, seed, index in waiting:
            stream = np.random.Generator(np.random.SFC64(_Words(seed, index)))  # type: ignore[arg-type]
            if rough:
                words = stream.integers(0, 2**64 - 1, -(-len(values) // 4), dtype=np.uint64, endpoint=True)
                np.take(_means_of_parts(), words.view(np.uint16)[: len(values)], out=values, mode="clip")
            else:
                stream.standard_normal(dtype=values.dtype.type, out=values)

    helpers = [_helpers().submit(work) for _ in range(1, min(torch.get_num_threads(), len(streams)))]
    work()
    for helper in helpers:
        if not helper.cancel():
            helper.result()


@cache
def _means_of_parts() -> np.ndarray[Any, Any]:
    """Of N(0, 1) cut into 65,536 parts of equal probability: with density φ, the mean from a to b is ∝ φ(a) − φ(b)."""
    edges = torch.special.ndtri(torch.linspace(0, 1, 2**16 + 1, dtype=torch.float64))
    means = -torch.exp(-0.5 * edges.square()).diff()
    return np.asarray((means / means.square().mean().sqrt()).float())


def _helpers() -> ThreadPoolExecutor:
    global _pool
    if _pool is None or _pool._max_workers < torch.get_num_threads() - 1:
        _pool = ThreadPoolExecutor(torch.get_num_threads() - 1, thread_name_prefix="bayeslim-noise")
    return _pool
