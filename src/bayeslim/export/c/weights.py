"""Kernels of convolutions and linear layers, dense and sparse.

A sparse weight is a list of taps per output: the offset of an input relative to the output pixel's window, and a value.
The innermost statements add to four sums at a time (a pack): of output pixels that lie side by side, of samples that
are interleaved (the lanes of linear layers), or of outputs (of dense linear layers). Packs have names, not indices, so
that a compiler keeps them in vector registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bayeslim.export.c.activations import assignment
from bayeslim.export.c.literals import array, integer_type, literal
from bayeslim.export.c.steps import Activation, Weighted

LANES = 32
"""Samples that are computed side by side."""
PACK = 4
"""Floats of a vector register."""
MAX_PACKS = 16
"""Packs that are summed at once: with their inputs and weights they fit into 32 vector registers."""
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
    tables, value, size = _values(step, name, is_kept)
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
    size = padded * step.weight[0].size
    tables = f"static const float {name}_weight[{size}] = {{0.1f}};\n"
    if with_values:
        matrix = np.zeros((padded, step.weight[0].size), np.float32)
        matrix[:outputs] = step.weight.reshape(outputs, -1)
        blocks = matrix.reshape(padded // block, block, -1).transpose(0, 2, 1)
        tables = array("float", f"{name}_weight", map(literal, blocks.reshape(-1).tolist()))
    finish, extra, extra_size = _finish(replace(step, levels=None), name)
    tables, size = tables + extra, 4 * size + extra_size
    if step.is_vector:
        return Kernel(tables, _dense_vector(step, name, finish, prefix), _dense_lanes(step, name, finish, prefix), size)
    return Kernel(tables, _dense_image(step, name, finish, prefix), "", size)


_WIDTHS = {"uint8_t": 1, "uint16_t": 2, "uint32_t": 4}


@dataclass(frozen=True)
class _Finish:
    """The end of every sum: scale, bias and activation."""

    step: Weighted
    bias: str
    scale: str

    def __call__(self, total: str) -> str:
        """Return the statement that turns the sum of output `o` into the value `v`."""
        scaled = f"{total} * {self.scale}" if self.scale else total
        return assignment(f"{scaled} + {self.bias}", self.step.activation)


def _values(step: Weighted, name: str, is_kept: NDArray[np.bool_]) -> tuple[str, str, int]:
    """Write the taps' values: the tables, the expression of tap `t`, and the bytes."""
    if step.levels is None:
        values = step.weight.reshape(len(step.weight), -1)[is_kept]
        table = array("float", f"{name}_value", map(literal, values.tolist() or [0.0]))
        return table, f"{name}_value[t]", 4 * len(values)
    levels, codes = np.unique(step.levels.reshape(len(step.weight), -1)[is_kept], return_inverse=True)
    tables = array("float", f"{name}_level", map(literal, levels.tolist() or [0.0]))
    tables += array("uint8_t", f"{name}_code", map(str, codes.reshape(-1).tolist() or [0]))
    return tables, f"{name}_level[{name}_code[t]]", 4 * len(levels) + len(codes)


def _finish(step: Weighted, name: str) -> tuple[_Finish, str, int]:
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
    return _Finish(step, bias, scale), tables, size


def _sparse_vector(step: Weighted, name: str, value: str, finish: _Finish) -> str:
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


@dataclass(frozen=True)
class _Block:
    """A block of output pixels that is computed at once; it holds whole pooling windows.

    Attributes:
        height: lines.
        width: places.
        start: statements that set `i0` and `j0`, the first pooled line and place of block (r, c).
        down: number of blocks down.
        across: number of blocks across.
    """

    height: int
    width: int
    start: str
    down: int
    across: int


