"""Networks that are called as graphs, in two parts: what is the same for all that have other weights, and the rest.

Many a network brings its inputs into another shape before it comes to a weight, and a recurrent layer begins by putting
positions first. Of several networks that is done once. Attention is found, so that it can be called in another way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from bayeslim import recurrent
from bayeslim.attention import attended
from bayeslim.stochastic import plain_type
from bayeslim.types import modules_of

PART = "part "
"""How names of parts begin that are called."""

_SHAPED = frozenset({
    torch.flatten, torch.unflatten, torch.reshape, torch.squeeze, torch.unsqueeze, torch.transpose, torch.permute,
    torch.movedim, operator.getitem, getattr, "flatten", "unflatten", "reshape", "view", "squeeze", "unsqueeze",
    "transpose", "permute", "movedim", "contiguous", "size",
})  # fmt: skip
_LAYOUTS = frozenset({
    torch.as_strided, torch.view_as_real, torch.view_as_complex, "as_strided", "view", "view_as", "stride",
    "is_contiguous", "data_ptr", "storage_offset", "untyped_storage", "numpy",
})  # fmt: skip
"""What depends on how values lie in memory."""
_ELEMENTWISE = frozenset({
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg,
    torch.add, torch.sub, torch.mul, torch.div, torch.exp, torch.sin, torch.cos, torch.tanh, torch.sigmoid,
})  # fmt: skip
SHAPERS = (nn.Flatten, nn.Unflatten, nn.Identity)
"""What gives the same values in another shape, or a shape."""


class Graph(nn.Module):
    """A network that is called as a graph.

    Args:
        parts: modules by their paths, then whatever is called, by a name of its own: layers, rows of them, and values.
        first: gives what is the same for all networks that have other weights, a tuple.
        rest: gives the outputs for that.
        targets: what it calls besides parts.
        abreast: which parts the rest calls, if it does the same with values of several networks, that have one more
            dimension in front, where these do; else None.
    """

    first: Callable[..., Any]
    rest: Callable[..., Any]
    targets: frozenset[Any]
    abreast: frozenset[str] | None

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        first: Callable[..., Any],
        rest: Callable[..., Any],
        targets: frozenset[Any] = frozenset(),
        abreast: frozenset[str] | None = None,
    ):
        super().__init__()
        self._modules.update(parts)
        vars(self).update(first=first, rest=rest, targets=targets, abreast=abreast)  # a part may have the same name
        self.training = False

    def bind(self) -> None:
        """From now on call parts without what modules do before and after."""
        for name, part in self._modules.items():
            if part is not None and name.startswith(PART):
                vars(self)[name] = part.bound() if isinstance(part, (OfLayer, Attention)) else part.forward

    def forward(self, x: Any) -> Any:
        """What the network gives."""
        return self.rest(self, *self.first(self, x))


class Value(nn.Module):
    """Gives a parameter of a module."""

    def __init__(self, owner: nn.Module, leaf: str):
        super().__init__()
        self.owner, self.leaf = owner, leaf

    @classmethod
    def of(cls, path: str, layers: Mapping[str, nn.Module], parts: dict[str, nn.Module]) -> Value:
        """Of the parameter with a path, that of a module which is not called being that of one that stands for it."""
        owner, _, leaf = path.rpartition(".")
        own = parts.setdefault(owner, nn.Module())._parameters
        own[leaf] = layers[owner]._parameters[leaf]
        return cls(parts[owner], leaf)

    def forward(self) -> Any:
        """The parameter."""
        return self.owner._parameters[self.leaf]


class Call(nn.Module):
    """A function, or a method by its name, of one value."""

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        super().__init__()
        self.target, self.args, self.kwargs = target, args, kwargs

    def bound(self) -> Callable[[Any], Any]:
        """It without a module around it."""
        if isinstance(self.target, str):
            return operator.methodcaller(self.target, *self.args, **self.kwargs)
        if not self.args and not self.kwargs:
            return self.target  # type: ignore[no-any-return]
        target, args, kwargs = self.target, self.args, self.kwargs
        return lambda x: target(x, *args, **kwargs)

    def forward(self, x: Any) -> Any:
        """What it gives."""
        return self.bound()(x)


class OfLayer(nn.Module):
    """A function of a layer and a value."""

    def __init__(self, function: Callable[[nn.Module, Any], Any], layer: nn.Module):
        super().__init__()
        self.function, self.layer = function, layer

    def bound(self) -> Callable[[Any], Any]:
        """It without a module around it, which takes a while to read what it has."""
        return partial(self.function, self.layer)

    def forward(self, x: Any) -> Any:
        """What it gives."""
        return self.function(self.layer, x)


class Attention(nn.Module):
    """Attention without masks, as torch has it; where it is bound, as is quickest."""

    def bound(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """What is quickest, which may round in another way."""
        return attended

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What all positions get."""
        return F.scaled_dot_product_attention(query, key, value)


