"""Placement of tensors in one work area, by the steps between which they live."""

from __future__ import annotations

from bayeslim.export.c.steps import Program

ALIGNMENT_FLOATS = 16


def place_tensors(program: Program) -> tuple[dict[int, int], int]:
    """Place every tensor but the input and the output.

    Returns:
        the offset of each tensor in floats, and the size of the work area.
    """
    born = {step.output: time for time, step in enumerate(program.steps)}
    dies = {number: time for time, step in enumerate(program.steps) for number in step.inputs}
    placed: dict[int, int] = {}
    for number in sorted(born, key=lambda one: -program.sizes[one]):
        if number == program.output:
            continue
        size = _aligned(program.sizes[number])
        alive = (born[number], dies.get(number, born[number]))
        taken = sorted(
            (placed[other], placed[other] + _aligned(program.sizes[other]))
            for other in placed
            if born[other] <= alive[1] and dies.get(other, born[other]) >= alive[0]
        )
        offset = 0
        for start, end in taken:
            if offset + size <= start:
                break
            offset = max(offset, end)
        placed[number] = offset
    total = max((offset + _aligned(program.sizes[number]) for number, offset in placed.items()), default=0)
    return placed, total


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_FLOATS) * ALIGNMENT_FLOATS
