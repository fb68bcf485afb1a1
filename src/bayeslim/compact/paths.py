"""Paths of a network through its forward, found from symbolic sizes.

A network runs on tensors without values, whose sizes are symbols. Every condition on a size that it meets is a guard:
those on which its own code branches, and those of torch's operations, such as a slice that ends before its tensor does.
All inputs that satisfy the guards take the same path: the same operations, or the same error. To find the other paths,
each guard is violated in turn, and then the guards of the paths found there (as concolic testing does).
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from bayeslim.compact.example import takes
from bayeslim.compact.guards import Guard, Size, at_least_two, equal_to, parsed, resized_to, sizes_of, violations
from bayeslim.compact.program import without_cache
from bayeslim.compact.quiet import quiet
from bayeslim.compact.recurrence import WholeRecurrentLayers, unchecked_states
from bayeslim.compact.trace import quiet_copy
from bayeslim.types import Inputs, arguments

MAX_PATHS = 12
"""The number of other paths of a network that are followed."""

_TORCH = pathlib.Path(torch.__file__).parent
_UNKNOWN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    NotImplementedError,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""Errors of symbolic runs that say nothing about a run with values."""


@dataclass(frozen=True)
class Path:
    """A path of a network through its forward.

    Attributes:
        guards: the conditions on the inputs under which the network takes it.
        decisions: those of them on which the network's own code branches.
        calls: the functions of torch that it calls, each with its numbers, as expressions of the sizes.
        sizes: the sizes by the symbols of those expressions.
        fails: whether the network raises an error on it.
    """

    guards: tuple[Guard, ...]
    decisions: tuple[Guard, ...]
    calls: tuple[tuple[str, tuple[Any, ...]], ...]
    sizes: Mapping[Any, Size]
    fails: bool

    def calls_at(self, leaves: Sequence[Any]) -> list[tuple[str, tuple[Any, ...]]]:
        """Return the calls with their numbers at the sizes of some inputs."""
        values = {symbol: size.value(leaves) for symbol, size in self.sizes.items()}
        return [(name, tuple(_number(value, values) for value in numbers)) for name, numbers in self.calls]


def path_at(network: nn.Module, inputs: Inputs) -> Path | None:
    """Find the path that a network takes at some inputs.

    It is None if it depends on their values.

    Args:
        network: a copy of a network in eval mode on the CPU, which may keep tensors without values afterwards.
        inputs: the inputs.
    """
    # sympy, on which these rest, takes half a second to import
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
    from torch.utils._sympy.printers import PythonPrinter

    environment = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    leaves, spec = pytree.tree_flatten(inputs)
    sizes: dict[Any, Size] = {}
    found: list[Guard] = []
    symbolic = [_symbolic(leaf, place, mode, sizes, found) for place, leaf in enumerate(leaves)]
    args, kwargs = arguments(pytree.tree_unflatten(symbolic, spec))
    calls: list[tuple[str, tuple[Any, ...]]] = []
    decisions = _record_decisions(environment)
    fails = False
    try:
        with (
            quiet(), without_cache(network), unchecked_states(network), torch.no_grad(), mode,
            WholeRecurrentLayers(), _Calls(calls),
        ):  # fmt: skip
            network(*args, **kwargs)
    except (*_UNKNOWN, GuardOnDataDependentSymNode):
        return None
    except Exception:
        if takes(quiet_copy(network), inputs):
            return None
        fails = True
    expressions = [guard.expr for guard in environment.guards]
    split = {symbol for expression in expressions for symbol in expression.free_symbols}
    # A condition on a size that depends on values is here only if it is certain: otherwise torch raises an error.
    certain = [decision for decision in decisions if decision.free_symbols <= sizes.keys()]
    names = {str(symbol): size for symbol, size in sizes.items()}
    try:
        read = {one: parsed(PythonPrinter().doprint(one), names) for one in (*expressions, *certain)}
    except (ValueError, TypeError):
        return None
    guards = [*found, *(at_least_two(size) for symbol, size in sizes.items() if symbol in split), *read.values()]
    own = [*found, *(read[decision] for decision in certain)]
    return Path(tuple(dict.fromkeys(guards)), tuple(dict.fromkeys(own)), tuple(calls), sizes, fails)


