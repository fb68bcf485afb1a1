"""The tensors of a network: weights, then vectors (whose context is the weights' zeros), then integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from bayeslim.coding.adaptive import Bits, Naturals
from bayeslim.coding.coders import Coder
from bayeslim.coding.features import ColumnFeatures
from bayeslim.coding.fit_context import fit_context, gather_choices
from bayeslim.coding.formats import FORMATS
from bayeslim.coding.geometry import Grid, Integers, Layout, layouts
from bayeslim.coding.positions import ContextModel, code_columns, code_counts, is_sorted
from bayeslim.coding.steps import unzigzag, zigzag
from bayeslim.coding.values import GRID, RAW, ROWS, NonZeros, Values
from bayeslim.errors import UnsupportedModel
from bayeslim.types import Params

POSITIONS, VALUES = "positions", "values"
_MAX_INTEGER = 1 << 64


class NetworkCoder:
    """Codes all tensors of one network; what is `given` is None when reading, here and below.

    Attributes:
        bits: the cost of each part of each tensor, by (name, part).
        raw: the tensors whose values do not lie on a grid.
    """

    def __init__(self, coder: Coder, outline: Mapping[str, Tensor], given: Mapping[str, Tensor] | None):
        self.coder, self.outline, self.given = coder, outline, given
        self.bits: dict[tuple[str, str], float] = {}
        self.raw: list[str] = []
        self._values, self._zeros, self._empty = Values(), Bits(), Bits()
        for name, tensor in outline.items():
            if tensor.dtype not in FORMATS and (
                tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized
            ):
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FORMATS)
                raise UnsupportedModel(
                    f'"{name}" is {tensor.dtype}; files hold {known}, integers and booleans. Convert the network first.'
                )

    def run(self) -> Params:
        """Code all tensors and return them."""
        floating = {name: tensor for name, tensor in self.outline.items() if tensor.dtype in FORMATS}
        weights = [name for name, tensor in floating.items() if tensor.ndim > 1]
        plans = dict(zip(weights, layouts([tuple(floating[name].shape) for name in weights]), strict=True))
        found: Params = {}
        units: Integers | None = None
        for name, layout in plans.items():
            found[name] = self._weight(name, layout, units)
            units = found[name].flatten(1).count_nonzero(1).numpy()
        uses = _uses_of_units({name: tensor.numel() for name, tensor in self.outline.items()}, plans, found)
        for name, tensor in floating.items():
            if tensor.ndim < 2:
                found[name] = self._vector(name, uses.get(name, ()))
        for name in self.outline:
            if name not in floating:
                found[name] = self._integers(name)
        return {name: found[name] for name in self.outline}

    def _weight(self, name: str, layout: Layout, units: Integers | None) -> Tensor:
        grid, before = layout.columns, self.coder.bits
        given = None if self.given is None else self.given[name].flatten(1)
        feeders = np.repeat(units, grid.area) if layout.reads_previous and units is not None else None
        rows, model, counts = None, ContextModel(), None
        if given is not None:
            row_of, columns = np.nonzero((given != 0).numpy())
            counts = np.bincount(row_of, minlength=layout.rows).tolist()
            rows = np.split(columns, np.cumsum(counts)[:-1])
            model = fit_context(gather_choices(rows, ColumnFeatures(grid, feeders)))
        nonzeros = NonZeros([np.zeros(0, np.int64)] * layout.rows, grid)
        if self._empty.code(self.coder, int(counts is not None and any(counts)), None):
            model = model.code(self.coder)
            is_ordered = bool(self.coder.bit(int(rows is not None and is_sorted(rows)), 1, 2))
            counts = code_counts(self.coder, counts, layout.rows, grid.size, is_ordered)
            rows = code_columns(self.coder, rows, counts, ColumnFeatures(grid, feeders), model, is_ordered)
            nonzeros = NonZeros(rows, grid)
        self.bits[name, POSITIONS] = self.coder.bits - before
        return self._filled(name, nonzeros)

    def _vector(self, name: str, uses: Sequence[Integers]) -> Tensor:
        before, size = self.coder.bits, self.outline[name].numel()
        given = None if self.given is None else (self.given[name].flatten() != 0).tolist()
        columns = []
        for place in range(size):
            context = tuple(bool(one[place]) for one in uses)
            if self._zeros.code(self.coder, int(given is not None and given[place]), None, context):
                columns.append(place)
        self.bits[name, POSITIONS] = self.coder.bits - before
        return self._filled(name, NonZeros([np.array(columns, np.int64)], Grid(size)))

    def _filled(self, name: str, nonzeros: NonZeros) -> Tensor:
        """Code the values of a tensor's non-zeros and return the tensor."""
        outline, before = self.outline[name], self.coder.bits
        form = FORMATS[outline.dtype]
        width = max(nonzeros.grid.size, 1)
        flat = np.concatenate(
            [row * width + columns for row, columns in enumerate(nonzeros.rows)] or [np.zeros(0, np.int64)]
        )
        filled = torch.zeros(outline.numel(), dtype=outline.dtype)
        if len(flat):
            patterns, kind = None, 0
            if self.given is not None:
                patterns = form.patterns(self.given[name].flatten()[torch.from_numpy(flat)])
                costs = self._values.costs(patterns, nonzeros, form)
                kind = min(costs, key=lambda kind: costs[kind])
                if kind == RAW and not costs.keys() & {GRID, ROWS}:
                    self.raw.append(name)
            patterns = self._values.code(self.coder, kind, patterns, nonzeros, form)
            filled[torch.from_numpy(flat)] = form.numbers(patterns)
        self.bits[name, VALUES] = self.coder.bits - before
        return filled.view(outline.shape)

    def _integers(self, name: str) -> Tensor:
        before, outline, model = self.coder.bits, self.outline[name], Naturals(_MAX_INTEGER)
        given = None if self.given is None else self.given[name].flatten().tolist()
        found = [
            unzigzag(model.code(self.coder, zigzag(int(given[place])) if given is not None else 0))
            for place in range(outline.numel())
        ]
        self.bits[name, VALUES] = self.coder.bits - before
        return torch.tensor(found, dtype=torch.int64).to(outline.dtype).view(outline.shape)


def _uses_of_units(sizes: Mapping[str, int], plans: Mapping[str, Layout], weights: Params) -> dict[str, list[Integers]]:
    """Count the non-zero weights that each unit reads, and those that read it.

    The counts are by vector, for vectors with an entry per unit of the weight before.
    """
    found: dict[str, list[Integers]] = {}
    order, last = list(plans), -1
    for name in sizes:
        if name in plans:
            last = order.index(name)
        elif last >= 0:
            units = [weights[order[last]].flatten(1).count_nonzero(1).numpy()]
            following = order[last + 1] if last + 1 < len(order) else None
            if following and plans[following].reads_previous:
                grid = plans[following].columns
                units.append(weights[following].flatten(1).count_nonzero(0).numpy().reshape(-1, grid.area).sum(1))
            found[name] = [counts for counts in units if len(counts) == sizes[name]]
    return found
