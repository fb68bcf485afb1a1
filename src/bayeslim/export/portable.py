"""A network as data: its graph of operations as JSON.

`torch.export`'s own file format (.pt2) is not safe to read from strangers: it unpickles weights and evaluates symbolic
expressions. Here a graph is a list of steps, each an input, a tensor by name, or one operation of a table with
its arguments. Reading it builds nothing else: the table (`operations`) holds only pure functions, and every name that
reaches generated code is an identifier.

A hostile graph can still take too much time or memory when it is *run*, as any network can.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from bayeslim.compact.guards import guards_of, insert_guards_
from bayeslim.compact.program import exported
from bayeslim.compact.proof import needed_guards
from bayeslim.compact.quiet import quiet
from bayeslim.compact.recurrence import restore_recurrent_
from bayeslim.compact.trace import functional
from bayeslim.errors import CorruptFile, UnsupportedModel
from bayeslim.export.operations import function, name_of
from bayeslim.types import Inputs, Params

_NAMED_TYPES = (torch.dtype, torch.layout, torch.memory_format)
_PART = re.compile(r"[A-Za-z0-9_]+")
_TAKEN = {"self", *keyword.kwlist}
_MAX_GRAPH_STEPS = 50_000


def as_graph(network: nn.Module, inputs: Sequence[Inputs]) -> fx.GraphModule:
    """Return the network as a graph of operations, traced if necessary.

    Raises:
        UnsupportedModel: if it cannot be traced.
    """
    if isinstance(network, fx.GraphModule) and all(_is_known(node) for node in network.graph.nodes):
        return network
    if not inputs:
        raise UnsupportedModel(
            f"{type(network).__name__} must be traced on an example to be stored with its graph. Pass example=x."
        )
    program = exported(network, inputs)
    guards = guards_of(program, network, inputs[0])
    with quiet():
        graph = functional(program, decomposed=())
        if not all(_is_known(node) for node in graph.graph.nodes):
            graph = program.run_decompositions({}).module(check_guards=False)  # which takes twice as long as tracing
            restore_recurrent_(graph.graph)
    insert_guards_(graph, needed_guards(guards, network, graph, inputs[0]))
    return graph


def describe(graph: fx.GraphModule) -> tuple[dict[str, Any], Params]:
    """Describe a graph as JSON; return it and the tensors that it names.

    Raises:
        UnsupportedModel: if it has an operation that the format does not store.
    """
    places: dict[fx.Node, int] = {}
    steps: list[dict[str, Any]] = []
    tensors: Params = {}
    inputs = _input_names(graph)
    result: Any = None
    for node in graph.graph.nodes:
        if node.op == "output":
            result = _described(_unflattened(graph, node.args[0]), places)
            continue
        if _is_assertion(node):
            continue
        if not _is_known(node):
            raise UnsupportedModel(f"The graph calls {node.target}, which bayeslim does not store.")
        places[node] = len(steps)
        if node.op == "placeholder":
            steps.append({"input": inputs[node]})
        elif node.op == "get_attr":
            tensors[str(node.target)] = _attribute(graph, str(node.target))
            steps.append({"tensor": str(node.target)})
        else:
            step = {"call": name_of(node.target), "args": _described(list(node.args), places)}
            if node.kwargs:
                step["kwargs"] = {key: _described(value, places) for key, value in node.kwargs.items()}
            steps.append(step)
    trained = sorted(name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter))
    name = type(graph).__name__
    return {"name": name, "steps": steps, "output": result, "parameters": trained}, tensors


def build(program: Any, tensors: Mapping[str, Tensor]) -> fx.GraphModule:
    """Build the network of a description that is not trusted, in eval mode.

    Raises:
        CorruptFile: if it is not a description, or names a tensor that is missing.
    """
    try:
        return _built(program, tensors)
    except CorruptFile:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, SyntaxError) as error:
        raise CorruptFile(f"The file does not hold a graph that bayeslim wrote: {error!r}.") from error


def _built(program: Any, tensors: Mapping[str, Tensor]) -> fx.GraphModule:
    steps = program["steps"]
    if not isinstance(steps, list) or len(steps) > _MAX_GRAPH_STEPS:
        raise CorruptFile("The file's graph is not a list of steps, or far too long.")
    graph, nodes, root = fx.Graph(), list[fx.Node](), nn.Module()
    for step in steps:
        if "input" in step:
            nodes.append(graph.placeholder(_identifier(step["input"])))
        elif "tensor" in step:
            name = str(step["tensor"])
            _put(root, name, tensors[name], name in program["parameters"])
            nodes.append(graph.get_attr(name))
        else:
            args = _read(step["args"], nodes)
            kwargs = {_identifier(key): _read(value, nodes) for key, value in step.get("kwargs", {}).items()}
            nodes.append(graph.call_function(function(step["call"]), tuple(args), kwargs))
    graph.output(_read(program["output"], nodes))
    graph.lint()
    return fx.GraphModule(root, graph, class_name=_identifier(program["name"])).eval()


def _is_known(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr", "output") or (
        node.op == "call_function" and (_is_assertion(node) or name_of(node.target) is not None)
    )


def _is_assertion(node: fx.Node) -> bool:
    """Return whether a node is an assertion of torch about its own tracing."""
    name = getattr(node.target, "__name__", "")
    internal = name.startswith(("_assert", "sym_constrain")) and node.target is not torch._assert
    return internal and not node.users and node.op == "call_function"


def _described(value: Any, places: Mapping[fx.Node, int]) -> Any:
    """Encode an argument as JSON."""
    if isinstance(value, fx.Node):
        return {"$step": places[value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, _NAMED_TYPES):
        return {"$torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    # fx keeps subclasses of list and dict, and torch.Size is one of tuple; a named tuple is something else
    if isinstance(value, list) or type(value) in (tuple, torch.Size):
        items = [_described(v, places) for v in value]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"$dict": {key: _described(v, places) for key, v in value.items()}}
    raise UnsupportedModel(f"The graph holds a {type(value).__name__}, which bayeslim does not store.")


def _read(value: Any, nodes: list[fx.Node]) -> Any:
    """Decode an argument from JSON."""
    if isinstance(value, list):
        return [_read(v, nodes) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "$step":
        if type(content) is not int or not 0 <= content < len(nodes):
            raise CorruptFile(f"The file's graph refers to step {content!r} before it happens.")
        return nodes[content]
    if kind == "$tuple":
        return tuple(_read(v, nodes) for v in content)
    if kind == "$dict":
        return {str(key): _read(v, nodes) for key, v in content.items()}
    if kind == "$device":
        return torch.device(content)
    named = getattr(torch, str(content), None) if kind == "$torch" else None
    if not isinstance(named, _NAMED_TYPES):
        raise CorruptFile(f"The file's graph holds {value!r}, which bayeslim never writes.")
    return named


def _input_names(graph: fx.GraphModule) -> dict[fx.Node, str]:
    """Return the names of the forward's arguments, which must be single tensors."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    info = getattr(graph.graph._codegen, "pytree_info", None)
    if info is None:
        return {node: str(node.target) for node in placeholders}
    args, kwargs = pytree.tree_unflatten(placeholders, info.in_spec)
    names = dict(zip(args, info.orig_args, strict=False)) if all(isinstance(a, fx.Node) for a in args) else {}
    names |= {node: key for key, node in kwargs.items() if isinstance(node, fx.Node)}
    if len(names) != len(placeholders):
        raise UnsupportedModel("The network takes nested inputs, which bayeslim does not store. Flatten them.")
    return names


def _unflattened(graph: fx.GraphModule, output: Any) -> Any:
    info = getattr(graph.graph._codegen, "pytree_info", None)
    return output if info is None else pytree.tree_unflatten(list(output), info.out_spec)


def _attribute(graph: fx.GraphModule, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    value = getattr(graph.get_submodule(owner), leaf)
    if not isinstance(value, Tensor):
        raise UnsupportedModel(f'The graph reads "{name}", which is no tensor.')
    return value


def _put(root: nn.Module, name: str, tensor: Tensor, trained: bool) -> None:
    *path, leaf = name.split(".")
    if not all(_PART.fullmatch(part) for part in (*path, leaf)):
        raise CorruptFile(f"The file's graph names a tensor {name!r}, which is no name of one.")
    owner = root
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    if leaf in owner._parameters or leaf in owner._buffers:
        return
    if trained:
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    else:
        owner.register_buffer(leaf, tensor)


def _identifier(name: Any) -> str:
    if not isinstance(name, str) or not name.isascii() or not name.isidentifier() or name in _TAKEN:
        raise CorruptFile(f"The file's graph uses {name!r} as a name.")
    return name
