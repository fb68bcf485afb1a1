"""Kernels of convolutions and linear layers, dense and sparse.

A sparse weight is a list of taps per output: the offset of an input relative to the output pixel's window, and a value.
Dense or sparse, values are floats; or one byte each where the weight has few levels: an integer, or the index of the
level in a table. The innermost statements add to four sums at a time (a pack, see `blocks`): of output pixels that lie
side by side, of samples that are interleaved (the lanes of linear layers), or of outputs (of dense linear layers).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bayeslim.export.c.blocks import MAX_PACKS, PACK, Finish, block_of, packs, sums_of, window_start, write_block
from bayeslim.export.c.literals import array, integer_type, literal
from bayeslim.export.c.steps import Weighted

LANES = 32
"""Samples that are computed side by side."""
_BLOCK = 32
_OUTPUTS_PER_BLOCK = 4


@dataclass(frozen=True)
class Kernel:
    """The C source of one layer.

    Attributes:
        tables: definitions of its constants.
        body: a function body with parameters `x` and `y`, for one sample.
        lanes_body: the same for interleaved samples; empty for images.
        bytes: of its constants.
    """

    tables: str
    body: str
    lanes_body: str
    bytes: int


def sparse_kernel(step: Weighted, name: str, prefix: str) -> Kernel:
    """Write a layer whose weights are taps.

    `name` begins its own names, `prefix` those that all layers share.
    """
    outputs, per_group, height, width = step.weight.shape
    _, in_height, in_width = step.in_shape
    is_kept = (step.weight != 0).reshape(outputs, -1)
    rows, columns = np.nonzero(is_kept)
    channel, line, place = np.unravel_index(columns, (per_group, height, width))
    channel = channel + rows // (outputs // step.groups) * per_group
    offsets = (channel * in_height + line * step.dilation[0]) * in_width + place * step.dilation[1]
    starts = np.concatenate([[0], np.cumsum(is_kept.sum(1))])
    weight = step.weight if step.levels is None else step.levels
    values = _stored(step, name, weight.reshape(outputs, -1)[is_kept])
    value, tables, size = values.value(f"{values.name}[t]"), values.tables, values.bytes
    offset_type, start_type = integer_type(int(offsets.max(initial=0))), integer_type(int(starts[-1]))
    tables += array(offset_type, f"{name}_tap", map(str, offsets.tolist() or [0]))
    tables += array(start_type, f"{name}_start", map(str, starts.tolist()))
    size += len(offsets) * _WIDTHS[offset_type] + len(starts) * _WIDTHS[start_type]
    finish, extra, extra_size = _finish(step, name)
    tables, size = tables + extra, size + extra_size
    loop = f"for (int t = {name}_start[o]; t < (int){name}_start[o + 1]; ++t) {{"
    if step.is_vector:
        lanes = _lanes(step, finish, prefix, [loop], value, f"x + (size_t){name}_tap[t] * {LANES}")
        return Kernel(tables, _sparse_vector(step, name, value, finish), lanes, size)
    return Kernel(tables, _sparse_image(step, name, [loop, value], finish, prefix), "", size)


def dense_kernel(step: Weighted, name: str, prefix: str, with_values: bool = True) -> Kernel | None:
    """Write a layer with all of its weights.

    Returns None for grouped convolutions, which have sparse kernels only. `with_values=False` writes no weights, for a
    kernel that is only timed.
    """
    if step.groups != 1:
        return None
    outputs = len(step.weight)
    block = _BLOCK if step.is_vector else _OUTPUTS_PER_BLOCK
    padded = -(-outputs // block) * block
    matrix = np.zeros((padded, step.weight[0].size), np.float32)
    weight = step.weight if step.levels is None else step.levels
    matrix[:outputs] = weight.reshape(outputs, -1)
    values = _stored(step, name, matrix.reshape(padded // block, block, -1).transpose(0, 2, 1), with_values)
    finish, extra, extra_size = _finish(step, name)
    tables, size = values.tables + extra, values.bytes + extra_size
    if step.is_vector:
        lanes = _dense_lanes(step, values, finish, prefix)
        return Kernel(tables, _dense_vector(step, values, finish, prefix), lanes, size)
    return Kernel(tables, _dense_image(step, values, finish, prefix), "", size)


_WIDTHS = {"uint8_t": 1, "uint16_t": 2, "uint32_t": 4}


@dataclass(frozen=True)
class _Stored:
    """The values of a weight: floats, integers, or indices into a table of levels.

    Attributes:
        tables: the definitions.
        type: of what is stored.
        name: of the array.
        levels: the name of the table; empty for numbers.
        bytes: of all.
    """

    tables: str
    type: str
    name: str
    levels: str
    bytes: int

    def value(self, stored: str) -> str:
        """Return the expression of the value of what is stored."""
        return f"{self.levels}[{stored}]" if self.levels else stored


def _stored(step: Weighted, name: str, values: NDArray[np.float32], with_values: bool = True) -> _Stored:
    """Write values, which are levels where the weight has them."""
    values = values.reshape(-1) if values.size else np.zeros(1, np.float32)

    def table(kind: str, own: str, numbers: Iterable[str]) -> str:
        return array(kind, own, numbers) if with_values else f"static const {kind} {own}[{len(values)}] = {{1}};\n"

    if step.levels is None:
        floats = table("float", f"{name}_value", map(literal, values.tolist()))
        return _Stored(floats, "float", f"{name}_value", "", 4 * len(values))
    if ((values == values.round()) & (values >= -128) & (values <= 127)).all():
        integers = table("int8_t", f"{name}_code", map(str, values.astype(int).tolist()))
        return _Stored(integers, "int8_t", f"{name}_code", "", len(values))
    levels, codes = np.unique(values, return_inverse=True)
    tables = array("float", f"{name}_level", map(literal, levels.tolist()))
    tables += table("uint8_t", f"{name}_code", map(str, codes.reshape(-1).tolist()))
    return _Stored(tables, "uint8_t", f"{name}_code", f"{name}_level", 4 * len(levels) + len(codes))


def _finish(step: Weighted, name: str) -> tuple[Finish, str, int]:
    """Write the biases and the factors of outputs.

    Returns the end of sums, the tables and their bytes.
    """
    tables, size, bias, scale = "", 0, "0.0f", ""
    if step.bias.any():
        tables += array("float", f"{name}_bias", map(literal, step.bias.tolist()))
        bias, size = f"{name}_bias[o]", size + 4 * len(step.bias)
    if step.levels is not None and step.row_scale is not None and (step.row_scale != 1).any():
        if (step.row_scale == step.row_scale[0]).all():
            scale = literal(float(step.row_scale[0]))
        else:
            tables += array("float", f"{name}_scale", map(literal, step.row_scale.tolist()))
            scale, size = f"{name}_scale[o]", size + 4 * len(step.row_scale)
    return Finish(step, bias, scale), tables, size


def _sparse_vector(step: Weighted, name: str, value: str, finish: Finish) -> str:
    """Sum up the taps of each output in four chains, which a processor runs at once."""
    terms = "\n".join(
        f"            s{chain} += {value.replace('[t]', f'[t + {chain}]')} * x[{name}_tap[t + {chain}]];"
        for chain in range(4)
    )
    return f"""\
    for (int o = 0; o < {len(step.weight)}; ++o) {{
        const int last = (int){name}_start[o + 1];
        int t = (int){name}_start[o];
        float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
        for (; t + 4 <= last; t += 4) {{
{terms}
        }}
        for (; t < last; ++t)
            s0 += {value} * x[{name}_tap[t]];
        {finish("((s0 + s1) + (s2 + s3))")}
        y[o] = v;
    }}
