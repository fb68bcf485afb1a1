"""A replica: a shallow copy of a module tree that has parameter slots of its own.

To call a network with other weights, put them into the slots of a replica and call that. The network itself is never
touched: it keeps its mode, its tensors and its hooks, and another thread may call it meanwhile. A replica shares
everything else with the network: hooks, buffers and the values of all attributes. Making one takes a few microseconds
a module, so every prediction makes its own.

    twin = replicate(model)              # in evaluation mode
    slots = Slots(twin)
    slots.put({"fc.weight": drawn})      # tied weights under any of their names
    y = twin(x)

Some forwards reach past the module tree: through a plain list of modules, a closure or a bound method of another
module. A replica of such a network would read the network's own tensors. `reads_its_own_tensors` checks it by one
pass, and a deep copy then replaces the replica.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bayeslim.errors import UnsupportedModel
from bayeslim.types import Inputs, Params, call

M = TypeVar("M", bound=nn.Module)

_OWN_DICTS = [name for name in vars(nn.Module()) if name in ("_parameters", "_buffers") or name.endswith("_hooks")]
_OWN_DICTS += [name for name in vars(nn.Module()) if "_hooks_" in name]
"""The attributes of a module that a replica has for itself: slots, and hooks by their handles."""


def replicate(model: M, *, evaluating: bool = True) -> M:
    """Make a replica of a module tree.

    Args:
        model: the root of the tree; modules and tensors that occur twice in it do so in the replica.
        evaluating: whether every module of the replica is in evaluation mode; else each keeps its mode.
    """
    twins: dict[nn.Module, Any] = {module: _shallow(module) for module in model.modules()}
    for twin in twins.values():
        own = vars(twin)
        own["_modules"] = {name: twins.get(child) for name, child in own["_modules"].items()}
        if evaluating:
            own["training"] = False
    return twins[model]  # type: ignore[no-any-return]


def _shallow(module: nn.Module) -> nn.Module:
    if isinstance(module, torch.jit.ScriptModule):  # its tensors live in C++ and cannot be exchanged
        return module
    twin: nn.Module = object.__new__(type(module))
    own = vars(twin)
    own.update(vars(module))
    for name in _OWN_DICTS:
        own[name] = own[name].copy()
    if isinstance(module, nn.RNNBase):
        own["_flat_weights"] = list(own["_flat_weights"])
    return twin


class Slots:
    """The places of a replica's parameters and buffers, by name.

    Args:
        model: a replica. Never the user's own network.

    Attributes:
        own: the tensors that were there at first, by name.
    """

    def __init__(self, model: nn.Module):
        self.own: Params = {}
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        self._recurrent: list[Any] = []
        for path, module in model.named_modules():
            if isinstance(module, nn.RNNBase):
                self._recurrent.append(module)
            for slots in (module._parameters, module._buffers):
                for leaf, tensor in slots.items():
                    if tensor is not None:
                        name = f"{path}.{leaf}" if path else leaf
                        self.own[name] = tensor
                        self._places[name] = places.setdefault(id(tensor), [])
                        self._places[name].append((slots, leaf))

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors into the slots of these names, and of weights tied to them."""
        for name, tensor in tensors.items():
            for slots, leaf in self._places[name]:
                slots[leaf] = tensor
        for layer in self._recurrent:
            layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
            if any(weight is not None and weight.is_cuda for weight in layer._flat_weights):
                layer.flatten_parameters()  # cuDNN wants them in one piece; only the drawn tensors move


