"""The units of one block: heads and neurons inside of it, with their costs.

The block alone is traced, so its inputs and outputs keep their width and only units inside of it can go. As in a cut of
the whole network, the survivors compensate for a unit where it is read; the weights that make it are set to zero and no
other weight compensates for them. A unit's cost is that of the columns that read it, and for the Kronecker curvature
also that of the rows that make it. The local costs of rows are errors at other outputs, which do not add up unless they
are weighted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayeslim.compact import Slice, Unit, UnitGraph, units
from bayeslim.errors import BayeslimError
from bayeslim.prune.budget import Budget
from bayeslim.prune.bundles import bundled
from bayeslim.prune.candidates import Candidates
from bayeslim.prune.ranking import MIN_CAPACITY, rank
from bayeslim.prune.search import fewest
from bayeslim.prune.streaming.layer_curvature import LayerCurvature
from bayeslim.types import Params


@dataclass(frozen=True, eq=False)
class UnitCut:
    """A cut of units.

    Attributes:
        masks: True = kept, by parameter name.
        unread: the weights among them that make cut units, True by parameter name.
        left: why channels stay.
    """

    masks: Params
    unread: Params
    left: dict[str, str]


def cut_units(
    block: nn.Module,
    name: str,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    curvatures: Mapping[str, LayerCurvature],
    means: Mapping[str, Tensor],
    budget: Budget,
    protected: set[str],
) -> UnitCut:
    """Choose the units of a block to cut.

    Args:
        block: the block, of the network itself.
        name: its name.
        arguments: the arguments that it is called with.
        curvatures: of its layers, by name.
        means: the matrix of each layer, float64.
        budget: with a sparsity.
        protected: parameters whose units stay.
    """
    graph = _units(block, name, arguments)
    left = {f"{f.parameter}, dimension {f.dim}": f"{f.count} stay: {f.reason}" for f in graph.frozen}
    layers = {curvature.layer.weight: layer for layer, curvature in curvatures.items() if curvature.layer.groups == 1}
    places = []
    for place, unit in enumerate(graph.units):
        if any(part.parameter in protected for part in unit.incoming):
            left[unit.layer] = "protected"
        elif not any(part.parameter in layers for part in unit.outgoing):
            left[unit.layer] = "no layer with a curvature reads its units"
        else:
            places.append(place)
    if not places:
        raise BayeslimError(
            f'No unit of the block "{name}" can be cut: '
            + ("; ".join(f"{n}: {why}" for n, why in left.items()) or "it has none")
            + "."
        )
    chosen = [graph.units[place] for place in places]
    scores, sizes = _costs(chosen, layers, curvatures, means)
    names = list(dict.fromkeys(unit.layer for unit in chosen))
    weights = tuple(layers)

    candidates = Candidates(
        scores=scores,
        ties=torch.zeros_like(scores),
        sizes=sizes,
        layers=torch.tensor([names.index(unit.layer) for unit in chosen]),
        layer_names=tuple(names),
        gone=torch.zeros(len(chosen), dtype=torch.bool),
        masks=lambda cut: graph.masks([places[item] for item in cut.tolist()]),
        weights=weights,
        left=left,
        unread=lambda cut: _unread([chosen[item] for item in cut.tolist()], graph.shapes),
        graph=graph,
        units=tuple(places),
    )
    if budget.bundles:
        candidates = bundled(candidates, True, uniform=budget.uniform, round_to=budget.round_to)
    if budget.uniform:  # of equal fractions, layers lose theirs in the same order in all blocks, whatever their scores
        candidates = replace(candidates, scores=torch.arange(len(candidates.scores)) * candidates.sizes)
    keep_best = budget.empty_layers == "keep best"
    ranking = rank(candidates, budget.scope, keep_best, True, MIN_CAPACITY if keep_best else 0.0)
    total = sum(torch.Size(graph.shapes[weight]).numel() for weight in weights)
    target = total - round(budget.value * total)

    def remaining(count: int) -> float:
        return float(sum(int(mask.sum()) for n, mask in candidates.masks(ranking.cut(count)).items() if n in layers))

    if remaining(ranking.limit) > target:
        possible = 1 - remaining(ranking.limit) / total
        raise ValueError(
            f'{budget} cannot be met in the block "{name}": cutting units, the most possible is a sparsity of '
            f"{possible:.3f}. Ask for less."
        )
    cut = ranking.cut(fewest(remaining, target, 0, ranking.limit))
    kept = {n: mask for n, mask in candidates.masks(cut).items() if n in layers or not bool(mask.all())}
    return UnitCut(kept, candidates.unread(cut), candidates.left)


class _Alone(nn.Module):
    """A block that takes the tensors among its arguments, and has the others fixed."""

    def __init__(self, block: nn.Module, arguments: Any):
        super().__init__()
        self.block = block
        self.leaves, self.spec = pytree.tree_flatten(arguments)
        self.tensors = tuple(v for v in self.leaves if isinstance(v, Tensor))
        self.leaves = [None if isinstance(v, Tensor) else v for v in self.leaves]
        self.where = tuple(i for i, v in enumerate(pytree.tree_leaves(arguments)) if isinstance(v, Tensor))

    def forward(self, *tensors: Tensor) -> Any:
        """Call the block; of several outputs, return the first."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.where, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        output = self.block(*args, **kwargs)
        return output[0] if isinstance(output, tuple) else output


