"""Tracing with `torch.export`, with dynamic sizes where possible."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.overrides import BaseTorchFunctionMode
from torch.utils import _pytree as pytree

from bayeslim.compact.example import rows_of
from bayeslim.compact.guards import all_hold, guards_of
from bayeslim.compact.quiet import quiet
from bayeslim.compact.recurrence import WholeRecurrentLayers, unchecked_states
from bayeslim.errors import UnsupportedModel
from bayeslim.types import Inputs, arguments


def exported(network: nn.Module, inputs: Sequence[Inputs], *, unrolled: bool = False) -> torch.export.ExportedProgram:
    """Trace a network with `torch.export`, with dynamic sizes where possible.

    Recurrent layers are the operations of `bayeslim.compact.recurrence` in the result.

    Args:
        network: in eval mode, on the CPU.
        inputs: the inputs to trace on, and others that the program should take as well.
        unrolled: leave recurrent layers to torch, which fixes the number of time steps.

    Raises:
        UnsupportedModel: if it cannot be traced.
    """
    args, kwargs = arguments(inputs[0])
    rows = rows_of(inputs[0])
    program, failure = None, None
    # The non-strict mode makes a constant of len(x); the strict mode, which reads the bytecode, does not. In a mode
    # that overrides functions, transformer layers call their linear layers instead of a fused kernel that hides them.
    for strict in (False, True):
        dims: Callable[[int, Any], Any] = _all_dims
        for _ in range(2):
            try:
                with (
                    quiet(),
                    without_cache(network),
                    unchecked_states(network),
                    BaseTorchFunctionMode() if unrolled else WholeRecurrentLayers(),
                ):
                    free = _dynamic_shapes(network, args, kwargs, partial(dims, rows))
                    found = torch.export.export(network, args, kwargs, dynamic_shapes=free, strict=strict)
            except Exception as error:
                failure = failure or error
                dims = _batch_dim
                continue
            program = program or found
            guards = guards_of(found, network, inputs[0])
            if all(all_hold(guards, pytree.tree_leaves(arguments(other))) for other in inputs[1:]):
                return found
            # Sizes that the network fixes can make torch fix the batch size too: those are constants now.
            dims = partial(_dims_still_dynamic, _dynamic_leaves(found, (args, kwargs)))
    if program is None:
        assert failure is not None
        raise UnsupportedModel(
            f"torch.export cannot trace {type(network).__name__}: {first_line(failure)} {_remedy(network, kwargs)}"
        ) from failure
    return program


def _remedy(network: nn.Module, kwargs: dict[str, Any]) -> str:
    """Say what a forward needs that cannot be traced."""
    named = inspect.signature(network.forward).parameters.values()
    if kwargs and any(one.kind is inspect.Parameter.VAR_KEYWORD for one in named if one.name not in kwargs):
        return (
            "It cannot give dynamic sizes to **kwargs: write the names of the arguments in the forward. A PeftModel "
            "has them if its LoraConfig has a task_type."
        )
    return "It needs a forward without data-dependent control flow."


@contextmanager
def without_cache(network: nn.Module) -> Iterator[None]:
    """Make decoders return no cache of keys and values inside the context.

    `torch.export` does not know the class of the cache, and a call on a whole sequence does not need one.
    """
    configs: list[Any] = [getattr(module, "config", None) for module in network.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", None) is True]
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _dynamic_shapes(
    network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dims: Callable[[Any], Any]
) -> dict[str, Any] | None:
    """Describe the dynamic sizes by the names of the forward's arguments."""
    bound = inspect.signature(network.forward).bind(*args, **kwargs).arguments
    try:
        found: dict[str, Any] = pytree.tree_map(dims, dict(bound))
        return found
    except AssertionError:  # a packed sequence
        return None


def _all_dims(rows: int, x: Any) -> Any:
    if isinstance(x, Tensor):
        return {dim: torch.export.Dim.AUTO for dim, size in enumerate(x.shape) if size > 1}
    return torch.export.Dim.AUTO if type(x) is int else None


def _dims_still_dynamic(dynamic: Mapping[int, set[int]], rows: int, x: Any) -> Any:
    if not isinstance(x, Tensor):
        return _all_dims(rows, x)
    dims = dynamic.get(id(x), set()) | ({0} if x.ndim and x.shape[0] == rows > 1 else set())
    return dict.fromkeys(sorted(dims), torch.export.Dim.AUTO)


def _dynamic_leaves(program: torch.export.ExportedProgram, inputs: Any) -> dict[int, set[int]]:
    """Return the dynamic dimensions of each input tensor, by its id."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
    return {
        id(x): {dim for dim, size in enumerate(values[name].shape) if not isinstance(size, int)}
        for name, x in zip(names, pytree.tree_leaves(inputs), strict=True)
        if isinstance(x, Tensor)
    }


def _batch_dim(rows: int, x: Any) -> Any:
    return {0: torch.export.Dim.AUTO} if isinstance(x, Tensor) and x.ndim and x.shape[0] == rows > 1 else None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else repr(error)
