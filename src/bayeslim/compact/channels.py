"""Labels for every channel of every tensor in a network's graph.

The graph is walked once with real tensors and, beside them, tensors of labels of the same shape. Operations that only
move elements are *run on the labels themselves*, so that no rule can get a view, a permutation or a concatenation
wrong. Contractions tie the labels of their input to the columns of their weight and give their output the labels of
its rows; a label belongs to a (parameter, dimension, index), so shared modules and tied weights need no special care.
Pointwise operations unite the labels of their operands. An operation that is not understood freezes what goes in and
what comes out, and gives the reason.

In the end every tensor varies along one dimension only, so that removing any set of classes leaves every tensor
rectangular. Where labels vary along several (heads × dimensions), the outermost is taken: whole heads, whole groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from bayeslim.compact.labels import Labels, settle, slim, varying
from bayeslim.compact.ops import (
    COPIES,
    CREATION,
    INDEXING,
    MOVEMENT,
    Call,
    after_mixing,
    indexed_dims,
    is_pointwise,
    mixed_dims,
    move,
    read_call,
)
from bayeslim.compact.trace import Trace, Walker, op_name
from bayeslim.errors import UnsupportedModel

Rule = Callable[["Channels", Call], Any]
RULES: dict[str, Rule] = {}
"""Rules for contractions and norms by operation name; each returns the labels of the result."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the operations of these names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


@dataclass(frozen=True)
class Contraction:
    """A weight that reads and produces channels, as a matrix of connections (P, Q).

    Attributes:
        node: where it happens.
        source: the node that is read, or None for the recurrent connections inside an LSTM or GRU.
        dim: the channel dimension of the source.
        weight: the weight's name; its `produces` and `reads` dimensions span the matrix.
        produces: the dimension of the weight with size P.
        reads: the dimension of the weight with size Q.
        channel: which channel of the source each connection reads, (P, Q).
        output: which channel of the result each connection feeds, (P, Q).
        inputs: the labels of the channels read, (P, Q).
        outputs: the labels of the channels produced, (P, Q).
        bias: the name of the bias that a constant input can be folded into, if folding is exact.
    """

    node: fx.Node
    source: fx.Node | None
    dim: int
    weight: str
    produces: int
    reads: int
    channel: Tensor
    output: Tensor
    inputs: Tensor
    outputs: Tensor
    bias: str | None = None


@dataclass(frozen=True)
class Product:
    """A contraction of two activations over their channels."""

    node: fx.Node
    sources: tuple[fx.Node, fx.Node]
    dims: tuple[int, int]
    labels: Tensor


@dataclass
class Axis:
    """The labels along one dimension of a parameter or buffer, and their roles."""

    labels: Tensor
    roles: set[str] = field(default_factory=set)


