"""A run of a network on inputs whose sizes are symbols.

The inputs are tensors without values. torch computes the shape of every result as an expression of the symbols. Where
code needs the truth of a condition on sizes, torch evaluates it at the sizes of the given inputs and goes on. The run
records these conditions, who asked for them, and the calls of torch's functions.

torch's symbols rest on sympy, which takes half a second to import, so they are imported where they are used.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
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

from bayeslim.compact.guards import Guard, Size, at_least_two, equal_to, parsed
from bayeslim.compact.program import without_cache
from bayeslim.compact.quiet import quiet
from bayeslim.compact.recurrence import WholeRecurrentLayers, unchecked_states
from bayeslim.types import Inputs, arguments

_UNKNOWN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    NotImplementedError,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""Errors of symbolic runs that say nothing about a run with values."""

_TORCH = pathlib.Path(torch.__file__).parent
_EVALUATION = _TORCH / "fx" / "experimental"


class NeedsValues(Exception):
    """A symbolic run cannot go on without the values of a tensor."""


class SymbolicRun:
    """A network's run on symbolic inputs.

    Args:
        inputs: the inputs at whose sizes conditions are evaluated.

    Attributes:
        sizes: the sizes of the inputs by their symbols.
        calls: the functions of torch that ran, each with the numbers among its arguments.
    """

    def __init__(self, inputs: Inputs) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.sizes: dict[Any, Size] = {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._fixed: list[Guard] = []
        self._decided: list[Any] = []
        self._environment = ShapeEnv(duck_shape=False)  # equal sizes get symbols of their own
        _record_decisions(self._environment, self._decided)
        self._mode = FakeTensorMode(shape_env=self._environment, allow_non_fake_inputs=True)
        self._mode.cache_enabled = False  # nothing runs twice at the same symbols
        leaves, spec = pytree.tree_flatten(inputs)
        self._inputs = pytree.tree_unflatten([self._symbolic(leaf, at) for at, leaf in enumerate(leaves)], spec)

    def start(self, network: nn.Module) -> None:
        """Run a network.

        Raises:
            NeedsValues: if what it does depends on values.
            Exception: any error of the network, or of the run alone.
        """
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        args, kwargs = arguments(self._inputs)
        try:
            with (
                quiet(), without_cache(network), unchecked_states(network), torch.no_grad(), self._mode,
                WholeRecurrentLayers(), _Calls(self.calls),
            ):  # fmt: skip
                network(*args, **kwargs)
        except (*_UNKNOWN, GuardOnDataDependentSymNode) as error:
            raise NeedsValues(str(error)) from error

    def guards(self) -> tuple[Guard, ...]:
        """List the conditions under which other inputs take the same path.

        Raises:
            ValueError: if a condition has another form than guards have.
        """
        met = [guard.expr for guard in self._environment.guards]
        symbols = {symbol for expression in met for symbol in expression.free_symbols}
        assumed = [at_least_two(size) for symbol, size in self.sizes.items() if symbol in symbols]
        return tuple(dict.fromkeys([*self._fixed, *assumed, *self._read([*met, *self._certain()])]))

    def decisions(self) -> tuple[Guard, ...]:
        """List the conditions on which the network's own code branched.

        Raises:
            ValueError: if a condition has another form than guards have.
        """
        return tuple(dict.fromkeys([*self._fixed, *self._read(self._certain())]))

    def _certain(self) -> list[Any]:
        """List the decisions on sizes of inputs.

        Others are certain: torch raises an error otherwise.
        """
        return [condition for condition in self._decided if condition.free_symbols <= self.sizes.keys()]

    def _read(self, conditions: Sequence[Any]) -> list[Guard]:
        from torch.utils._sympy.printers import PythonPrinter

        names = {str(symbol): size for symbol, size in self.sizes.items()}
        return [parsed(PythonPrinter().doprint(condition), names) for condition in conditions]

    def _symbolic(self, leaf: Any, place: int) -> Any:
        """Replace an input by one with symbols for its sizes.

        Sizes of one, which torch treats apart, and inputs that are neither tensors nor whole numbers are fixed.
        """
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

        is_number = type(leaf) is int and leaf > 1
        if not isinstance(leaf, Tensor) and not is_number:
            self._fixed.append(equal_to(Size(place, None), leaf))
            return leaf
        tensor = torch.empty(1).expand(leaf) if is_number else leaf  # a number is the size of a tensor
        dynamic = [DimDynamic.DYNAMIC if size > 1 else DimDynamic.STATIC for size in tensor.shape]
        found = self._mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))
        shape: Sequence[Any] = found.shape
        for dim, size in enumerate(shape):
            at = Size(place, None if is_number else dim)
            if isinstance(size, torch.SymInt):
                self.sizes[size.node.expr] = at
            else:
                self._fixed.append(equal_to(at, size))
        return shape[0] if is_number else found


def _record_decisions(environment: Any, decided: list[Any]) -> None:
    """Make an environment list the conditions on which a network's own code branches.

    torch keeps no condition that is certain for sizes of at least two, such as `x.shape[0] == 1`. The list has them
    too. It has none that torch's operations ask: an operation computes the same function at all sizes.
    """
    evaluate = environment.evaluate_sym_node

    def recorded(node: Any, *args: Any, **kwargs: Any) -> Any:
        result = evaluate(node, *args, **kwargs)
        is_condition = node.pytype is bool and node.expr.free_symbols
        if is_condition and _is_of_network(_asking_file(sys._getframe(1))):
            decided.append(node.expr if result else ~node.expr)
        return result

    environment.evaluate_sym_node = recorded


def _asking_file(frame: FrameType | None) -> pathlib.Path | None:
    """Return the file of the code that asks for the truth of a condition.

    It is None for compiled code. Other code calls a method of SymBool or SymInt in torch/__init__.py, which calls the
    evaluation.
    """
    callers = dropwhile(lambda file: file.parent == _EVALUATION, _files_of_callers(frame))
    is_asked_by_method = next(callers, None) == _TORCH / "__init__.py"
    return next(callers, None) if is_asked_by_method else None


def _files_of_callers(frame: FrameType | None) -> Iterator[pathlib.Path]:
    while frame is not None:
        yield pathlib.Path(frame.f_code.co_filename)
        frame = frame.f_back


def _is_of_network(file: pathlib.Path | None) -> bool:
    """Return whether a file holds code of a network; torch's layers are part of one."""
    return file is not None and (not file.is_relative_to(_TORCH) or file.is_relative_to(_TORCH / "nn"))


class _Calls(TorchFunctionMode):
    """A record of the calls of torch's functions, with their numbers."""

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


@dataclass(frozen=True)
class _Expression:
    """A number that a network computes from sizes."""

    expression: Any

    def at(self, values: Mapping[Any, Any]) -> Any:
        found = self.expression.subs(values)
        return float(found) if found.is_number else str(found)


def number_at(value: Any, values: Mapping[Any, Any]) -> Any:
    """Compute a number of a recorded call at the values of symbols.

    Other arguments become text.
    """
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