class Uses(TorchFunctionMode):
    """Counts of the operations that take certain tensors and give a tensor. Reading a shape does not count."""

    def __init__(self, tensors: Iterable[Tensor]):
        super().__init__()
        self.counts = {id(tensor): 0 for tensor in tensors}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function and count its tensor arguments."""
        result = func(*args, **(kwargs or {}))
        if any(True for _ in _tensors(result)):
            for tensor in _tensors((args, kwargs)):
                if id(tensor) in self.counts:
                    self.counts[id(tensor)] += 1
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


@torch.no_grad()
def reads_its_own_tensors(model: nn.Module, inputs: Inputs) -> bool:
    """Check that a replica of `model` reads only the tensors in its slots.

    It must also answer as a deep copy does.

    Raises:
        UnsupportedModel: if not even a deep copy reads its own tensors, as when a global variable holds a weight.
    """
    twin = replicate(model)
    slots = Slots(twin)
    slots.put({name: tensor.detach().clone() for name, tensor in slots.own.items() if isinstance(tensor, nn.Parameter)})
    answer, leaked = _watched(model, twin, inputs)
    try:
        whole = deep_copy(model).eval()
    except (RuntimeError, TypeError, NotImplementedError):  # old-style hooks keep tensors that torch does not copy
        whole = twin
    wanted, also_leaked = _watched(model, whole, inputs)
    if also_leaked:
        raise UnsupportedModel(
            f'The forward of {type(model).__name__} reads "{also_leaked}" past the module tree, so that drawn weights '
            "cannot replace it. Read it as an attribute of the module, not as a global variable."
        )
    if leaked:
        return False
    if _agree(answer, wanted):
        return True
    again, _ = _watched(model, whole, inputs)
    return not _agree(again, wanted)  # a forward that draws random numbers gives a new answer each time


def _agree(answer: Tensor, wanted: Tensor) -> bool:
    """Compare up to rounding, which depends on where in memory tensors happen to lie."""
    tolerance = 1e-3 if answer.dtype in (torch.float32, torch.float64) else 0.1
    scale = wanted.nan_to_num(0, 0, 0).abs().amax() if wanted.numel() else 0.0
    return torch.allclose(answer, wanted, rtol=tolerance, atol=tolerance * float(scale), equal_nan=True)


def _watched(model: nn.Module, twin: nn.Module, inputs: Inputs) -> tuple[Tensor, str]:
    """Call a copy of `model`; return the answer, and a parameter of `model` it read."""
    own = dict(model.named_parameters())
    with Uses(own.values()) as uses:
        answer = call(twin, inputs)
    return answer, next((name for name, tensor in own.items() if uses.counts[id(tensor)]), "")


def deep_copy(model: M) -> M:
    """Copy a model whole, with the functions that enclose a part of it."""
    memo: dict[int, Any] = {}
    twin = copy.deepcopy(model, memo)
    functions: dict[int, FunctionType] = {}

    def rebound(value: Any) -> Any:
        """Exchange parts of the model for their copies; all else stays the same object."""
        if id(value) in memo:
            return memo[id(value)]
        if isinstance(value, FunctionType) and value.__closure__:
            return functions[id(value)] if id(value) in functions else rebound_function(value)
        if isinstance(value, MethodType) and id(value.__self__) in memo:
            return MethodType(value.__func__, memo[id(value.__self__)])
        if type(value) in (list, tuple):
            parts = type(value)(map(rebound, value))
            return value if all(map(is_, parts, value)) else parts
        if type(value) in (dict, OrderedDict):
            parts = type(value)((key, rebound(part)) for key, part in value.items())
            return value if all(map(is_, parts.values(), value.values())) else parts
        return value

    def rebound_function(function: FunctionType) -> FunctionType:
        functions[id(function)] = function  # a function may enclose itself
        cells = []
        for cell in function.__closure__ or ():
            cells.append(CellType())
            with suppress(ValueError):  # a cell may be empty
                cells[-1].cell_contents = rebound(cell.cell_contents)
        if all(map(_alike, cells, function.__closure__ or ())):
            return function
        made = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
        )
        made.__kwdefaults__ = function.__kwdefaults__
        functions[id(function)] = made
        return made

    for module in twin.modules():
        own = vars(module)
        for name, value in own.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                own[name] = rebound(value)
    return twin


def _alike(cell: CellType, other: CellType) -> bool:
    """Tell whether two cells hold the same object, or nothing."""
    try:
        return cell.cell_contents is other.cell_contents
    except ValueError:
        return True
