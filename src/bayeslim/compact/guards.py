"""Guards: the conditions on inputs under which a traced graph is valid.

`torch.export` leaves sizes dynamic where it can. Where a forward makes a constant of a size (a loop over time steps),
or branches on one, the trace is valid only for inputs like the example, and the conditions are its guards. A graph that
replaces a network checks its guards, and refuses other inputs.
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
MAX_SEARCHED_SIZE = 64
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

    def value(self, leaves: Sequence[Any]) -> Any:
        """Read it from flat inputs."""
        leaf = leaves[self.leaf]
        return leaf if self.dim is None else leaf.shape[self.dim]


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
    def excluded(self) -> int | None:
        """The size that it says a size is not, if it says nothing else.

        `torch.export` assumes that dynamic sizes are not one, nor as long as a table that they index.
        """
        size, *rest = self.arguments
        if not isinstance(size, Size) or size.dim is None:
            return None
        if self.function is operator.ge and rest == [2]:
            return 1
        return rest[0] if self.function is operator.ne and type(rest[0]) is int else None

    @property
    def excludes_size_one(self) -> bool:
        """Whether it says only that a size is not one."""
        return self.excluded == 1

    def holds(self, leaves: Sequence[Any]) -> bool:
        """Evaluate the guard on flat inputs; a remainder by zero violates it."""
        try:
            return bool(self.function(*(_value(argument, leaves) for argument in self.arguments)))
        except ZeroDivisionError:
            return False

    def can_be_violated(self, leaves: Sequence[Any]) -> bool:
        """Return whether the guard reads only sizes and numbers, and no None."""
        return all(isinstance(size.value(leaves), (bool, int, float)) for size in self.sizes())

    def sizes(self) -> list[Size]:
        """List the sizes that the guard reads."""
        return sorted(set(_sizes(self.arguments)), key=lambda size: (size.leaf, size.dim or 0))


def all_hold(guards: Sequence[Guard], leaves: Sequence[Any]) -> bool:
    """Return whether flat inputs satisfy all guards."""
    return all(guard.holds(leaves) for guard in guards)


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
    sizes = {path: Size(leaf, None) for path, leaf in paths.items()}
    found = [guard for text in program._guards_code for guard in _traced(text, sizes, names, leaves)]
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
    for leaf, (name, given) in enumerate(zip(inputs, leaves, strict=True)):
        traced = values[name]
        if isinstance(traced, Tensor):
            fixed = [(dim, size) for dim, size in enumerate(traced.shape) if isinstance(size, int)]
            found += [_fixed(Size(leaf, dim), size, names) for dim, size in fixed]
            found += [_not_one(Size(leaf, dim), names) for dim in set(range(traced.ndim)) - {dim for dim, _ in fixed}]
        elif not isinstance(traced, torch.SymInt):
            found.append(_fixed(Size(leaf, None), given, names))
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Sized:
    """The sizes of a tensor among flat inputs."""

    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def with_size(self, dim: int | None, size: int) -> Sized:
        """Return the sizes with another one along a dimension."""
        return Sized(tuple(size if at == dim else old for at, old in enumerate(self.shape)))


def sizes_of(leaves: Sequence[Any]) -> list[Any]:
    """Replace the tensors of flat inputs by their sizes."""
    return [Sized(tuple(x.shape)) if isinstance(x, Tensor) else x for x in leaves]


def resized_to(leaf: Any, sizes: Any) -> Any:
    """Repeat and cut an input to other sizes; a number is replaced."""
    if not isinstance(leaf, Tensor):
        return sizes
    for dim, (old, new) in enumerate(zip(leaf.shape, sizes.shape, strict=True)):
        if old != new:
            leaf = leaf.repeat(*(-(-new // old) if d == dim else 1 for d in range(leaf.ndim))).narrow(dim, 0, new)
    return leaf.contiguous()


def violations(guard: Guard, leaves: Sequence[Any]) -> Iterator[list[Any]]:
    """Find flat inputs that violate a guard by one size or number.

    Those close to the given inputs come first.

    Args:
        guard: the guard.
        leaves: flat inputs that satisfy it, with `Sized` for tensors.
    """
    for size in guard.sizes():
        old = size.value(leaves)
        shared = sum(isinstance(leaf, Sized) and leaf.shape.count(old) for leaf in leaves) > 1
        for other in _candidates(leaves[size.leaf], size.dim, _numbers(guard.arguments)):
            for together in (False, True) if shared else (False,):  # a mask has the length of its sequence
                variant = [_resized(leaf, at, size, other, leaves, together) for at, leaf in enumerate(leaves)]
                if not guard.holds(variant):
                    yield variant


def equal_to(size: Size, value: Any) -> Guard:
    """Return the guard that a size has one value."""
    return Guard(operator.eq, (size, value), f"{size} == {value!r}")


def at_least_two(size: Size) -> Guard:
    """Return the guard that a size is at least two."""
    return Guard(operator.ge, (size, 2), f"{size} >= 2")


def parsed(text: str, names: Mapping[str, Size]) -> Guard:
    """Read a condition on sizes that have names.

    Raises:
        ValueError: if it has another form than guards have.
    """
    function, *operands = _read(ast.parse(text, mode="eval").body, names)
    return Guard(function, tuple(operands), text)


def insert_guards_(module: fx.GraphModule, guards: Sequence[Guard]) -> None:
    """Make a graph check its guards, in place."""
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    made: dict[Any, fx.Node] = {}
    if not placeholders:
        return
    with graph.inserting_before(placeholders[-1].next):
        for guard in guards:
            condition = (guard.function, *guard.arguments)
            for required in (*((operator.ne, divisor, 0) for divisor in _divisors(condition)), condition):
                holds = _node(required, graph, placeholders, made)
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
        return expression.value(leaves)
    if isinstance(expression, tuple):
        function, *operands = expression
        return function(*(_value(operand, leaves) for operand in operands))
    return expression


def _sizes(expression: Any) -> list[Size]:
    if isinstance(expression, Size):
        return [expression]
    return [size for part in expression for size in _sizes(part)] if isinstance(expression, tuple) else []


def _divisors(expression: Any) -> list[Any]:
    """List the computed numbers by which an expression divides, the innermost first."""
    if not isinstance(expression, tuple):
        return []
    function, *operands = expression
    inner = [divisor for operand in operands for divisor in _divisors(operand)]
    divides = function in (operator.floordiv, operator.mod) and isinstance(operands[1], (Size, tuple))
    return [*inner, operands[1]] if divides else inner


def _numbers(expression: Any) -> list[int]:
    """List the whole numbers that a guard names."""
    if isinstance(expression, tuple):
        return [number for part in expression for number in _numbers(part)]
    return [expression] if type(expression) is int else []


def _candidates(leaf: Any, dim: int | None, numbers: Sequence[int]) -> list[Any]:
    """List other sizes or numbers, the closest to the given one first.

    These are all up to a bound, and beyond it those close to the numbers that a guard names, or to a sum of two. A
    condition that compares a size, or its remainder, with these numbers is true or false for one of them.
    """
    if dim is None and type(leaf) is not int:
        return [not leaf] if type(leaf) is bool else [leaf + 1, leaf - 1] if type(leaf) is float else []
    size = leaf if dim is None else leaf.shape[dim]
    named = {abs(number) for number in numbers} | {size}
    close = [number + step for number in named | {a + b for a in named for b in named} for step in (-1, 0, 1)]
    others = {*range(1, min(2 * max(named), MAX_SEARCHED_SIZE) + 2), *close}
    if dim is not None:
        largest = max(MAX_SEARCHED_ELEMENTS * size // max(1, math.prod(leaf.shape)), 2 * size)
        others = {other for other in others if 0 < other <= largest}
    return sorted(others - {size}, key=lambda other: (abs(other - size), other))


def _resized(leaf: Any, at: int, size: Size, other: int, leaves: Sequence[Any], together: bool) -> Any:
    """Resize an input along a dimension, or along all dimensions of that size."""
    if size.dim is None or not isinstance(leaf, Sized):
        return other if size.dim is None and at == size.leaf else leaf
    old = leaves[size.leaf].shape[size.dim]
    changes = [(at, dim) == (size.leaf, size.dim) or (together and leaf.shape[dim] == old) for dim in range(leaf.ndim)]
    return Sized(tuple(other if change else kept for change, kept in zip(changes, leaf.shape, strict=True)))


def _traced(text: str, sizes: Mapping[str, Size], names: Mapping[int, str], leaves: Sequence[Any]) -> list[Guard]:
    """Read a guard of `torch.export`."""
    shown = text
    for path, size in sizes.items():
        shown = shown.replace(path, names[size.leaf])
    try:
        return [replace(parsed(text, sizes), text=shown.replace(".size()", ".shape"))]
    except (ValueError, TypeError):  # a condition of another form: its sizes are fixed
        parts = [part for part in ast.walk(ast.parse(text)) if isinstance(part, ast.Subscript) and _is_size(part)]
        return [_fixed(size, size.value(leaves), names) for size in (_read(part, sizes) for part in parts)]


def _is_size(tree: ast.Subscript) -> bool:
    return isinstance(tree.value, ast.Call) and isinstance(tree.slice, ast.Constant)


def _read(tree: ast.AST, paths: Mapping[str, Size]) -> Any:
    source = ast.unparse(tree)
    if source in paths:
        return paths[source]
    match tree:
        case ast.Constant(value=value):
            return value
        case ast.Subscript(
            value=ast.Call(func=ast.Attribute(value=owner, attr="size")), slice=ast.Constant(value=int(dim))
        ):
            return Size(paths[ast.unparse(owner)].leaf, dim)
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


def _fixed(size: Size, value: Any, names: Mapping[int, str]) -> Guard:
    return Guard(operator.eq, (size, value), f"{_text(size, names)} == {value!r}")


def _not_one(size: Size, names: Mapping[int, str]) -> Guard:
    """Return the guard that `torch.export` assumes of every dynamic size."""
    return Guard(operator.ne, (size, 1), f"{_text(size, names)} != 1")


def _text(size: Size, names: Mapping[int, str]) -> str:
    return names[size.leaf] if size.dim is None else f"{names[size.leaf]}.shape[{size.dim}]"


def _plain(path: str) -> str:
    """Turn L['x'][0] into x[0]."""
    name, _, rest = path.removeprefix("L['").partition("']")
    return name + rest
