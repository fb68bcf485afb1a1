"""The C file and its header."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bayeslim.export.c.activations import NEEDS_MATH_LIBRARY
from bayeslim.export.c.layers import body_of, tables_of
from bayeslim.export.c.memory import place_tensors
from bayeslim.export.c.steps import Program, Step, Weighted
from bayeslim.export.c.weights import LANES, Kernel, dense_kernel, sparse_kernel

PRELUDE = """\
#if defined(__GNUC__)
typedef float {name}_pack __attribute__((vector_size(16)));
#else
typedef struct {{ float f[4]; }} {name}_pack;
#endif

/* Add w * p[0], ..., w * p[3] to four sums. */
static inline {name}_pack {name}_add({name}_pack sums, float w, const float *p)
{{
#if defined(__GNUC__)
    {name}_pack x;
    memcpy(&x, p, sizeof x);
    return sums + w * x;
#else
    for (int k = 0; k < 4; ++k)
        sums.f[k] += w * p[k];
    return sums;
#endif
}}

static inline {name}_pack {name}_zeros(void)
{{
    const float zeros[4] = {{0.0f, 0.0f, 0.0f, 0.0f}};
    {name}_pack sums;
    memcpy(&sums, zeros, sizeof sums);
    return sums;
}}
"""
"""The type of packs, and the functions on them."""


@dataclass(frozen=True)
class Source:
    """A network in C.

    Attributes:
        name: the prefix of all of its names.
        code: the .c file.
        header: the .h file.
        is_sparse: whether a layer's weights are taps, by the number of its step.
        weight_bytes: of all constants of weighted layers.
    """

    name: str
    code: str
    header: str
    is_sparse: dict[int, bool]
    weight_bytes: int


def identifier(stem: str) -> str:
    """Turn a file name into a C identifier.

    >>> identifier("my-net 2"), identifier("5")
    ('my_net_2', 'net_5')
    """
    found = re.sub(r"\W", "_", stem, flags=re.ASCII)
    return found if re.match(r"[A-Za-z]", found) else f"net_{found}"


def kernels_of(step: Weighted, name: str, prefix: str, with_values: bool = True) -> dict[bool, Kernel]:
    """Write the kernels that a layer may have, by whether they are sparse."""
    dense = dense_kernel(step, name, prefix, with_values)
    found = {True: sparse_kernel(step, name, prefix)}
    return found if dense is None else found | {False: dense}


def smaller_kernel(step: Weighted, name: str) -> bool:
    """Check whether the sparse kernel has the fewest bytes of constants."""
    kernels = kernels_of(step, name, name, False)
    return min(kernels, key=lambda is_sparse: kernels[is_sparse].bytes)


def write_source(program: Program, stem: str, is_sparse: Mapping[int, bool], with_values: bool = True) -> Source:
    """Write a network as C.

    Args:
        program: its steps.
        stem: the name of the file, without its suffix; as a C identifier, the prefix of all names.
        is_sparse: the kernel of weighted layers by the number of the step; the smaller one where there is no entry.
        with_values: as in `kernels_of`.
    """
    name = identifier(stem)
    images = _steps_on_images(program)
    tables, functions, chosen, weight_bytes = list[str](), list[str](), dict[int, bool](), 0
    for number, step in enumerate(program.steps):
        own = f"{name}_{number}"
        if isinstance(step, Weighted):
            chosen[number] = is_sparse[number] if number in is_sparse else smaller_kernel(step, own)
            kernel = kernels_of(step, own, name, with_values)[chosen[number]]
            tables.append(kernel.tables)
            weight_bytes += kernel.bytes
            body, lanes_body = kernel.body, kernel.lanes_body
        else:
            tables.append(tables_of(step, own))
            body, lanes_body = body_of(step, own, 1), body_of(step, own, LANES)
        comment = f"/* {_comment(step)} */\n"
        functions.append(comment + _function(step, own, body))
        if number >= images:
            functions.append(comment + _function(step, f"{own}_lanes", lanes_body))
    inputs, outputs = (int(np.prod(shape)) for shape in (program.input_shape, program.output_shape))
    run, work = _run(program, name, f"void {name}_run", 0)
    batch, batch_work = _run_batch(program, name, images, work)
    main = run + batch
    shapes = _shapes(program, name, (max(work, 1), max(batch_work, 1)))
    prelude = PRELUDE.format(name=name) if chosen else ""
    content = "\n".join([*filter(None, (prelude, *tables)), *functions, main, shapes])
    guard = f"{name.upper()}_H"
    header = f"""\
/* A network exported by bayeslim. Compile {stem}.c with a C99 compiler, such as cc -O3 -c {stem}.c. */
#ifndef {guard}
#define {guard}

#include <stddef.h>

#ifdef __cplusplus
extern "C" {{
#endif

#define {name.upper()}_INPUTS {inputs}
#define {name.upper()}_OUTPUTS {outputs}
#define {name.upper()}_WORK {max(work, 1)}
#define {name.upper()}_BATCH_WORK {max(batch_work, 1)}

/* Compute one sample: {inputs} inputs, {outputs} outputs, and {name.upper()}_WORK floats of scratch memory.
   The three do not overlap. Calls with scratch memory of their own may run in parallel. */
void {name}_run(const float *input, float *output, float *work);

/* Compute any number of samples, one after the other in memory, with {name.upper()}_BATCH_WORK floats of scratch. */
void {name}_run_batch(const float *input, float *output, size_t samples, float *work);

/* The shapes of one sample, each after its number of dimensions, and both sizes of scratch memory. */
extern const size_t {name}_input_shape[];
extern const size_t {name}_output_shape[];
extern const size_t {name}_work[2];

#ifdef __cplusplus
}}
#endif