class Channels(Walker):
    """The walk that labels every channel.

    Attributes:
        labels: the union-find forest.
        of: the labels of each node's result; a list for nodes with several results.
        axes: labels by (tensor name, dimension) of weights, biases and norms.
        elements: labels of tensors with several dimensions that are used element by element (position embeddings).
        contractions: which weights read and produce which channels.
        products: contractions between activations.
        groups: how many channels one group holds, for nodes whose number of groups follows from their channels.
        kinds: the kind of unit that labels stand for: neurons, channels, heads, recurrent units.
        scalars: the values of the integers in the graph.
        copied: nodes that copy a tensor along a new dimension, such as a mask for every head.
        names: each parameter node's tensor, by the first of its names.
    """

    def __init__(self, trace: Trace):
        super().__init__(trace)
        self.labels = Labels()
        self.of: dict[fx.Node, Any] = {}
        self.axes: dict[tuple[str, int], Axis] = {}
        self.elements: dict[str, Tensor] = {}
        self.contractions: list[Contraction] = []
        self.products: list[Product] = []
        self.groups: dict[fx.Node, int] = {}
        self.kinds: list[tuple[str, Tensor]] = []
        self.scalars: dict[fx.Node, Any] = {}
        self.copied: set[fx.Node] = set()
        self._coordinates: dict[fx.Node, tuple[str, list[Tensor]]] = {}
        self.names = {node: trace.names.get(str(node.target), (str(node.target),))[0] for node in self._parameters()}
        self.walk()
        self._make_rectangular()

    def _parameters(self) -> list[fx.Node]:
        return [node for node in self.trace.module.graph.nodes if node.op == "get_attr"]

    # walking

    def visit(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Label the result of a node.

        Raises:
            UnsupportedModel: if the example gives a part of the network nothing to read.
        """
        _check_not_empty(node, result)
        if node.op == "placeholder":
            if isinstance(result, Tensor):
                self.of[node] = self.labels.fixed("it is an input of the network", result.shape)
        elif node.op == "get_attr":
            self._parameter(node, result)
        elif node.op == "output":
            for source in node.all_input_nodes:
                if source in self.of or source in self._coordinates:
                    self.labels.freeze(self.read(source), "it is an output of the network")
        elif any(isinstance(value, Tensor) for value in _flat(result)):
            self.of[node] = self._settled(node, self._label(read_call(node, args, kwargs, result)))
        else:
            self.scalars[node] = result

    def _parameter(self, node: fx.Node, value: Tensor) -> None:
        name = self.names[node]
        grid = [
            torch.arange(size).view([-1 if d == dim else 1 for d in range(value.ndim)])
            for dim, size in enumerate(value.shape)
        ]
        self._coordinates[node] = name, [settle(axis.expand(value.shape)) for axis in grid]

    def _label(self, call: Call) -> Any:
        if call.name == "getitem":
            nodes: dict[Any, Any] = call.nodes
            return self.of[nodes[0]][nodes[1]]
        if call.name in RULES:
            return RULES[call.name](self, call)
        if call.name in COPIES and call.operands[0] in self._coordinates:  # a weight in another precision
            self._coordinates[call.node] = self._coordinates[call.operands[0]]
            return None
        if call.name in MOVEMENT:
            return self.moved(call)
        if call.name in INDEXING:
            source = call.nodes["self"]
            self.scalars.update({node: self.env[node] for node in call.operands if node is not source})
            return self._run(call, source, self.labels.unite_along(self.read(source), indexed_dims(call)))
        if call.name in CREATION:
            return self.labels.mint(*call.result.shape)
        if not call.operands or not any(self.known(node) for node in call.operands):
            return self._fixed(call, "it is a constant of the graph")
        if is_pointwise(call):
            return self.combine([node for node in call.operands if self.known(node)], call.result.shape)
        dims = mixed_dims(call)
        if dims is not None:
            found = self.labels.unite_along(self.read(call.operands[0]), dims)
            for other in call.operands[1:]:
                if self.known(other):
                    self.labels.freeze(self.read(other), f"{call.name} is steered by it")
            return _like(call.result, lambda part: after_mixing(found, dims, part.shape))
        return self.unknown(call, f"{call.name} is not understood")

    def moved(self, call: Call) -> Any:
        """Run a movement on the labels of its operands."""
        known = [node for node in call.operands if self.known(node)]
        if len(known) == 1 and known[0] in self._coordinates and isinstance(call.result, Tensor):
            name, grid = self._coordinates[known[0]]
            self._coordinates[call.node] = name, [settle(self._run(call, known[0], axis)) for axis in grid]
            return None
        return move(call.node, lambda node: self.read(node) if node in known else self.scalar(node))

    def _run(self, call: Call, source: fx.Node, labels: Tensor) -> Any:
        return move(call.node, lambda node: labels if node is source else self.scalar(node))

    def scalar(self, node: fx.Node) -> Any:
        """Return the value of an integer or of a tensor of indices."""
        return self.scalars[node] if node in self.scalars else self.env[node]

    def _settled(self, node: fx.Node, labels: Any) -> Any:
        if isinstance(labels, Tensor):
            found = self.labels.find(labels)
            if not varying(found) and found.numel():
                self.labels.freeze(found, "it is the only channel there")
            return found
        return None if labels is None else [self._settled(node, part) for part in labels]

    # reading and combining labels

    def known(self, node: fx.Node) -> bool:
        """Return whether a node has labels; integers of the graph have none."""
        return node in self.of or node in self._coordinates

    def read(self, node: fx.Node) -> Tensor:
        """Return the labels of a node's result; make those of a parameter."""
        if self.of.get(node) is not None:
            return self.labels.find(self.of[node])
        name, grid = self._coordinates[node]
        labels = self._element_labels(name)
        if name in self.elements:
            # Inputs of other sizes read other positions: the positions of a dimension that is read in part stay.
            sizes = self._tensor(name).shape
            partly = [dim for dim, axis in enumerate(grid) if len(torch.unique(slim(axis))) < sizes[dim]]
            labels = self.labels.unite_along(labels, partly)
        labels = settle(labels[tuple(grid)] if grid else labels)
        self.of[node] = labels
        return labels

    def _element_labels(self, name: str) -> Tensor:
        tensor = self._tensor(name)
        wide = [dim for dim, size in enumerate(tensor.shape) if size > 1]
        if len(wide) == 1:
            return self.axis(name, wide[0], "produces").view(
                [-1 if dim == wide[0] else 1 for dim in range(tensor.ndim)]
            )
        if name not in self.elements:
            self.elements[name] = self.labels.mint(*tensor.shape)
        return self.elements[name]

    def _tensor(self, name: str) -> Tensor:
        owner, _, attribute = name.rpartition(".")
        return cast(Tensor, getattr(self.trace.module.get_submodule(owner), attribute))

    def axis(self, name: str, dim: int, role: str) -> Tensor:
        """Return the labels along a dimension that "produces" or "reads" channels."""
        if (name, dim) not in self.axes:
            self.axes[name, dim] = Axis(self.labels.mint(self._tensor(name).shape[dim]))
        self.axes[name, dim].roles.add(role)
        return self.axes[name, dim].labels

    def weight(self, node: Any) -> tuple[str, list[int]] | None:
        """Find the parameter behind a weight and the order of its dimensions.

        Returns:
            The parameter's name and its dimension for each of the weight's; None if the weight is computed.
        """
        if node not in self._coordinates:
            return None
        name, grid = self._coordinates[node]
        rank = grid[0].ndim if grid else 0
        dims: list[int] = [-1] * rank
        for dim, axis in enumerate(grid):
            along = varying(axis)
            size = self._tensor(name).shape[dim]
            if len(along) > 1 or (size > 1 and not along) or (along and dims[along[0]] >= 0):
                return None
            if along and not torch.equal(_line(axis, along[0]), torch.arange(size)):
                return None
            if along:
                dims[along[0]] = dim
        spare = [dim for dim in range(len(grid)) if dim not in dims]
        for place in reversed(range(rank)):
            if dims[place] < 0 and spare:
                dims[place] = spare.pop()
        return name, dims

    def labels_along(self, node: fx.Node, dim: int) -> Tensor:
        """Unite a node's labels along all dimensions but one; return those along it."""
        labels = self.read(node)
        dim %= labels.ndim
        found = self.labels.unite_along(labels, [d for d in range(labels.ndim) if d != dim])
        return _line(found, dim)

    def combine(self, nodes: list[fx.Node], shape: torch.Size) -> Tensor:
        """Unite the labels of broadcast operands; return the labels of the result.

        An operand that is broadcast along the dimension in which the others vary is not tied to them.
        """
        operands = [_aligned(self.read(node), len(shape)) for node in nodes]
        active = [node not in self._coordinates for node in nodes]
        dims = {dim for labels in operands for dim in varying(labels)}
        if any(0 < len(_indexed(labels, dims)) < len(dims) for labels in operands):
            alive = {
                dim for labels, is_active in zip(operands, active, strict=True) if is_active for dim in varying(labels)
            }
            outermost = min(alive or dims)
            operands = [
                self.labels.unite_along(labels, [d for d in range(labels.ndim) if d != outermost])
                for labels in operands
            ]
            dims = {dim for labels in operands for dim in varying(labels)}
        tied = [labels for labels in operands if _indexed(labels, dims) == dims]
        free = [labels for labels in tied if not bool(self.labels.is_fixed(labels).all())]
        for labels in operands:
            if not any(labels is other for other in tied):
                self.labels.freeze(labels, "it is shared by all channels of another tensor")
        lead = (free or tied or operands)[0]
        for labels in tied:
            self.labels.tie(lead, labels)
        return self.labels.find(lead.expand(shape))

    # freezing, and finishing

    def unknown(self, call: Call, reason: str) -> Any:
        """Freeze everything that goes in and comes out."""
        for node in call.operands:
            if node in self._coordinates:
                self._freeze_parameter(self._coordinates[node][0], reason)
            elif node in self.of:
                for labels in _flat(self.of[node]):
                    self.labels.freeze(self.labels.find(labels), reason)
        return self._fixed(call, reason)

    def _fixed(self, call: Call, reason: str) -> Any:
        return _like(call.result, lambda part: self.labels.fixed(reason, part.shape))

    def _freeze_parameter(self, name: str, reason: str) -> None:
        for dim in range(self._tensor(name).ndim):
            self.labels.freeze(self.axis(name, dim, "produces"), reason)

    def _make_rectangular(self) -> None:
        for node, (name, _) in self._coordinates.items():
            if name not in self.elements and sum(size > 1 for size in self._tensor(name).shape) == 1:
                self.read(node)
        for name in self.elements:
            if any((name, dim) in self.axes for dim in range(self.elements[name].ndim)):
                self.labels.freeze(self.elements[name], f"{name} is used in two ways")
                self._freeze_parameter(name, f"{name} is used in two ways")
        tensors = [part for labels in self.of.values() for part in _flat(labels)] + list(self.elements.values())
        changed = True
        while changed:
            changed = False
            for labels in tensors:
                dims = varying(self.labels.find(labels))
                if len(dims) > 1:
                    self.labels.unite_along(labels, dims[1:])
                    changed = True
        for labels in tensors:
            found = self.labels.find(labels)
            if not varying(found) and found.numel():
                self.labels.freeze(found, "it is the only channel there")
        self._freeze_unseen()

    def _freeze_unseen(self) -> None:
        """Freeze parameters whose channels appear in no activation."""
        seen = torch.zeros(self.labels.count, dtype=torch.bool)
        for node, labels in self.of.items():
            if node not in self._coordinates:
                for part in _flat(labels):
                    seen[slim(self.labels.find(part))] = True
        for axis in self.axes.values():
            found = self.labels.find(axis.labels)
            self.labels.freeze(found[~seen[found]], "it is used in a way that is not understood")


def _line(labels: Tensor, dim: int) -> Tensor:
    """Take the entries along `dim` at index 0 of the other dimensions."""
    for other in range(labels.ndim):
        if other != dim:
            labels = labels.narrow(other, 0, 1)
    return labels.reshape(-1)


def _check_not_empty(node: fx.Node, result: Any) -> None:
    """Check that a tensor whose size depends on values is not empty.

    These may be the rows of an expert. An empty tensor has no labels that tie the channels of the layers around it.
    """
    if not isinstance(result, Tensor) or result.numel():
        return
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols  # sympy takes long to import

    if has_free_unbacked_symbols(node.meta.get("val")):
        raise UnsupportedModel(
            f"The network selects rows by their values ({op_name(node)}), and none of the example, so the channels "
            "there cannot be followed. Pass an example with rows for every part of the network."
        )


def _aligned(labels: Tensor, rank: int) -> Tensor:
    return labels[(None,) * (rank - labels.ndim)]


def _indexed(labels: Tensor, dims: set[int]) -> set[int]:
    return {dim for dim in dims if labels.shape[dim] > 1}


def _flat(values: Any) -> list[Any]:
    if isinstance(values, (tuple, list)):
        return [part for value in values for part in _flat(value)]
    return [] if values is None else [values]


def _like(result: Any, labels: Callable[[Tensor], Tensor]) -> Any:
    return [labels(part) for part in result] if isinstance(result, (tuple, list)) else labels(result)