def asks_for_layout(model: nn.Module) -> bool:
    """Whether a network made of rows may do something else with values that lie in memory in another way."""
    targets = {module.target for module in modules_of(model) if isinstance(module, Call)}
    if isinstance(model, Graph):
        targets |= model.targets
    homes = {str(getattr(target, "__module__", "torch")).split(".")[0] for target in targets}  # methods have none
    return not _LAYOUTS.isdisjoint(targets) or not homes <= {"torch", "_operator", "builtins"}


def graph_of(graph: fx.Graph, parts: dict[str, nn.Module]) -> Graph:
    """A network, of a graph that calls parts of it; both are changed."""
    _take_recurrent_layers_apart(graph, parts)
    _find_attention(graph, parts)
    targets = frozenset(node.target for node in graph.nodes if node.op in ("call_function", "call_method"))
    two = _in_two(graph, parts)
    first, rest = (type(fx.GraphModule(parts, part)).forward for part in two)
    return Graph(parts, first, rest, targets, _called_abreast(two[1], parts))


def _called_abreast(rest: fx.Graph, parts: Mapping[str, nn.Module]) -> frozenset[str] | None:
    """Which parts a graph calls; None if not all that it does is done to every row of values, wherever that is."""
    own: set[fx.Node] = set()  # what is not the same for all networks
    for node in rest.nodes:
        if node.op == "output":
            called = frozenset(str(node.target) for node in rest.nodes if node.op == "call_module")
            return called if node.args[0] in own else None
        if not _is_of_each(node, own):
            return None
        has_weights = node.op == "call_module" and any(True for _ in parts[str(node.target)].parameters())
        if has_weights or not own.isdisjoint(node.all_input_nodes):
            own.add(node)
    return None


def _is_of_each(node: fx.Node, own: set[fx.Node]) -> bool:
    """Whether a node does the same to every row of its values; rows are joined only of values of one kind."""
    if node.op == "call_module":
        return len(node.args) == 1 and not node.kwargs
    if node.target is torch.cat:
        dims = [*node.args[1:], *node.kwargs.values()]
        return dims == [-1] and node.kwargs.keys() <= {"dim"} and len({n in own for n in node.all_input_nodes}) == 1
    return node.op == "placeholder" or _is_elementwise(node)


def _is_elementwise(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _ELEMENTWISE and not node.kwargs


def _take_recurrent_layers_apart(graph: fx.Graph, parts: dict[str, nn.Module]) -> None:
    for node in list(graph.nodes):
        layer = parts[str(node.target)] if node.op == "call_module" else None
        if isinstance(layer, nn.RNNBase) and recurrent.is_known(layer) and len(node.args) == 1 and not node.kwargs:
            for function in (recurrent.begun, recurrent.continued):
                name = f"{PART}{len(parts)}"
                parts[name] = OfLayer(function, layer)
                if function is recurrent.begun:
                    with graph.inserting_before(node):
                        node.args = (graph.call_module(name, node.args),)
                else:
                    node.target = name


def _find_attention(graph: fx.Graph, parts: dict[str, nn.Module]) -> None:
    for node in graph.nodes:
        if node.target is F.scaled_dot_product_attention and len(node.args) == 3 and not node.kwargs:
            name = f"{PART}{len(parts)}"
            parts[name] = Attention()
            node.op, node.target = "call_module", name


def _in_two(graph: fx.Graph, parts: Mapping[str, nn.Module]) -> tuple[fx.Graph, fx.Graph]:
    """What a graph does to shapes before it comes to weights, and the rest of it.

    All is left to the rest where anything is given what is the same that may write to it.
    """
    source = next(iter(graph.nodes))
    same = {source}
    for node in graph.nodes:
        if _is_of_shapes(node, parts) and same.issuperset(node.all_input_nodes):
            same.add(node)
    given = [node for node in graph.nodes if node in same and not same.issuperset(node.users)]
    if not all(user in same or _only_reads(user, parts) for node in given for user in node.users):
        same, given = {source}, [source]
    first, rest = fx.Graph(), fx.Graph()
    begun: dict[fx.Node, fx.Node] = {}
    left = {node: rest.placeholder(f"value_{number}") for number, node in enumerate(given)}
    for node in graph.nodes:
        if node in same:
            begun[node] = first.node_copy(node, begun.__getitem__)
        else:
            left[node] = rest.node_copy(node, left.__getitem__)
    first.output(tuple(begun[node] for node in given))
    return first, rest


def _is_of_shapes(node: fx.Node, parts: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        part = parts[str(node.target)]
        return type(part) in SHAPERS or (isinstance(part, OfLayer) and part.function is recurrent.begun)
    return node.op in ("call_function", "call_method") and node.target in _SHAPED


def _only_reads(node: fx.Node, parts: Mapping[str, nn.Module]) -> bool:
    """Whether a node is a layer with weights, a row that comes to one, or a function that does not write to inputs."""
    if node.op != "call_module":
        return _is_elementwise(node)
    part = parts[str(node.target)]
    layers = iter(part) if type(part) is nn.Sequential else iter([part])
    layer = next((layer for layer in layers if type(layer) not in SHAPERS), part)
    is_torchs = plain_type(layer).__module__.startswith("torch.nn.modules.")
    return isinstance(layer, OfLayer) or (is_torchs and bool(layer._parameters))
