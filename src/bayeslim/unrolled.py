"""Networks as rows: what a forward calls one after the other, as an `nn.Sequential` of the same layers.

Rows are called at less cost (`fused`, `methods.chain`), and most forwards that people write are one, or are made of a
few. What a forward does is seen by `torch.fx`, which follows it once without numbers. With numbers it might do
something else, so that rows are used only for inputs of a shape for which they gave the same outputs, to the bit; and
they are made anew when anything else was put into one of the network's modules, or where its code reads it.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.container import ModuleDict, ModuleList, Sequential

from bayeslim.belongings import Belongings
from bayeslim.fused import is_compiled, is_plain, is_quiet
from bayeslim.graphs import PART, SHAPERS, Attention, Call, Graph, OfLayer, Value, graph_of
from bayeslim.posteriors.particles import tensors_of
from bayeslim.stochastic import plain_type
from bayeslim.types import Inputs, call, device_of, modules_of

EXAMPLES = 7
"""How many inputs both are compared on: a number that is seldom that of anything else."""

_MODULES: dict[Any, type[nn.Module]] = {
    F.relu: nn.ReLU, torch.relu: nn.ReLU, "relu": nn.ReLU, F.gelu: nn.GELU, F.silu: nn.SiLU, F.elu: nn.ELU,
    F.leaky_relu: nn.LeakyReLU, F.softplus: nn.Softplus, F.tanh: nn.Tanh, torch.tanh: nn.Tanh, "tanh": nn.Tanh,
    F.sigmoid: nn.Sigmoid, torch.sigmoid: nn.Sigmoid, "sigmoid": nn.Sigmoid,
    F.max_pool1d: nn.MaxPool1d, F.avg_pool1d: nn.AvgPool1d, F.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    F.max_pool2d: nn.MaxPool2d, F.avg_pool2d: nn.AvgPool2d, F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
}  # fmt: skip
"""Modules that do the same as functions and methods, given the same arguments."""
_FLATTENED = (torch.flatten, "flatten")
_RESHAPED = (torch.reshape, "reshape", "view")
_AVERAGED, _POSITIONS = (torch.mean, "mean"), ((2, 3), [2, 3], (-2, -1), [-2, -1], (-1, -2), [-1, -2])
_DROPPED = (F.dropout, F.dropout2d, F.alpha_dropout)


@dataclass(eq=False, slots=True)
class _Seen:
    """A network that was looked at.

    Attributes:
        belongings: what its modules held then.
        rows: it as a row, or made of rows, if it could be followed.
        agrees: whether both gave the same, by the kind of inputs.
    """

    belongings: Belongings
    rows: nn.Module | None
    agrees: dict[Any, bool] = field(default_factory=dict)


_seen: WeakKeyDictionary[nn.Module, _Seen] = WeakKeyDictionary()


def unrolled(model: nn.Module, inputs: Inputs) -> nn.Module:
    """A network in evaluation mode for such inputs: an `nn.Sequential` if it is a row, else a network made of rows.

    The tensors and their names are those of the model. It is the model itself where nothing is known to be the same.
    """
    if not isinstance(inputs, Tensor) or is_unrolled(model) or not is_quiet(inputs.device.type):
        return model
    seen = _seen.get(model)
    if seen is None or not seen.belongings.are_left():
        looked_into = [m for m in modules_of(model) if m is model or is_followed(m) or isinstance(m, nn.RNNBase)]
        rows = _rows_of(model)
        belongings = Belongings(looked_into, seen=True)
        seen = _seen[model] = _Seen(belongings, rows if belongings.are_known else None)
    if seen.rows is None:
        return model
    kind = min(inputs.shape[0], EXAMPLES), inputs.shape[1:], inputs.dtype, inputs.device
    if kind not in seen.agrees:
        seen.agrees[kind] = _agree(model, seen.rows, inputs[:EXAMPLES])
    return seen.rows if seen.agrees[kind] else model


def is_unrolled(model: nn.Module) -> bool:
    """Whether a network is a row of torch's own layers, or was made of some."""
    return isinstance(model, Graph) or (
        type(model) is Sequential and not any(map(is_followed, model._modules.values()))
    )


def is_followed(module: nn.Module | None) -> bool:
    """Whether what a module does is what it calls: torch's own layers are called as they are."""
    kind = nn.Identity if module is None else plain_type(module)
    if kind in (Sequential, ModuleList, ModuleDict):
        return True
    return kind not in (Attention, Call, OfLayer, Value) and not kind.__module__.startswith("torch.nn.modules.")


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not is_followed(m)


def _rows_of(model: nn.Module) -> nn.Module | None:
    """A network as a row, or made of rows; None if it cannot be followed, is looked on at, or keeps anything."""
    modules = modules_of(model)
    if not all(map(is_plain, modules)) or any(map(is_compiled, modules)):
        return None
    if any(module._buffers and not isinstance(module, _NormBase) for module in modules):
        return None
    if plain_type(model) is nn.Linear:
        alike = object.__new__(type(model))  # as a row that has the model would keep it for ever
        vars(alike).update(vars(model))
        return _row_of({"": alike})  # tensors have the names that they had
    if len(inspect.signature(model.forward).parameters) != 1:
        return None
    before = Belongings(modules)
    try:
        with _random_states_kept(model):
            graph = _Tracer().trace(model)
        if not before.are_left():
            return None  # somebody may want to read what it leaves there
    except Exception:  # whatever a forward does when it is given no numbers
        return None
    finally:
        before.put_back()
    for node in graph.nodes:
        if node.op == "call_module" and not node.args and node.kwargs.keys() == {"input"}:
            node.args, node.kwargs = (node.kwargs["input"],), {}
    layers = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    if any(node.op == "get_attr" and node.target not in parameters for node in graph.nodes):
        return None
    rows = _one_row(graph, layers) or _several_rows(graph, layers)
    own, found = tensors_of(model), tensors_of(rows)
    return rows if own.keys() == found.keys() and all(found[name] is own[name] for name in own) else None


