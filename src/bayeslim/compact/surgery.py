"""Compaction: from a network with zeros to a plain network that is really smaller.

Every unit that is not needed is removed: units whose incoming or outgoing weights are all zero, and units that only
they read. A constant that such a unit fed forward (its bias through its activation, a BatchNorm's shift) is added to
the bias of its readers where that is exact; where it is not, or depends on the sizes of the inputs, the unit stays.
Zeros that leave no unit idle stay as zeros.

The result is the user's own module with smaller layers where its forward allows it, otherwise the traced graph. Either
is compared with the masked network before it is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, fx, nn

from bayeslim.compact.adapters import has_adapters, update_ranks_
from bayeslim.compact.config import is_built_from_config, update_config_
from bayeslim.compact.example import left_out
from bayeslim.compact.gather import drop_unread_features
from bayeslim.compact.graph import Structure, UnitGraph, restore_empty, sliced_axes
from bayeslim.compact.graph import units as find_units
from bayeslim.compact.guards import insert_guards_
from bayeslim.compact.liveness import CONSTANTS, Constants, Liveness
from bayeslim.compact.proof import Reference
from bayeslim.compact.rebuild import (
    has_tensor,
    new_groups,
    put_tensors,
    resize_modules,
    rewrite_graph,
    size_attributes,
)
from bayeslim.compact.shapes import Shrinking
from bayeslim.compact.trace import constants_of, evaluating_copy, quiet_copy, tensors_of
from bayeslim.errors import BayeslimError, ShapeMismatch, closest
from bayeslim.types import Inputs, device_of


class CompactionFailed(BayeslimError, RuntimeError):
    """The smaller network does not give the outputs of the masked one."""


@dataclass(frozen=True, repr=False)
class Compaction:
    """A smaller network, and the record of its compaction.

    Attributes:
        network: the smaller network, plain PyTorch, in the mode the original was in (a graph is always in eval mode).
        kind: "modules" if it consists of the user's own modules, "graph" if it is the traced graph.
        why: the reason for the kind.
        removed: indices of the removed units in `units.units`.
        kept: for each parameter and buffer that shrank, the indices that stay along each dimension.
        difference: the largest difference found between the two networks' outputs, relative to the largest output.
        units: all units of the original.
        parameters: the number of parameters before and after.
    """

    network: nn.Module
    kind: Literal["modules", "graph"]
    why: str
    removed: tuple[int, ...]
    kept: dict[str, dict[int, Tensor]]
    difference: float
    units: UnitGraph
    parameters: tuple[int, int]

    def __repr__(self) -> str:
        before, after = self.parameters
        return (
            f"Compaction: {len(self.removed)} of {len(self.units.units)} units removed, {before:,} -> {after:,} "
            f"parameters ({before / max(after, 1):.3g}x), as {self.kind} ({self.why}); "
            f"largest relative difference {self.difference:.2g}"
        )


def compact_network(
    model: nn.Module,
    masks: Mapping[str, Tensor] | None,
    example: Inputs,
    *,
    tolerance: float = 1e-6,
    drop_inputs: bool = False,
) -> nn.Module:
    """Return the smaller network alone; `compaction` also returns its record.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> mask = torch.arange(8) < 3
    >>> slim = compact_network(net, {"0.weight": mask[:, None].expand(8, 4), "0.bias": mask}, torch.randn(2, 4))
    >>> slim
    Sequential(
      (0): Linear(in_features=4, out_features=3, bias=True)
      (1): ReLU()
      (2): Linear(in_features=3, out_features=2, bias=True)
    )
    """
    return compaction(model, masks, example, tolerance=tolerance, drop_inputs=drop_inputs).network


def compaction(
    model: nn.Module,
    masks: Mapping[str, Tensor] | None,
    example: Inputs,
    *,
    tolerance: float = 1e-6,
    drop_inputs: bool = False,
    units: UnitGraph | None = None,
) -> Compaction:
    """Turn a masked network into a smaller one with the same outputs in eval mode.

    Args:
        model: the network. It is not changed.
        masks: True where a weight is kept, by parameter name; missing parameters are kept whole. None: the zeros of
            the network as it is.
        example: inputs on which to trace and check: a tensor, a tuple of arguments or a dict.
        tolerance: the largest difference allowed, relative to the largest output; in double precision where the
            network runs in it, else on top of the rounding of its own precision. Constants that are folded into biases
            are rounded to theirs, and that comes on top too.
        drop_inputs: read only those input features that the first layers use, and those positions of flattened feature
            maps that are used, through a gather (the result is then a graph).
        units: the units, if they are known already.

    Raises:
        ShapeMismatch: if masks do not fit the network, or the network not the example.
        UnsupportedModel: if the network cannot be traced, or is random in eval mode.
        ValueError: if it has parameters that are not finite.
        CompactionFailed: if the smaller network gives other outputs.
    """
    masked = _masked_copy(model, masks)
    reference = Reference(masked, example, tolerance)
    found = units if units is not None else find_units(masked, example)
    _check_units(found, masked)
    channels = found.structure.channels
    own = tensors_of(masked)
    everything = own | constants_of(channels.trace, masked)
    tensors = {name: tensor.detach().cpu() for name, tensor in everything.items()}
    live = Liveness(channels, tensors)
    least = _unneeded(found, live, "none")
    missing = left_out(masked, example)
    for constants in CONSTANTS:
        gone = _unneeded(found, live, constants) if constants != "none" else least
        proven = torch.equal(gone, least)  # by zero weights alone, whatever the sizes of the inputs
        shrinking, slices, small, folded = _shrunk(found, tensors, live, gone)
        for dtype in folded:
            reference.allow_folded(dtype)
        on_device = {name: tensor.to(device_of(masked)) for name, tensor in small.items()}
        try:
            network, kind, why, gap = _rebuild(masked, found, shrinking, on_device, reference, drop_inputs)
        except CompactionFailed:
            if not folded:
                raise
            continue
        # A graph refuses inputs that violate its guards, and arguments that it was not traced with; the user's modules
        # take both, and nothing is known of their outputs then.
        if kind == "graph" or not bool(gone.any()):
            break
        elsewhere = reference.agrees_elsewhere(network, channels.trace)
        if proven and not elsewhere:
            network, kind, why, gap = _rewritten(masked, found, shrinking, on_device, reference, _BRANCHES)
        if proven or (elsewhere and not missing and reference.agrees_beyond(network, channels.trace)):
            break
    if missing and kind == "modules" and not torch.equal(least, _unneeded(found, live, "all")):
        why += f"; units that feed a constant stay, since the example does not give {', '.join(missing)}"
    if kind == "modules":
        modes = {name: module.training for name, module in model.named_modules()}
        for name, module in network.named_modules():
            module.training = modes.get(name, module.training)
    removed = tuple(shrinking.gone[found.structure.roots].nonzero().flatten().tolist())
    if kind == "modules" and removed and has_adapters(network):
        why = f"{why}; {update_ranks_(network)}"
    elif kind == "modules" and removed and is_built_from_config(network):
        why = f"{why}; {update_config_(network, found, removed, reference)}"
    return Compaction(
        network, kind, why, removed,
        kept={name: dims for name, dims in slices.items() if name in own},
        difference=gap, units=found, parameters=(_count(model), _count(network)),
    )  # fmt: skip


def _shrunk(
    units: UnitGraph, tensors: Mapping[str, Tensor], live: Liveness, gone: Tensor
) -> tuple[Shrinking, dict[str, dict[int, Tensor]], dict[str, Tensor], set[torch.dtype]]:
    """Return the shrinking, kept indices, new tensors, and dtypes of folded biases."""
    channels = units.structure.channels
    shrinking = Shrinking(channels, gone)
    slices = _slices(shrinking)
    small = {name: sliced(tensors[name], dims) for name, dims in slices.items()}
    folded = set()
    for place, contraction in enumerate(channels.contractions):
        if contraction.bias is not None and bool(shrinking.gone[channels.labels.find(contraction.inputs)].any()):
            bias = small.get(contraction.bias, tensors[contraction.bias])
            shift = sliced(live.folded(place, shrinking.gone), slices.get(contraction.bias, {}))
            small[contraction.bias] = (bias.double() + shift.double()).to(bias.dtype)
            if bool(shift.any()):
                folded.add(bias.dtype)
    return shrinking, slices, small, folded


def _masked_copy(model: nn.Module, masks: Mapping[str, Tensor] | None) -> nn.Module:
    masked = evaluating_copy(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, mask in (masks or {}).items():
        if name not in parameters:
            hint = closest(name, parameters)
            raise ShapeMismatch(
                f'masks names "{name}", which is no parameter of {type(model).__name__}.'
                f"{f' Closest names: {hint}.' if hint else ''} Use the names of model.named_parameters()."
            )
        if mask.dtype != torch.bool or mask.shape != parameters[name].shape:
            raise ShapeMismatch(
                f'The mask of "{name}" must be boolean with shape {tuple(parameters[name].shape)}, True where a weight '
                f"is kept. Got {mask.dtype} with shape {tuple(mask.shape)}."
            )
    for name, tensor in tensors_of(model).items():
        infinite = name in parameters and bool(torch.isinf(tensor).any())  # a buffer may hold a mask of -inf
        if infinite or bool(torch.isnan(tensor).any()):
            raise ValueError(
                f'"{name}" of {type(model).__name__} holds NaN or infinite values. Repair or retrain the network first.'
            )
    copied = dict(masked.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, mask in (masks or {}).items():
            copied[name].masked_fill_(~mask.to(copied[name].device), 0)
    return masked


def _check_units(units: UnitGraph, model: nn.Module) -> None:
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if shapes != units.shapes:
        odd = sorted(name for name in {**shapes, **units.shapes} if shapes.get(name) != units.shapes.get(name))
        raise ShapeMismatch(
            f"The units are those of another network: {', '.join(odd[:3])} differ. "
            "Find them again with units(model, example)."
        )


def _unneeded(units: UnitGraph, live: Liveness, constants: Constants) -> Tensor:
    """Find the classes to remove: they are not needed, and no tensor gets empty.

    A class that has to come back is needed from then on, and so are the classes that it reads.
    """
    channels, roots = units.structure.channels, units.structure.roots
    removable = torch.zeros(channels.labels.count, dtype=torch.bool)
    removable[roots] = True
    seeds = ~removable
    while True:
        gone = removable & ~live.needed(seeds, constants)
        back = restore_empty(channels, gone)
        for node in Shrinking(channels, gone & ~back).illegal():
            for part in (node, *node.all_input_nodes):
                labels = channels.of.get(part)
                for tensor in labels if isinstance(labels, list) else [labels]:
                    if tensor is not None:
                        back[channels.labels.find(tensor)] = True
        if not bool((back & gone).any()):
            return gone
        seeds = seeds | back


def _slices(shrinking: Shrinking) -> dict[str, dict[int, Tensor]]:
    """Return the indices that stay, by tensor and dimension."""
    slices: dict[str, dict[int, Tensor]] = {}
    for name, dim, labels, _ in sliced_axes(shrinking.channels):
        stay = ~shrinking.gone[shrinking.channels.labels.find(labels)]
        if not bool(stay.all()):
            slices.setdefault(name, {})[dim] = stay.nonzero().flatten()
    return slices


def sliced(tensor: Tensor, dims: Mapping[int, Tensor]) -> Tensor:
    """Copy the part of a tensor at some indices along some dimensions."""
    for dim, places in dims.items():
        tensor = tensor.index_select(dim, places.to(tensor.device))
    return tensor.clone()


_Rebuilt: TypeAlias = tuple[nn.Module, Literal["modules", "graph"], str, float]
_BRANCHES = "its forward may read removed units where it branches otherwise than on the example"


def _rebuild(
    masked: nn.Module,
    units: UnitGraph,
    shrinking: Shrinking,
    small: dict[str, Tensor],
    reference: Reference,
    drop_inputs: bool,
) -> _Rebuilt:
    structure = units.structure
    graph = rewrite_graph(structure, shrinking, masked, small) if drop_inputs else None
    if graph is not None and (dropped := drop_unread_features(graph)):
        return _guarded(graph, masked, structure, reference, f"{dropped} features are dropped behind a gather")
    network = quiet_copy(masked)
    own = {name: tensor for name, tensor in small.items() if has_tensor(network, name)}
    put_tensors(network, own, {names[0]: names for names in structure.channels.trace.names.values()})
    resize_modules(network, new_groups(structure, shrinking))
    for attributes in ({}, *size_attributes(network, structure, shrinking)):
        with _attributes(attributes) as keep:
            proof = reference.compare(network)
            if proof.holds:
                keep()
                return network, "modules", "the network's own modules take the new sizes", proof.difference
    return _rewritten(masked, units, shrinking, small, reference, "the network's own modules rely on the old sizes")


def _rewritten(
    masked: nn.Module,
    units: UnitGraph,
    shrinking: Shrinking,
    small: dict[str, Tensor],
    reference: Reference,
    why: str,
) -> _Rebuilt:
    graph = rewrite_graph(units.structure, shrinking, masked, small)
    return _guarded(graph, masked, units.structure, reference, why)


def _guarded(
    graph: fx.GraphModule, masked: nn.Module, structure: Structure, reference: Reference, why: str
) -> _Rebuilt:
    """Compare a graph with the network that it replaces, and give it its guards."""
    proof = reference.compare(graph)
    if not proof.holds and structure.channels.trace.fixes_batch:
        raise CompactionFailed(
            f"{type(masked).__name__} has to be rewritten as a graph, since {why}, and its forward fixes the batch "
            "size of such a graph. Take sizes from x.shape in it, and do not loop over the batch."
        )
    if not proof.holds:
        raise CompactionFailed(
            f"The compacted {type(masked).__name__} differs from the masked one by {proof.difference:.2g} of its "
            f"largest output (tolerance {reference.tolerance:.2g}). Nothing was changed. Raise tolerance if that is "
            "only rounding; otherwise report it as a fault of bayeslim."
        )
    insert_guards_(graph, reference.needed_guards(graph, structure.channels.trace))
    return graph, "graph", why, proof.difference


@contextmanager
def _attributes(values: Mapping[tuple[nn.Module, str], int]) -> Iterator[Callable[[], None]]:
    """Set attributes inside the context, or for good if `keep` is called."""
    before = {(module, name): getattr(module, name) for module, name in values}
    kept: list[bool] = []
    for (module, name), value in values.items():
        setattr(module, name, value)
    try:
        yield lambda: kept.append(True)
    finally:
        if not kept:
            for (module, name), value in before.items():
                setattr(module, name, value)


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