def _block(step: Weighted, max_packs: int) -> _Block:
    """Choose the size of blocks; the last ones of an image may overlap others."""
    _, height, width = step.conv_shape
    pool_height, pool_width = (step.pool.height, step.pool.width) if step.pool else (1, 1)
    lines, places = height // pool_height, width // pool_width
    own_places = min(places, max(1, max(1, max_packs // pool_height) * PACK // pool_width))
    packs = -(-own_places * pool_width // PACK)
    own_lines = min(lines, max(1, max_packs // (packs * pool_height)))
    start = _start("i0", "r", own_lines, lines) + _start("j0", "c", own_places, places)
    down, across = -(-lines // own_lines), -(-places // own_places)
    return _Block(own_lines * pool_height, own_places * pool_width, start, down, across)


def _start(name: str, index: str, own: int, total: int) -> str:
    if total % own == 0:
        return f"const int {name} = {index} * {own}; "
    return f"const int {name} = {index} * {own} < {total - own} ? {index} * {own} : {total - own}; "


def _packs(count: int, name: str) -> str:
    """Declare packs of zeros."""
    return f"{name}_pack " + ", ".join(f"s{n} = {name}_zeros()" for n in range(count)) + ";"


def _columns(width: int) -> list[int]:
    """List the first place of every pack of a line; the last may overlap another."""
    return [*range(0, width - PACK + 1, PACK), *([width - PACK] if width % PACK else [])]


def _write_block(step: Weighted, finish: _Finish, total: str, height: int, width: int, indent: str) -> str:
    """Write the end of a block of sums: bias, activation and pooling.

    `total` is the expression of the sum at line i and place j.
    """
    _, out_height, out_width = step.out_shape
    if step.pool is None:
        return f"""\
{indent}for (int i = 0; i < {height}; ++i)
{indent}    for (int j = 0; j < {width}; ++j) {{
{indent}        {finish(total)}
{indent}        y[(o * {out_height} + i0 + i) * {out_width} + j0 + j] = v;
{indent}    }}
"""
    pool = step.pool
    lines, places = height // pool.height, width // pool.width
    at = f"y[(o * {out_height} + i0 + i) * {out_width} + j0 + j]"
    inner = total.replace("[i]", f"[i * {pool.height} + a]").replace("[j]", f"[j * {pool.width} + b]")
    if pool.kind == "max" and _never_falls(step.activation) and not finish.scale:
        # The bias and an activation that never falls may follow the maximum.
        start = total.replace("[i]", f"[i * {pool.height}]").replace("[j]", f"[j * {pool.width}]")
        each, end = f"const float u = {inner}; m = u > m || u != u ? u : m;", f"{finish('m')} {at} = v;"
    elif pool.kind == "max":
        start, each, end = "-INFINITY", f"{finish(inner)} m = v > m || v != v ? v : m;", f"{at} = m;"
    else:
        start, each = "0.0f", f"{finish(inner)} m += v;"
        end = f"{at} = m * {literal(1 / (pool.height * pool.width))};"
    return f"""\
{indent}for (int i = 0; i < {lines}; ++i)
{indent}    for (int j = 0; j < {places}; ++j) {{
{indent}        float m = {start};
{indent}        for (int a = 0; a < {pool.height}; ++a)
{indent}            for (int b = 0; b < {pool.width}; ++b) {{ {each} }}
{indent}        {end}
{indent}    }}
"""


def _window_start(step: Weighted) -> str:
    """Return the offset of the first window of block (i0, j0)."""
    pool_height, pool_width = (step.pool.height, step.pool.width) if step.pool else (1, 1)
    line = step.in_shape[2] * step.stride[0] * pool_height
    return f"i0 * {line} + j0 * {step.stride[1] * pool_width}"


def _indent(lines: Sequence[str], by: int) -> str:
    return "\n".join(" " * by + line for line in lines)


def _sums(step: Weighted, block: _Block, name: str, pointer: str, outputs: int) -> tuple[str, list[str], list[str]]:
    """Write the code that sums up a block of pixels of some outputs.

    Returns the declarations, the additions of a tap, and the end.

    The weights of a tap are w0, w1, ...; `pointer` is its first input. The end leaves `sum[k][i][j]`.
    """
    line = step.in_shape[2] * step.stride[0]
    shape = f"sum[{outputs}][{block.height}][{block.width}]"
    if step.stride[1] > 1 or block.width < PACK:
        load = f"{pointer}[i * {line} + j * {step.stride[1]}]"
        loops = [f"for (int i = 0; i < {block.height}; ++i)", f"    for (int j = 0; j < {block.width}; ++j) {{"]
        adds = [f"        sum[{k}][i][j] += w{k} * {load};" for k in range(outputs)]
        return f"float {shape} = {{{{{{0.0f}}}}}};", [*loops, *adds, "    }"], []
    places = [(k, i, j) for k in range(outputs) for i in range(block.height) for j in _columns(block.width)]
    adds = [f"s{n} = {name}_add(s{n}, w{k}, {pointer} + {i * line + j});" for n, (k, i, j) in enumerate(places)]
    ends = [f"memcpy(&sum[{k}][{i}][{j}], &s{n}, sizeof s{n});" for n, (k, i, j) in enumerate(places)]
    return _packs(len(places), name), adds, [f"float {shape};", *ends]


def _sparse_image(step: Weighted, name: str, taps: Sequence[str], finish: _Finish, prefix: str) -> str:
    """Write a kernel that computes blocks of pixels of one output.

    `taps` are the loop over them and their value.
    """
    block = _block(step, MAX_PACKS)
    declared, adds, ends = _sums(step, block, prefix, "p", 1)
    return f"""\
    for (int o = 0; o < {len(step.weight)}; ++o)
        for (int r = 0; r < {block.down}; ++r)
            for (int c = 0; c < {block.across}; ++c) {{
                {block.start}
                {declared}
                {taps[0]}
                    const float w0 = {taps[1]};
                    const float *p = x + {name}_tap[t] + {_window_start(step)};
{_indent(adds, 20)}
                }}
{_indent(ends, 16)}
{_write_block(step, finish, "sum[0][i][j]", block.height, block.width, " " * 16)}            }}
"""


def _in_packs(count: int, prefix: str, weight: str, pointer: str) -> tuple[list[str], list[str]]:
    """Write the additions of a weight times `count` neighbours to packs.

    The end leaves them in `sum`.
    """
    packs = range(count // PACK)
    adds = [f"s{n} = {prefix}_add(s{n}, {weight}, {pointer} + {n * PACK});" for n in packs]
    return adds, [f"float sum[{count}];", *(f"memcpy(sum + {n * PACK}, &s{n}, sizeof s{n});" for n in packs)]


def _lanes(step: Weighted, finish: _Finish, prefix: str, loop: Sequence[str], weight: str, pointer: str) -> str:
    """Write a kernel that computes one output of all lanes at a time."""
    adds, ends = _in_packs(LANES, prefix, "w", "p")
    return f"""\
    for (int o = 0; o < {len(step.weight)}; ++o) {{
        {_packs(LANES // PACK, prefix)}
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


def _dense_vector(step: Weighted, name: str, finish: _Finish, prefix: str) -> str:
    outputs, inputs = step.weight.shape[0], step.weight[0].size
    adds, ends = _in_packs(_BLOCK, prefix, "x[n]", f"w + n * {_BLOCK}")
    return f"""\
    for (int block = 0; block < {-(-outputs // _BLOCK)}; ++block) {{
        const float *w = {name}_weight + (size_t)block * {inputs * _BLOCK};
        {_packs(_BLOCK // PACK, prefix)}
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


def _dense_image(step: Weighted, name: str, finish: _Finish, prefix: str) -> str:
    """Write a kernel for blocks of pixels of four outputs, which share the loads."""
    outputs, channels, kernel_height, kernel_width = step.weight.shape
    block = _block(step, MAX_PACKS // _OUTPUTS_PER_BLOCK)
    pixels = step.in_shape[1] * step.in_shape[2]
    at = f"q * {pixels} + a * {step.dilation[0] * step.in_shape[2]} + b * {step.dilation[1]}"
    declared, adds, ends = _sums(step, block, prefix, "p", _OUTPUTS_PER_BLOCK)
    weights = ", ".join(f"w{k} = w[{k}]" for k in range(_OUTPUTS_PER_BLOCK))
    return f"""\
    for (int block = 0; block < {-(-outputs // _OUTPUTS_PER_BLOCK)}; ++block)
        for (int r = 0; r < {block.down}; ++r)
            for (int c = 0; c < {block.across}; ++c) {{
                {block.start}
                const float *w = {name}_weight + (size_t)block * {step.weight[0].size * _OUTPUTS_PER_BLOCK};
                {declared}
                for (int q = 0; q < {channels}; ++q)
                    for (int a = 0; a < {kernel_height}; ++a)
                        for (int b = 0; b < {kernel_width}; ++b, w += {_OUTPUTS_PER_BLOCK}) {{
                            const float *p = x + {at} + {_window_start(step)};
                            const float {weights};
{_indent(adds, 28)}
                        }}
{_indent(ends, 16)}
                for (int k = 0; k < {_OUTPUTS_PER_BLOCK} && block * {_OUTPUTS_PER_BLOCK} + k < {outputs}; ++k) {{
                    const int o = block * {_OUTPUTS_PER_BLOCK} + k;
{_write_block(step, finish, "sum[k][i][j]", block.height, block.width, " " * 20)}                }}
            }}
"""


def _dense_lanes(step: Weighted, name: str, finish: _Finish, prefix: str) -> str:
    inputs = step.weight[0].size
    start = f"const float *first = {name}_weight + (size_t)(o / {_BLOCK}) * {inputs * _BLOCK} + o % {_BLOCK};"
    loop = [start, f"for (int n = 0; n < {inputs}; ++n) {{"]
    return _lanes(step, finish, prefix, loop, f"first[(size_t)n * {_BLOCK}]", f"x + (size_t)n * {LANES}")


def _never_falls(activation: Activation | None) -> bool:
    """Check whether an activation is monotone, so that it may follow a maximum."""
    if activation is None or activation.kind in ("relu", "clamp", "sigmoid", "tanh"):
        return True
    return activation.kind in ("leaky_relu", "elu") and min(activation.constants) >= 0