def _units(block: nn.Module, name: str, arguments: Any) -> UnitGraph:
    """Find the units of a block, with the names of the whole network's parameters."""
    alone = _Alone(block, arguments)
    example, alone.tensors = alone.tensors, ()
    graph = units(alone, tuple(tensor.detach().cpu() for tensor in example))

    def full(parameter: str) -> str:
        return name + parameter.removeprefix("block")

    def renamed(parts: Sequence[Slice]) -> tuple[Slice, ...]:
        return tuple(Slice(full(p.parameter), p.dim, p.indices) for p in parts)

    return UnitGraph(
        tuple(Unit(full(u.layer), u.kind, renamed(u.incoming), renamed(u.outgoing)) for u in graph.units),
        tuple(type(f)(full(f.parameter), f.dim, f.count, f.reason) for f in graph.frozen),
        {full(parameter): shape for parameter, shape in graph.shapes.items()},
        frozenset(map(full, graph.contracted)),
        graph.structure,
    )


def _costs(
    chosen: Sequence[Unit],
    layers: Mapping[str, str],
    curvatures: Mapping[str, LayerCurvature],
    means: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """Compute the cost and the number of weights of every unit."""
    scores = torch.zeros(len(chosen), dtype=torch.float64)
    sizes = torch.zeros(len(chosen), dtype=torch.int64)
    wanted: dict[tuple[str, bool], list[tuple[int, list[int]]]] = {}
    for place, unit in enumerate(chosen):
        for parts, are_rows in ((unit.incoming, True), (unit.outgoing, False)):
            for part in parts:
                if part.parameter in layers:
                    line = _lines(part, curvatures[layers[part.parameter]], are_rows)
                    wanted.setdefault((part.parameter, are_rows), []).append((place, line))
    for (weight, are_rows), sets in wanted.items():
        curvature, mean = curvatures[layers[weight]], means[layers[weight]]
        lines = [line for _, line in sets]
        places = torch.tensor([place for place, _ in sets])
        across = mean.shape[2 if are_rows else 1]
        sizes.index_add_(0, places, torch.tensor([len(line) * across for line in lines]))
        if are_rows and curvature.outputs is None and curvature.weights is None:
            continue
        costs = curvature.row_costs(mean, lines) if are_rows else curvature.column_costs(mean, lines)
        scores.index_add_(0, places, costs)
    return scores, sizes


def _lines(part: Slice, curvature: LayerCurvature, are_rows: bool) -> list[int]:
    """Find the rows or columns of a layer's matrix that a slice of its weight takes."""
    if are_rows:
        return list(part.indices)
    layer = curvature.layer
    kernel = torch.Size(layer.shape[2:]).numel()  # the inputs are ordered by channel, then by kernel position
    return [index * kernel + position for index in part.indices for position in range(kernel)]


def _unread(cut: Sequence[Unit], shapes: Mapping[str, tuple[int, ...]]) -> Params:
    silent: Params = {}
    for unit in cut:
        for part in unit.incoming:
            mask = silent.setdefault(part.parameter, torch.zeros(shapes[part.parameter], dtype=torch.bool))
            mask.index_fill_(part.dim, torch.tensor(part.indices), True)
    return silent
