"""Guards: the conditions on inputs under which a traced graph is valid.

`torch.export` leaves sizes dynamic where it can. Where a forward makes a constant of a size (a loop over time steps),
or branches on one, the trace is valid only for inputs like the example, and the conditions are its guards. A graph that
replaces a network checks its guards, and refuses other inputs.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from bayeslim.types import Inputs, arguments

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
MAX_SEARCHED_SIZE = 512
"""The largest size that is searched for inputs that violate a guard, besides the numbers that the guard names."""

MAX_SEARCHED_ELEMENTS = 2**24
"""The largest input that is made to violate a guard."""


@dataclass(frozen=True)
class Size:
    """A size of an input, or its value if it is a number.

    Attributes:
        leaf: the index of the input among the flat inputs.
        dim: the dimension; None for the value of a number.
    """

    leaf: int
    dim: int | None


@dataclass(frozen=True)
class Guard:
    """A condition on the sizes and numbers among the inputs.

    Attributes:
        function: the comparison.
        arguments: its operands: `Size`, numbers, and tuples (function, operands...) of the same kinds.
        text: the condition in Python.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    text: str

    @property
    def excludes_one_value(self) -> bool:
        """Whether the guard has the form a != b."""
        return self.function is operator.ne

    def holds(self, leaves: Sequence[Any]) -> bool:
        """Evaluate the guard on flat inputs."""
        return bool(self.function(*(_value(argument, leaves) for argument in self.arguments)))

    def sizes(self) -> list[Size]:
        """List the sizes that the guard reads."""
        return sorted(set(_sizes(self.arguments)), key=lambda size: (size.leaf, size.dim or 0))


def guards_of(program: torch.export.ExportedProgram, network: nn.Module, example: Inputs) -> tuple[Guard, ...]:
    """Read the guards of an exported program.

    Args:
        program: the program.
        network: the network that was traced.
        example: the inputs that it was traced on.
    """
    args, kwargs = arguments(example)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    numbered = pytree.tree_unflatten(list(range(len(leaves))), spec)
    bound = inspect.signature(network.forward).bind(*numbered[0], **numbered[1]).arguments
    paths = {f"L{pytree.keystr(path)}": leaf for path, leaf in pytree.tree_flatten_with_path(bound)[0]}
    paths |= {f"L['flat_args'][{leaf}]": leaf for leaf in range(len(leaves))}
    names = {leaf: _plain(path) for path, leaf in reversed(paths.items())}
    found = [guard for text in program._guards_code for guard in _parsed(text, paths, names, leaves)]
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
    for leaf, (name, given) in enumerate(zip(inputs, leaves, strict=True)):
        traced = values[name]
        if isinstance(traced, Tensor):
            fixed = [(dim, size) for dim, size in enumerate(traced.shape) if isinstance(size, int)]
            found += [_fixed(Size(leaf, dim), size, names) for dim, size in fixed]
        elif not isinstance(traced, torch.SymInt):
            found.append(_fixed(Size(leaf, None), given, names))
    return tuple(dict.fromkeys(found))


def violations(guard: Guard, example: Inputs) -> Iterator[Inputs]:
    """Make inputs close to the example that violate a guard by one size or number.

    Args:
        guard: the guard.
        example: inputs that satisfy it.
    """
    leaves, spec = pytree.tree_flatten(example)  # in the order of the arguments: a tensor, a tuple or a dict
    for size in guard.sizes():
        for other in _candidates(leaves[size.leaf], size.dim, _numbers(guard.arguments)):
            variants = [  # a mask has the length of its sequence: both change together
                [_resized(x, at, size, other, leaves, together) for at, x in enumerate(leaves)]
                for together in (False, True)
            ]
            violating = [variant for variant in variants if not guard.holds(variant)]
            yield from (pytree.tree_unflatten(variant, spec) for variant in violating)
            if violating:
                break


def insert_guards_(module: fx.GraphModule, guards: Sequence[Guard]) -> None:
    """Make a graph check its guards, in place."""
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    made: dict[Any, fx.Node] = {}
    if not placeholders:
        return
    with graph.inserting_before(placeholders[-1].next):
        for guard in guards:
            holds = _node((guard.function, *guard.arguments), graph, placeholders, made)
            graph.call_function(torch._assert, (holds, _MESSAGE.format(guard.text)))
    module.recompile()


_MESSAGE = (
    "This graph was traced on inputs with {}, and is valid for such inputs only. For others, make it again with an "
    "example of their sizes and numbers."
)


def _node(expression: Any, graph: fx.Graph, placeholders: Sequence[fx.Node], made: dict[Any, fx.Node]) -> Any:
    if isinstance(expression, Size):
        source = placeholders[expression.leaf]
        if expression.dim is None:
            return source
        if expression not in made:
            made[expression] = graph.call_function(torch.ops.aten.sym_size.int, (source, expression.dim))
    elif isinstance(expression, tuple):
        if expression not in made:
            function, *operands = expression
            values = tuple(_node(operand, graph, placeholders, made) for operand in operands)
            made[expression] = graph.call_function(function, values)
    else:
        return expression
    return made[expression]


