"""All tensors of a network through a coder: weights, then vectors, which know the weights' zeros, then integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from bayeslim.coding.adaptive import Bits, Naturals
from bayeslim.coding.coders import Coder
from bayeslim.coding.crowd import Crowd, closest_crowd
from bayeslim.coding.evidence import Evidence
from bayeslim.coding.expected import Expected, Masses
from bayeslim.coding.fit_context import best_start
from bayeslim.coding.formats import FORMATS
from bayeslim.coding.geometry import Grid, Integers, Layout, layouts
from bayeslim.coding.hill import Hill
from bayeslim.coding.positions import Taste, code_columns, code_counts, is_sorted
from bayeslim.coding.steps import fold, unfold
from bayeslim.coding.values import RAW, Places, Values
from bayeslim.errors import UnsupportedModel
from bayeslim.types import Params

POSITIONS, VALUES = "positions", "values"
_LARGEST_INTEGER = 1 << 64


class Passage:
    """The tensors of one network on their way through a coder.

    Args:
        coder: which way.
        outline: tensors by name, of which shapes and types are read.
        given: the tensors; None when reading.
        expected: what a posterior says of each, where there is one.

    Attributes:
        bits: how many went into each part of each tensor, by (name, part).
        raw: the tensors whose values lie on no grid.
    """

    def __init__(
        self,
        coder: Coder,
        outline: Mapping[str, Tensor],
        given: Mapping[str, Tensor] | None,
        expected: Mapping[str, Expected] | None = None,
    ):
        self.coder, self.outline, self.given, self.expected = coder, outline, given, expected or {}
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
        """Pass all tensors; returns them."""
        floating = {name: tensor for name, tensor in self.outline.items() if tensor.dtype in FORMATS}
        weights = [name for name, tensor in floating.items() if tensor.ndim > 1]
        plans = dict(zip(weights, layouts([tuple(floating[name].shape) for name in weights]), strict=True))
        found: Params = {}
        units: Integers | None = None
        for name, layout in plans.items():
            found[name] = self._weight(name, layout, units)
            units = found[name].flatten(1).count_nonzero(1).numpy()
        lives = _lives({name: tensor.numel() for name, tensor in self.outline.items()}, plans, found)
        for name, tensor in floating.items():
            if tensor.ndim < 2:
                found[name] = self._vector(name, lives.get(name, ()))
        for name in self.outline:
            if name not in floating:
                found[name] = self._integers(name)
        return {name: found[name] for name in self.outline}

    def _weight(self, name: str, layout: Layout, units: Integers | None) -> Tensor:
        grid, before = layout.columns, self.coder.bits
        given = None if self.given is None else self.given[name].flatten(1)
        feeders = np.repeat(units, grid.area) if layout.reads_previous and units is not None else None
        hits, hill, taste, counts, crowd = None, None, Taste(), None, Crowd()
        if given is not None:
            rows, columns = np.nonzero((given != 0).numpy())
            counts = np.bincount(rows, minlength=layout.rows).tolist()
            hits = np.split(columns, np.cumsum(counts)[:-1])
            expected = self._columns(name, columns, grid)
            hill, taste = best_start(hits, grid, feeders, expected)
            crowd = closest_crowd(float(expected.sum()), layout.rows)
        some = self._empty.code(self.coder, int(counts is not None and any(counts)), None)
        places = Places([np.zeros(0, np.int64)] * layout.rows, grid)
        if some:
            if grid.area > 1 and self.coder.bit(int(hill is not None), 1, 2):
                hill = (hill or Hill()).code(self.coder, grid)
            taste = taste.code(self.coder)
            ordered = bool(self.coder.bit(int(hits is not None and is_sorted(hits)), 1, 2))
            crowd = crowd.code(self.coder)
            counts = code_counts(self.coder, counts, layout.rows, grid.size, crowd, ordered)
            hits = code_columns(self.coder, hits, counts, Evidence(grid, feeders, hill), taste, ordered)
            places = Places(hits, grid, self._sizes(name))
        self.bits[name, POSITIONS] = self.coder.bits - before
        return self._filled(name, places)

    def _columns(self, name: str, columns: Integers, grid: Grid) -> Masses:
        """How many non-zeros each column is to have: what the posterior says, or else as many as there are."""
        told = self.expected[name].columns if name in self.expected else None
        return np.bincount(columns, minlength=grid.size).astype(float) if told is None else told

    def _sizes(self, name: str) -> Masses | None:
        return self.expected[name].sizes if name in self.expected else None

    def _vector(self, name: str, lives: Sequence[Integers]) -> Tensor:
        before, size = self.coder.bits, self.outline[name].numel()
        given = None if self.given is None else (self.given[name].flatten() != 0).tolist()
        hits = []
        for place in range(size):
            life = tuple(bool(one[place]) for one in lives)
            if self._zeros.code(self.coder, int(given is not None and given[place]), None, life):
                hits.append(place)
        self.bits[name, POSITIONS] = self.coder.bits - before
        return self._filled(name, Places([np.array(hits, np.int64)], Grid(size), self._sizes(name)))

    def _filled(self, name: str, places: Places) -> Tensor:
        """A tensor with the values of its non-zeros, which pass."""
        outline, before = self.outline[name], self.coder.bits
        form = FORMATS[outline.dtype]
        columns = max(places.grid.size, 1)
        flat = np.concatenate([row * columns + hits for row, hits in enumerate(places.hits)] or [np.zeros(0, np.int64)])
        filled = torch.zeros(outline.numel(), dtype=outline.dtype)
        if len(flat):
            patterns, kind = None, 0
            if self.given is not None:
                patterns = form.patterns(self.given[name].flatten()[torch.from_numpy(flat)])
                kind = self._values.best(patterns, places, form)
                if kind == RAW and not self._values.lie_on_grids(patterns, places, form):
                    self.raw.append(name)
            patterns = self._values.code(self.coder, kind, patterns, places, form)
            filled[torch.from_numpy(flat)] = form.numbers(patterns)
        self.bits[name, VALUES] = self.coder.bits - before
        return filled.view(outline.shape)

    def _integers(self, name: str) -> Tensor:
        before, outline, model = self.coder.bits, self.outline[name], Naturals(_LARGEST_INTEGER)
        given = None if self.given is None else self.given[name].flatten().tolist()
        found = [
            unfold(model.code(self.coder, fold(int(given[place])) if given is not None else 0))
            for place in range(outline.numel())
        ]
        self.bits[name, VALUES] = self.coder.bits - before
        return torch.tensor(found, dtype=torch.int64).to(outline.dtype).view(outline.shape)


def _lives(sizes: Mapping[str, int], plans: Mapping[str, Layout], weights: Params) -> dict[str, list[Integers]]:
    """For vectors with an entry for each unit of the weight before: what the units read, and what reads them."""
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