"""


def _indent(lines: Sequence[str], by: int) -> str:
    return "\n".join(" " * by + line for line in lines)


def _sparse_image(step: Weighted, name: str, taps: Sequence[str], finish: Finish, prefix: str) -> str:
    """Write a kernel that computes blocks of pixels of one output.

    `taps` are the loop over them and their value.
    """
    block = block_of(step, MAX_PACKS)
    declared, adds, ends = sums_of(step, block, prefix, "p", 1)
    return f"""\
    for (int o = 0; o < {len(step.weight)}; ++o)
        for (int r = 0; r < {block.down}; ++r)
            for (int c = 0; c < {block.across}; ++c) {{
                {block.start}
                {declared}
                {taps[0]}
                    const float w0 = {taps[1]};
                    const float *p = x + {name}_tap[t] + {window_start(step)};
{_indent(adds, 20)}
                }}
{_indent(ends, 16)}
{write_block(step, finish, "sum[0][i][j]", block.height, block.width, " " * 16)}            }}
"""


def _in_packs(count: int, prefix: str, weight: str, pointer: str) -> tuple[list[str], list[str]]:
    """Write the additions of a weight times `count` neighbours to packs.

    The end leaves them in `sum`.
    """
    packs = range(count // PACK)
    adds = [f"s{n} = {prefix}_add(s{n}, {weight}, {pointer} + {n * PACK});" for n in packs]
    return adds, [f"float sum[{count}];", *(f"memcpy(sum + {n * PACK}, &s{n}, sizeof s{n});" for n in packs)]


def _lanes(step: Weighted, finish: Finish, prefix: str, loop: Sequence[str], weight: str, pointer: str) -> str:
    """Write a kernel that computes one output of all lanes at a time."""
    adds, ends = _in_packs(LANES, prefix, "w", "p")
    return f"""\
    for (int o = 0; o < {len(step.weight)}; ++o) {{
        {packs(LANES // PACK, prefix)}
{_indent(loop, 8)}
            const float w = {weight};
            const float *p = {pointer};
{_indent(adds, 12)}
        }}
{_indent(ends, 8)}
        for (int l = 0; l < {LANES}; ++l) {{
            {finish("sum[l]")}
            y[o * {LANES} + l] = v;
        }}
    }}