def paths_beyond(
    network: nn.Module,
    known: Sequence[tuple[Guard, ...]],
    example: Inputs,
    *,
    within: Sequence[Guard] = (),
    by_decisions: bool = False,
) -> Iterator[tuple[Inputs, Path | None]]:
    """Find the paths of a network besides known ones.

    Each comes with inputs that take it. None stands for a path that is not known, and for more than `MAX_PATHS`; other
    paths that violate the same guard are not followed then.

    Args:
        network: the network, in eval mode on the CPU.
        known: the guards of known paths.
        example: inputs that satisfy all of them.
        within: guards that the inputs of all paths satisfy.
        by_decisions: tell paths apart by the decisions of the network's own code alone.
    """
    leaves, spec = pytree.tree_flatten(example)
    covered = list(known)
    waiting = [(guards, sizes_of(leaves)) for guards in known]
    while waiting:
        tried, start = waiting.pop()
        for guard in tried:
            if guard in within:
                continue
            if not guard.can_be_violated(start):
                yield example, None
                return
            for other in violations(guard, start):
                is_known = any(all(one.holds(other) for one in path) for path in covered)
                if is_known or not all(one.holds(other) for one in within):
                    continue
                values = [resized_to(leaf, sizes) for leaf, sizes in zip(leaves, other, strict=True)]
                inputs = pytree.tree_unflatten(values, spec)
                path = path_at(quiet_copy(network), inputs) if len(covered) <= MAX_PATHS else None
                yield inputs, path
                if path is None:
                    break
                guards = path.decisions if by_decisions else path.guards
                covered.append(guards)
                waiting.append((guards, other))


def _record_decisions(environment: Any) -> list[Any]:
    """Make an environment record the conditions on which a network branches.

    Conditions that are certain for sizes of at least two, such as `x.shape[0] == 1`, are recorded too. Those that
    torch's operations ask are not: an operation computes the same function at all sizes.
    """
    found: list[Any] = []
    evaluate = environment.evaluate_sym_node

    def recorded(node: Any, *args: Any, **kwargs: Any) -> Any:
        result = evaluate(node, *args, **kwargs)
        if node.pytype is bool and node.expr.free_symbols and _is_asked_by_network(sys._getframe(1)):
            found.append(node.expr if result else ~node.expr)
        return result

    environment.evaluate_sym_node = recorded
    return found


def _is_asked_by_network(frame: FrameType | None) -> bool:
    """Return whether a truth value is asked for by a network, or a layer of torch."""
    while frame is not None and pathlib.Path(frame.f_code.co_filename).parent == _TORCH / "fx" / "experimental":
        frame = frame.f_back
    if frame is None or frame.f_back is None or pathlib.Path(frame.f_code.co_filename) != _TORCH / "__init__.py":
        return False  # asked by compiled code
    asking = pathlib.Path(frame.f_back.f_code.co_filename)
    return not asking.is_relative_to(_TORCH) or asking.is_relative_to(_TORCH / "nn")


class _Calls(TorchFunctionMode):
    """A record of the calls of torch's functions, with the numbers among their arguments."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record a call and make it."""
        name = getattr(func, "__name__", str(func))
        if name != "__get__":  # the shape, the device or the dtype of a tensor
            self._calls.append((name, tuple(_recorded((args, dict(kwargs or {}))))))
        return func(*args, **(kwargs or {}))


def _symbolic(leaf: Any, place: int, mode: FakeTensorMode, sizes: dict[Any, Size], guards: list[Guard]) -> Any:
    """Replace an input by one without values.

    Sizes of one, which torch treats apart, stay numbers.
    """
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    is_number = type(leaf) is int and leaf > 1
    if not isinstance(leaf, Tensor) and not is_number:
        guards.append(equal_to(Size(place, None), leaf))
        return leaf
    tensor = torch.empty(1).expand(leaf) if is_number else leaf  # a number is the size of a tensor
    dynamic = [DimDynamic.DYNAMIC if size > 1 else DimDynamic.STATIC for size in tensor.shape]
    found = mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))
    shape: Sequence[Any] = found.shape
    for dim, size in enumerate(shape):
        at = Size(place, None if is_number else dim)
        if isinstance(size, torch.SymInt):
            sizes[size.node.expr] = at
        else:
            guards.append(equal_to(at, size))
    return shape[0] if is_number else found


@dataclass(frozen=True)
class _Expression:
    """A number that a network computes from sizes."""

    expression: Any

    def at(self, values: Mapping[Any, Any]) -> Any:
        found = self.expression.subs(values)
        return float(found) if found.is_number else str(found)


def _number(value: Any, values: Mapping[Any, Any]) -> Any:
    """Compute a number at the values of symbols; turn other arguments into text."""
    if isinstance(value, _Expression):
        return value.at(values)
    return float(value) if isinstance(value, (int, float)) else str(value)


def _recorded(arguments: Any) -> Iterator[Any]:
    """List the arguments of a call that are not tensors."""
    for value in pytree.tree_leaves(arguments):
        if isinstance(value, slice):
            yield from _recorded((value.start, value.stop, value.step))
        elif isinstance(value, tuple):  # such as a torch.Size
            yield from _recorded(list(value))
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield _Expression(value.node.expr)
        elif not isinstance(value, Tensor):
            yield value
