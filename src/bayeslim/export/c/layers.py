"""The C source of steps without weights; `lanes` samples are interleaved, 1 for a single sample."""

from __future__ import annotations

from functools import singledispatch

import numpy as np

from bayeslim.export.c.activations import assignment
from bayeslim.export.c.literals import array, literal
from bayeslim.export.c.steps import Add, Affine, Pad, Slope, Softmax, Step, Window


@singledispatch
def tables_of(step: Step, name: str) -> str:
    """Write the constants of a step."""
    return ""


@tables_of.register
def _(step: Affine, name: str) -> str:
    if len(step.scale) == 1:
        return ""
    scale = array("float", f"{name}_scale", map(literal, step.scale.tolist()))
    return scale + array("float", f"{name}_shift", map(literal, step.shift.tolist()))


@tables_of.register
def _(step: Slope, name: str) -> str:
    return array("float", f"{name}_slope", map(literal, step.slopes.tolist()))


@singledispatch
def body_of(step: Step, name: str, lanes: int) -> str:
    """Write the body of a step's function."""
    raise TypeError(f"{type(step).__name__} has no body of its own.")


@body_of.register
def _(step: Affine, name: str, lanes: int) -> str:
    channels, size = step.in_shape[0], int(np.prod(step.in_shape)) * lanes
    if len(step.scale) == 1:
        scale, shift = float(step.scale[0]), float(step.shift[0])
        value = "x[n]" if (scale, shift) == (1.0, 0.0) else f"x[n] * {literal(scale)} + {literal(shift)}"
        return f"""\
    for (int n = 0; n < {size}; ++n) {{
        {assignment(value, step.activation)}
        y[n] = v;
    }}
"""
    return f"""\
    for (int o = 0; o < {channels}; ++o)
        for (int n = 0; n < {size // channels}; ++n) {{
            {assignment(f"x[o * {size // channels} + n] * {name}_scale[o] + {name}_shift[o]", step.activation)}
            y[o * {size // channels} + n] = v;
        }}
"""


@body_of.register
def _(step: Slope, name: str, lanes: int) -> str:
    size = int(np.prod(step.in_shape[1:])) * lanes
    return f"""\
    for (int o = 0; o < {step.in_shape[0]}; ++o)
        for (int n = 0; n < {size}; ++n) {{
            const float v = x[o * {size} + n];
            y[o * {size} + n] = v < 0.0f ? {name}_slope[o] * v : v;
        }}
"""


@body_of.register
def _(step: Add, name: str, lanes: int) -> str:
    second = "z[n]" if step.factor == 1.0 else f"{literal(step.factor)} * z[n]"
    return f"""\
    for (int n = 0; n < {int(np.prod(step.in_shape)) * lanes}; ++n) {{
        {assignment(f"x[n] + {second}", step.activation)}
        y[n] = v;
    }}
"""


@body_of.register
def _(step: Pad, name: str, lanes: int) -> str:
    channels, height, width = step.in_shape
    _, padded_height, padded_width = step.out_shape
    return f"""\
    memset(y, 0, {int(np.prod(step.out_shape)) * lanes} * sizeof *y);
    for (int o = 0; o < {channels}; ++o)
        for (int r = 0; r < {height}; ++r)
            memcpy(y + ((o * {padded_height} + r + {step.top}) * {padded_width} + {step.left}) * {lanes},
                   x + (o * {height} + r) * {width * lanes}, {width * lanes} * sizeof *y);
"""


@body_of.register
def _(step: Window, name: str, lanes: int) -> str:
    channels, height, width = step.in_shape
    _, out_height, out_width = step.out_shape
    is_max = step.kind == "max"
    take = "if (u > m || u != u) m = u;" if is_max else "m += u;"
    if is_max:
        share = ""
    elif step.counts_padding or step.padding == (0, 0):
        share = f" * {literal(1 / (step.size[0] * step.size[1]))}"
    else:
        share = " / (float)count"
    counted = " ++count;" if "count" in share else ""
    return f"""\
    for (int o = 0; o < {channels}; ++o)
        for (int r = 0; r < {out_height}; ++r)
            for (int c = 0; c < {out_width}; ++c)
                for (int l = 0; l < {lanes}; ++l) {{
                    float m = {"-INFINITY" if is_max else "0.0f"};
                    {"int count = 0;" if counted else ""}
                    for (int a = 0; a < {step.size[0]}; ++a)
                        for (int b = 0; b < {step.size[1]}; ++b) {{
                            const int i = r * {step.stride[0]} + a * {step.dilation[0]} - {step.padding[0]};
                            const int j = c * {step.stride[1]} + b * {step.dilation[1]} - {step.padding[1]};
                            if (i >= 0 && i < {height} && j >= 0 && j < {width}) {{
                                const float u = x[((o * {height} + i) * {width} + j) * {lanes} + l];
                                {take}{counted}
                            }}
                        }}
                    {assignment(f"m{share}", step.activation)}
                    y[((o * {out_height} + r) * {out_width} + c) * {lanes} + l] = v;
                }}
"""


@body_of.register
def _(step: Softmax, name: str, lanes: int) -> str:
    channels, height, width = step.in_shape
    if step.over_channels:
        count, stride, groups, group_stride = channels, height * width * lanes, height * width * lanes, 1
        lane_loop, at = f"for (int g = 0; g < {groups}; ++g)", f"g * {group_stride}"
    else:
        count, stride = (width if width > 1 else channels), lanes
        lines = channels * height if width > 1 else 1
        lane_loop = f"for (int g = 0; g < {lines * lanes}; ++g)"
        at = f"(g / {lanes}) * {count * lanes} + g % {lanes}"
    end = "p[n * {0}] - m - logf(s)" if step.is_log else "expf(p[n * {0}] - m) / s"
    return f"""\
    {lane_loop} {{
        const float *p = x + {at};
        float m = p[0], s = 0.0f;
        for (int n = 1; n < {count}; ++n)
            if (p[n * {stride}] > m)
                m = p[n * {stride}];
        for (int n = 0; n < {count}; ++n)
            s += expf(p[n * {stride}] - m);
        for (int n = 0; n < {count}; ++n)
            y[{at} + n * {stride}] = {end.format(stride)};
    }}
"""