def _random_states_kept(model: nn.Module) -> Any:
    device = device_of(model)
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _one_row(graph: fx.Graph, layers: Mapping[str, nn.Module]) -> nn.Sequential | None:
    """The row that a graph is; None if anything but the last value goes into a call."""
    links: dict[str, nn.Module] = {}
    sizes, counts = _sizes_in(graph)
    last, *nodes, output = (node for node in graph.nodes if node not in sizes)
    for node in nodes:
        modules = _modules_of(node, counts, layers) or _call_of(node)
        if not modules or node.args[0] is not last or any(isinstance(module, nn.RNNBase) for module in modules):
            return None  # a graph does less for recurrent layers
        path = str(node.target)
        for number, module in enumerate(modules):
            is_first = module is layers.get(path) and path not in links  # tensors have the names that they had
            links[path if is_first else f"{node.name}({number})"] = module
        last = node
    return _row_of(links) if output.args[0] is last else None


def _row_of(modules: Mapping[str, nn.Module]) -> nn.Sequential:
    row = Sequential()
    row._modules.update(modules)
    row.training = False  # of itself: the layers stay as they are
    return row


def _several_rows(graph: fx.Graph, layers: Mapping[str, nn.Module]) -> nn.Module:
    """A network that calls rows, of layers of which each is given what the one before gave, and nobody else is.

    What only gives another shape stands alone, as it may be the same for all networks.
    """
    nodes = list(graph.nodes)
    parts: dict[str, nn.Module] = {node.target: layers[node.target] for node in nodes if node.op == "call_module"}
    called: dict[fx.Node, list[nn.Module]] = {}
    for node in nodes:
        if node.op == "get_attr":
            called[node] = [Value.of(str(node.target), layers, parts)]
        elif modules := _modules_of(node, set(), layers):
            before: Any = node.args[0]
            is_for_this_alone = before.args and before in called and len(before.users) == 1
            if is_for_this_alone and not all(isinstance(module, SHAPERS) for module in called[before]):
                modules = called.pop(before) + modules
                node.args = (before.args[0], *node.args[1:])
                graph.erase_node(before)
            called[node] = modules
        elif node.op == "call_module":
            called[node] = [layers[node.target]]
    for node, modules in called.items():
        name = f"{PART}{len(parts)}"  # without dots, so that it is an attribute
        parts[name] = modules[0] if len(modules) == 1 else _row_of({str(i): m for i, m in enumerate(modules)})
        args, kwargs = (node.args, node.kwargs) if node.op == "call_module" else (node.args[:1], {})
        with graph.inserting_after(node):
            node.replace_all_uses_with(graph.call_module(name, args, kwargs))
        graph.erase_node(node)
    return graph_of(graph, parts)


def _sizes_in(graph: fx.Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """What a graph reads of shapes that is of use here, and what of it is how many examples there are."""
    shapes: set[fx.Node] = set()
    counts: set[fx.Node] = set()
    for node in graph.nodes:
        target, rest = node.target if node.op != "call_module" else None, node.args[1:]
        if (target == "size" and not rest) or (target is getattr and rest == ("shape",)):
            shapes.add(node)
        elif rest == (0,) and (target == "size" or (target is operator.getitem and node.args[0] in shapes)):
            counts.add(node)
    return shapes | counts, counts


def _modules_of(node: fx.Node, counts: set[fx.Node], layers: Mapping[str, nn.Module]) -> list[nn.Module]:
    """What a node does to its first value, as modules; none if it is not known, or needs anything else."""
    target: Any = node.target
    args, kwargs = node.args[1:], node.kwargs
    if not node.args or not isinstance(node.args[0], fx.Node):
        return []
    if node.op == "call_module":
        return [] if args or kwargs else [layers[target]]
    if target in _RESHAPED and not kwargs and _are_rows(args, counts):
        return [nn.Flatten()]
    if len(node.all_input_nodes) != 1:
        return []
    if target in _FLATTENED and args in ((1,), (1, -1)) and not kwargs:
        return [nn.Flatten()]
    if target in _AVERAGED and args and args[0] in _POSITIONS and not args[1:] and not kwargs:
        return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    if target in _DROPPED and kwargs.get("training", True) is False:
        return [nn.Identity()]
    kind = _MODULES.get(target)
    if kind is None or (kind in (nn.MaxPool1d, nn.MaxPool2d) and len(args) > 4):  # which are in another order
        return []
    return [kind(*args, **kwargs).eval()]


def _are_rows(shape: tuple[Any, ...], counts: set[fx.Node]) -> bool:
    """Whether a value gets one row for an example: of a length that is given, that is seen from what comes out."""
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    first, second = shape if len(shape) == 2 else (0, 0)
    return (first in counts and second == -1) or (first == -1 and isinstance(second, int))


def _call_of(node: fx.Node) -> list[nn.Module]:
    """A node as a module that calls the same, if it is given one value, once."""
    others: list[fx.Node] = []
    fx.node.map_arg((node.args[1:], dict(node.kwargs)), others.append)
    known = node.op in ("call_function", "call_method") and node.all_input_nodes == list(node.args[:1]) and not others
    return [Call(node.target, node.args[1:], node.kwargs)] if known else []


def _agree(model: nn.Module, rows: nn.Module, inputs: Tensor) -> bool:
    """Whether both give the same for inputs, of which they are given copies, as they may write to them."""
    with _random_states_kept(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again
        try:
            expected, found = call(model, inputs.clone()), rows(inputs.clone())
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError):
            return False
    return isinstance(found, Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