"""


def _dense_vector(step: Weighted, values: _Stored, finish: Finish, prefix: str) -> str:
    outputs, inputs = step.weight.shape[0], step.weight[0].size
    decoded = [
        f"float f[{_BLOCK}];",
        f"for (int k = 0; k < {_BLOCK}; ++k)",
        f"    f[k] = {values.value(f'w[n * {_BLOCK} + k]')};",
    ]
    adds, ends = _in_packs(_BLOCK, prefix, "x[n]", f"w + n * {_BLOCK}" if values.type == "float" else "f")
    adds = adds if values.type == "float" else [*decoded, *adds]
    return f"""\
    for (int block = 0; block < {-(-outputs // _BLOCK)}; ++block) {{
        const {values.type} *w = {values.name} + (size_t)block * {inputs * _BLOCK};
        {packs(_BLOCK // PACK, prefix)}
        for (int n = 0; n < {inputs}; ++n) {{
{_indent(adds, 12)}
        }}
{_indent(ends, 8)}
        for (int k = 0; k < {_BLOCK} && block * {_BLOCK} + k < {outputs}; ++k) {{
            const int o = block * {_BLOCK} + k;
            {finish("sum[k]")}
            y[o] = v;
        }}
    }}
"""


def _dense_image(step: Weighted, values: _Stored, finish: Finish, prefix: str) -> str:
    """Write a kernel for blocks of pixels of four outputs, which share the loads."""
    outputs, channels, kernel_height, kernel_width = step.weight.shape
    block = block_of(step, MAX_PACKS // _OUTPUTS_PER_BLOCK)
    pixels = step.in_shape[1] * step.in_shape[2]
    at = f"q * {pixels} + a * {step.dilation[0] * step.in_shape[2]} + b * {step.dilation[1]}"
    declared, adds, ends = sums_of(step, block, prefix, "p", _OUTPUTS_PER_BLOCK)
    weights = ", ".join(f"w{k} = {values.value(f'w[{k}]')}" for k in range(_OUTPUTS_PER_BLOCK))
    return f"""\
    for (int block = 0; block < {-(-outputs // _OUTPUTS_PER_BLOCK)}; ++block)
        for (int r = 0; r < {block.down}; ++r)
            for (int c = 0; c < {block.across}; ++c) {{
                {block.start}
                const {values.type} *w = {values.name} + (size_t)block * {step.weight[0].size * _OUTPUTS_PER_BLOCK};
                {declared}
                for (int q = 0; q < {channels}; ++q)
                    for (int a = 0; a < {kernel_height}; ++a)
                        for (int b = 0; b < {kernel_width}; ++b, w += {_OUTPUTS_PER_BLOCK}) {{
                            const float *p = x + {at} + {window_start(step)};
                            const float {weights};
{_indent(adds, 28)}
                        }}
{_indent(ends, 16)}
                for (int k = 0; k < {_OUTPUTS_PER_BLOCK} && block * {_OUTPUTS_PER_BLOCK} + k < {outputs}; ++k) {{
                    const int o = block * {_OUTPUTS_PER_BLOCK} + k;
{write_block(step, finish, "sum[k][i][j]", block.height, block.width, " " * 20)}                }}
            }}
"""


def _dense_lanes(step: Weighted, values: _Stored, finish: Finish, prefix: str) -> str:
    inputs = step.weight[0].size
    first = f"{values.name} + (size_t)(o / {_BLOCK}) * {inputs * _BLOCK} + o % {_BLOCK}"
    loop = [f"const {values.type} *first = {first};", f"for (int n = 0; n < {inputs}; ++n) {{"]
    value = values.value(f"first[(size_t)n * {_BLOCK}]")
    return _lanes(step, finish, prefix, loop, value, f"x + (size_t)n * {LANES}")