def _value(expression: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(expression, Size):
        value = leaves[expression.leaf]
        return value if expression.dim is None else value.shape[expression.dim]
    if isinstance(expression, tuple):
        function, *operands = expression
        return function(*(_value(operand, leaves) for operand in operands))
    return expression


def _sizes(expression: Any) -> list[Size]:
    if isinstance(expression, Size):
        return [expression]
    return [size for part in expression for size in _sizes(part)] if isinstance(expression, tuple) else []


def _numbers(expression: Any) -> list[int]:
    """List the whole numbers that a guard names."""
    if isinstance(expression, tuple):
        return [number for part in expression for number in _numbers(part)]
    return [expression] if type(expression) is int else []


def _candidates(leaf: Any, dim: int | None, numbers: Sequence[int]) -> list[Any]:
    """List other sizes or numbers, the closest to the example's first."""
    if dim is None:
        if type(leaf) is bool:
            return [not leaf]
        return [leaf + 1, leaf - 1] if type(leaf) in (int, float) else []
    size = leaf.shape[dim]
    named = [number + step for number in numbers for step in (-1, 0, 1)]
    others = [*range(1, min(2 * size, MAX_SEARCHED_SIZE) + 2), size - 1, size + 1, *named]
    largest = MAX_SEARCHED_ELEMENTS * size // max(1, leaf.numel())
    found = {other for other in others if 0 < other <= max(largest, 2 * size) and other != size}
    return sorted(found, key=lambda other: abs(other - size))


def _resized(x: Any, at: int, size: Size, other: Any, leaves: Sequence[Any], together: bool) -> Any:
    """Resize an input along a dimension, or along all dimensions of that size."""
    if size.dim is None or not isinstance(x, Tensor):
        return other if size.dim is None and at == size.leaf else x
    old = leaves[size.leaf].shape[size.dim]
    for dim in range(x.ndim):
        if (at, dim) == (size.leaf, size.dim) or (together and x.shape[dim] == old):
            x = x.repeat(*(-(-other // old) if d == dim else 1 for d in range(x.ndim))).narrow(dim, 0, other)
    return x


def _parsed(text: str, paths: dict[str, int], names: dict[int, str], leaves: Sequence[Any]) -> list[Guard]:
    tree = ast.parse(text, mode="eval").body
    try:
        function, *operands = _read(tree, paths)
    except (ValueError, TypeError):  # a condition of another form: its sizes are fixed
        sizes = [_read(part, paths) for part in ast.walk(tree) if isinstance(part, ast.Subscript) and _is_size(part)]
        return [_fixed(size, leaves[size.leaf].shape[size.dim], names) for size in sizes]
    for path, leaf in paths.items():
        text = text.replace(path, names[leaf])
    return [Guard(function, tuple(operands), text.replace(".size()", ".shape"))]


def _is_size(tree: ast.Subscript) -> bool:
    return isinstance(tree.value, ast.Call) and isinstance(tree.slice, ast.Constant)


def _read(tree: ast.AST, paths: dict[str, int]) -> Any:
    source = ast.unparse(tree)
    if source in paths:
        return Size(paths[source], None)
    match tree:
        case ast.Constant(value=value):
            return value
        case ast.Subscript(
            value=ast.Call(func=ast.Attribute(value=owner, attr="size")), slice=ast.Constant(value=int(dim))
        ):
            return Size(paths[ast.unparse(owner)], dim)
        case ast.Compare(left=left, ops=[kind], comparators=[right]) | ast.BinOp(left=left, op=kind, right=right):
            operands = [left, right]
        case ast.UnaryOp(op=kind, operand=operand):
            operands = [operand]
        case ast.Call(func=ast.Name(id="max" | "Max" | "min" | "Min" as name), args=[first, *others]):
            function = torch.sym_max if name.lower() == "max" else torch.sym_min
            return reduce(lambda left, right: (function, left, _read(right, paths)), others, _read(first, paths))
        case ast.BoolOp(op=connective, values=[first, *others]):
            function = operator.and_ if isinstance(connective, ast.And) else operator.or_
            return reduce(lambda left, right: (function, left, _read(right, paths)), others, _read(first, paths))
        case _:
            raise ValueError(source)
    if type(kind) not in _OPERATORS:
        raise ValueError(source)
    return (_OPERATORS[type(kind)], *(_read(operand, paths) for operand in operands))


def _fixed(size: Size, value: Any, names: dict[int, str]) -> Guard:
    name = names[size.leaf] if size.dim is None else f"{names[size.leaf]}.shape[{size.dim}]"
    return Guard(operator.eq, (size, value), f"{name} == {value!r}")


def _plain(path: str) -> str:
    """Turn L['x'][0] into x[0]."""
    name, _, rest = path.removeprefix("L['").partition("']")
    return name + rest
