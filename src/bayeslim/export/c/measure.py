"""Dense or sparse weights, layer by layer, by the time that each takes on this machine."""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bayeslim.export.c.library import compile_c
from bayeslim.export.c.source import kernels_of, write_source
from bayeslim.export.c.steps import Program, Weighted

ROUNDS = 7
MIN_SECONDS_PER_ROUND = 0.002


@dataclass(frozen=True)
class _Timed:
    number: int
    is_sparse: bool
    program: Program
    name: str


def faster_kernels(program: Program) -> dict[int, bool]:
    """Choose the faster kernel of each layer by its time.

    Returns whether it is the sparse one, by the number of the step. Two kinds of layers are not timed: layers
    without zeros are dense, and layers without a dense kernel are sparse.
    """
    chosen: dict[int, bool] = {}
    candidates: list[_Timed] = []
    for number, step in enumerate(program.steps):
        if not isinstance(step, Weighted):
            continue
        kinds = kernels_of(step, f"k{number}", "k", False)
        if len(kinds) == 1:
            chosen[number] = next(iter(kinds))
        elif step.weight.all():
            chosen[number] = False
        else:
            candidates += [_Timed(number, kind, _alone(step), f"k{number}_{int(kind)}") for kind in kinds]
    seconds = _seconds(candidates)
    for timed in candidates:
        if timed.is_sparse:
            chosen[timed.number] = seconds[timed.number, True] <= seconds[timed.number, False]
    return chosen


def _alone(step: Weighted) -> Program:
    """Make a program of one layer."""
    sizes = {0: int(np.prod(step.in_shape)), 1: int(np.prod(step.out_shape))}
    return Program((replace(step, inputs=(0,), output=1),), 0, 1, step.in_shape, step.out_shape, sizes)


def _seconds(candidates: list[_Timed]) -> dict[tuple[int, bool], float]:
    """Compile each layer alone and time it, in turns; the fastest round counts."""
    found: dict[tuple[int, bool], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = [(timed, _compiled(timed, Path(folder))) for timed in candidates]
        for _ in range(ROUNDS):
            for timed, run in runs:
                key = timed.number, timed.is_sparse
                found[key] = min(found.get(key, np.inf), run())
    return found


def _compiled(timed: _Timed, folder: Path) -> Callable[[], float]:
    source = write_source(timed.program, timed.name, {0: timed.is_sparse}, False)
    (folder / f"{timed.name}.h").write_text(source.header)
    repeat = f"""
void {timed.name}_repeat(const float *input, float *output, float *work, int times)
{{
    for (int n = 0; n < times; ++n)
        {timed.name}_run(input, output, work);
}}
"""
    path = folder / f"{timed.name}.c"
    path.write_text(source.code + repeat)
    compile_c(path, path.with_suffix(".so"))
    function = ctypes.CDLL(str(path.with_suffix(".so")))[f"{timed.name}_repeat"]
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int]
    sizes = timed.program.sizes
    inputs = np.random.default_rng(0).standard_normal(sizes[0]).astype(np.float32)
    outputs, work = np.empty(sizes[1], np.float32), np.empty(16, np.float32)

    def elapsed(times: int) -> float:
        start = time.perf_counter()
        function(inputs.ctypes.data, outputs.ctypes.data, work.ctypes.data, times)
        return time.perf_counter() - start

    times = 1
    while elapsed(times) < MIN_SECONDS_PER_ROUND and times < 1 << 20:
        times *= 2
    return lambda: elapsed(times) / times