#endif
"""
    includes = [f'#include "{stem}.h"', ""]
    if re.search(r"\b(int8|uint(8|16|32))_t\b", content):
        includes.append("#include <stdint.h>")
    if "mem" in content:
        includes.append("#include <string.h>")
    if "INFINITY" in content or any(f"{function}(" in content for function in NEEDS_MATH_LIBRARY):
        includes.append("#include <math.h>")
    title = "/* A network exported by bayeslim: self-contained C99, without allocation. */\n"
    return Source(name, "\n".join([title, *includes, "", content]), header, chosen, weight_bytes)


def _comment(step: Step) -> str:
    return re.sub(r"[^\w .,()\"+:-]", "", step.name, flags=re.ASCII)


def _function(step: Step, name: str, body: str) -> str:
    second = "const float *restrict z, " if len(step.inputs) > 1 else ""
    return f"static void {name}(const float *restrict x, {second}float *restrict y)\n{{\n{body}}}\n"


def _steps_on_images(program: Program) -> int:
    """Count the steps before the final linear layers, which are computed in lanes."""
    count = len(program.steps)
    while count and _is_vector(program.steps[count - 1]):
        count -= 1
    # One tensor may cross from images to lanes.
    while count < len(program.steps) and len(_read_from_before(program.steps[count:])) > 1:
        count += 1
    return count


def _is_vector(step: Step) -> bool:
    return step.in_shape[1:] == step.out_shape[1:] == (1, 1)


def _read_from_before(steps: Sequence[Step]) -> set[int]:
    return {number for step in steps for number in step.inputs} - {step.output for step in steps}


def _calls(program: Program, name: str, first: int, lanes: int, ends: Mapping[int, str]) -> tuple[str, int]:
    """Write the calls of a program's steps, and count the floats of scratch memory."""
    placed, work = place_tensors(program)
    suffix = "_lanes" if lanes > 1 else ""

    def pointer(number: int) -> str:
        return ends.get(number) or f"work + {placed[number] * lanes}"

    calls = [
        f"{name}_{first + number}{suffix}({', '.join(map(pointer, (*step.inputs, step.output)))});"
        for number, step in enumerate(program.steps)
    ]
    return "\n".join(calls), work * lanes


def _run(program: Program, name: str, signature: str, first: int) -> tuple[str, int]:
    calls, work = _calls(program, name, first, 1, {program.input: "input", program.output: "output"})
    if program.input == program.output:
        calls = f"memcpy(output, input, {program.sizes[program.input]} * sizeof *output);"
    lines = "".join(f"    {line}\n" for line in calls.splitlines())
    unused = "" if "work +" in calls else "    (void)work;\n"
    return f"{signature}(const float *input, float *output, float *work)\n{{\n{unused}{lines}}}\n\n", work


def _run_batch(program: Program, name: str, images: int, single_work: int) -> tuple[str, int]:
    """Write the function of a batch: images one by one, then linear layers in lanes."""
    inputs, outputs = program.sizes[program.input], program.sizes[program.output]
    rest = f"""\
    for (; samples > 0; --samples) {{
        {name}_run(input, output, work);
        input += {inputs};
        output += {outputs};
    }}
}}
"""
    signature = f"void {name}_run_batch(const float *input, float *output, size_t samples, float *work)\n{{\n"
    if images == len(program.steps):
        return signature + rest, single_work
    crossing = next(iter(_read_from_before(program.steps[images:])))
    size = program.sizes[crossing]
    head, head_work, samples, before = "", 0, "input", ""
    if images:
        start = replace(program, steps=program.steps[:images], output=crossing)
        head, head_work = _run(start, name, f"static void {name}_images", 0)
        before = f"""\
        for (int l = 0; l < {LANES}; ++l)
            {name}_images(input + (size_t)l * {inputs}, images + (size_t)l * {size}, work);
"""
        samples = "images"
    end = replace(program, steps=program.steps[images:], input=crossing)
    calls, lane_work = _calls(end, name, images, LANES, {crossing: "from", program.output: "to"})
    lines = "".join(f"        {line}\n" for line in calls.splitlines())
    shared = max(single_work, head_work, lane_work)
    declared = f", *const images = to + {LANES * outputs}" if images else ""
    body = f"""\
    float *const from = work + {shared}, *const to = from + {LANES * size}{declared};
    for (; samples >= {LANES}; samples -= {LANES}) {{
{before}\
        for (int n = 0; n < {size}; ++n)
            for (int l = 0; l < {LANES}; ++l)
                from[n * {LANES} + l] = {samples}[(size_t)l * {size} + n];
{lines}        for (int l = 0; l < {LANES}; ++l)
            for (int n = 0; n < {outputs}; ++n)
                output[(size_t)l * {outputs} + n] = to[n * {LANES} + l];
        input += {LANES * inputs};
        output += {LANES * outputs};
    }}
"""
    return head + signature + body + rest, shared + LANES * (size + outputs + (size if images else 0))


def _shapes(program: Program, name: str, work: tuple[int, int]) -> str:
    def sizes(kind: str, shape: tuple[int, ...]) -> str:
        values = ", ".join(map(str, (len(shape), *shape)))
        return f"const size_t {name}_{kind}_shape[] = {{{values}}};\n"

    shapes = sizes("input", program.input_shape) + sizes("output", program.output_shape)
    return f"{shapes}const size_t {name}_work[2] = {{{work[0]}, {work[1]}}};\n"
