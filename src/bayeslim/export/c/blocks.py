"""Blocks of output pixels that are computed at once: their sums, and their end with bias, activation and pooling.

The innermost statements add to four sums at a time (a pack). Packs have names, not indices, so that a compiler keeps
them in vector registers.
"""

from __future__ import annotations

from dataclasses import dataclass

from bayeslim.export.c.activations import assignment
from bayeslim.export.c.literals import literal
from bayeslim.export.c.steps import Activation, Weighted

PACK = 4
"""Floats of a vector register."""
MAX_PACKS = 16
"""Packs that are summed at once: with their inputs and weights they fit into 32 vector registers."""


@dataclass(frozen=True)
class Finish:
    """The end of every sum: scale, bias and activation."""

    step: Weighted
    bias: str
    scale: str

    def __call__(self, total: str) -> str:
        """Return the statement that turns the sum of output `o` into the value `v`."""
        scaled = f"{total} * {self.scale}" if self.scale else total
        return assignment(f"{scaled} + {self.bias}", self.step.activation)


@dataclass(frozen=True)
class Block:
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


def block_of(step: Weighted, max_packs: int) -> Block:
    """Choose the size of blocks; the last ones of an image may overlap others."""
    _, height, width = step.conv_shape
    pool_height, pool_width = (step.pool.height, step.pool.width) if step.pool else (1, 1)
    lines, places = height // pool_height, width // pool_width
    own_places = min(places, max(1, max(1, max_packs // pool_height) * PACK // pool_width))
    packs = -(-own_places * pool_width // PACK)
    own_lines = min(lines, max(1, max_packs // (packs * pool_height)))
    start = _start("i0", "r", own_lines, lines) + _start("j0", "c", own_places, places)
    down, across = -(-lines // own_lines), -(-places // own_places)
    return Block(own_lines * pool_height, own_places * pool_width, start, down, across)


def _start(name: str, index: str, own: int, total: int) -> str:
    if total % own == 0:
        return f"const int {name} = {index} * {own}; "
    return f"const int {name} = {index} * {own} < {total - own} ? {index} * {own} : {total - own}; "


def packs(count: int, name: str) -> str:
    """Declare packs of zeros."""
    return f"{name}_pack " + ", ".join(f"s{n} = {name}_zeros()" for n in range(count)) + ";"


def _columns(width: int) -> list[int]:
    """List the first place of every pack of a line; the last may overlap another."""
    return [*range(0, width - PACK + 1, PACK), *([width - PACK] if width % PACK else [])]


def write_block(step: Weighted, finish: Finish, total: str, height: int, width: int, indent: str) -> str:
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


def window_start(step: Weighted) -> str:
    """Return the offset of the first window of block (i0, j0)."""
    pool_height, pool_width = (step.pool.height, step.pool.width) if step.pool else (1, 1)
    line = step.in_shape[2] * step.stride[0] * pool_height
    return f"i0 * {line} + j0 * {step.stride[1] * pool_width}"


def sums_of(step: Weighted, block: Block, name: str, pointer: str, outputs: int) -> tuple[str, list[str], list[str]]:
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
    return packs(len(places), name), adds, [f"float {shape};", *ends]


def _never_falls(activation: Activation | None) -> bool:
    """Check whether an activation is monotone, so that it may follow a maximum."""
    if activation is None or activation.kind in ("relu", "clamp", "sigmoid", "tanh"):
        return True
    return activation.kind in ("leaky_relu", "elu") and min(activation.constants) >= 0
