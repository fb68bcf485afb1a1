"""A network as C: traced, fused, checked against the original."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from bayeslim.compact.example import tensors_in
from bayeslim.errors import BayeslimWarning, UnsupportedModel
from bayeslim.export.c.fuse import fuse
from bayeslim.export.c.levels import find_levels
from bayeslim.export.c.library import CNetwork, compile_c, find_compiler, load_c
from bayeslim.export.c.measure import faster_kernels
from bayeslim.export.c.read import read_program
from bayeslim.export.c.source import Source, write_source
from bayeslim.export.c.weights import LANES
from bayeslim.export.check import prove
from bayeslim.quantise.result import Quantised
from bayeslim.types import Inputs

_CHECKED_ROWS = (1, LANES + 5)
MAX_COMPILED_WEIGHTS = 2_000_000
"""The largest network that is compiled only to be timed."""


def to_c(
    network: nn.Module, stem: str, inputs: Sequence[Inputs], tolerance: float, quantised: Quantised | None
) -> tuple[Source, float]:
    """Write a network as C, and compare it with the original.

    Returns the source and the largest difference of outputs, which is NaN without a compiler.

    Raises:
        UnsupportedModel: if an operation is not supported.
        ExportFailed: if the compiled network gives other outputs.
    """
    program = fuse(find_levels(read_program(network, inputs[0]), quantised))
    if find_compiler() is None:
        warnings.warn(
            "No C compiler was found: the C file is not checked, and layers are dense or sparse by size instead of "
            "time. Install gcc or clang, or name a compiler in the variable CC.",
            BayeslimWarning,
            stacklevel=4,
        )
        return write_source(program, stem, {}), float("nan")
    source = write_source(program, stem, faster_kernels(program))
    example = tensors_in(inputs[0])[0]
    generator = torch.Generator().manual_seed(0)
    randoms = [torch.randn(rows, *example.shape[1:], generator=generator) for rows in _CHECKED_ROWS]
    with tempfile.TemporaryDirectory() as folder:
        path = _write(source, Path(folder), stem)
        return source, prove(network, load_c(path), [*randoms, example], ".c", tolerance)


def compiled(network: nn.Module, inputs: Sequence[Inputs]) -> tuple[CNetwork, int]:
    """Compile a network; return it and the bytes of the shared library.

    Raises:
        UnsupportedModel: if an operation is not supported, or the network is too large to compile soon.
        BayeslimError: if there is no compiler.
    """
    weights = sum(parameter.numel() for parameter in network.parameters())
    if weights > MAX_COMPILED_WEIGHTS:
        raise UnsupportedModel(
            f"C with {weights:,} weights takes long to compile; the most is {MAX_COMPILED_WEIGHTS:,}."
        )
    program = fuse(find_levels(read_program(network, inputs[0]), None))
    source = write_source(program, "net", faster_kernels(program))
    with tempfile.TemporaryDirectory() as folder:
        path = _write(source, Path(folder), "net")
        compile_c(path, path.with_suffix(".so"))
        return load_c(path.with_suffix(".so")), path.with_suffix(".so").stat().st_size


def _write(source: Source, folder: Path, stem: str) -> Path:
    (folder / f"{stem}.h").write_text(source.header)
    path = folder / f"{stem}.c"
    path.write_text(source.code)
    return path
