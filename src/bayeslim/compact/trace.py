"""A network as a graph of tensor operations: traced once with `torch.export`, then walked with real tensors.

The graph is functional (no operation works in place), keeps operations whole (linear, convolution, LSTM, attention), and leaves the
batch size free where the network does, so that it can serve as the compacted network when the user's own module cannot.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from bayeslim.errors import ShapeMismatch, UnsupportedModel
from bayeslim.types import Inputs, arguments, to_device

_EINSUM = torch.ops.aten.einsum.default


@dataclass(frozen=True)
class Trace:
    """A network's graph and the inputs it was traced on.

    Attributes:
        module: the graph with the network's tensors under their own names, in eval mode.
        inputs: the flat inputs, one for each placeholder.
        names: every parameter's and buffer's names by the one that the graph uses (tied tensors have several).
        free_batch: whether the first dimension of the inputs may have any size.
    """

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    names: dict[str, tuple[str, ...]]
    free_batch: bool


def trace(model: nn.Module, example: Inputs) -> Trace:
    """Trace a copy of `model` in eval mode on the CPU.

    Raises:
        ShapeMismatch: if the network does not run on the example.
        UnsupportedModel: if `torch.export` cannot trace it.
    """
    network = evaluating_copy(model).cpu()
    example = to_device(example, "cpu")
    run_example(network, example)
    args, kwargs = _pair(network, example)
    size = _batch_size((args, kwargs))
    dynamic = pytree.tree_map(
        lambda x: {0: torch.export.Dim.AUTO} if isinstance(x, Tensor) and x.ndim and x.shape[0] == size else None, (args, kwargs)
    )
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # the fused kernel hides the weights from the graph
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(network, args, kwargs, dynamic_shapes=dynamic[0] or dynamic[1], strict=False)
            program = program.run_decompositions({_EINSUM: torch.export.default_decompositions()[_EINSUM]})
            module = program.module(check_guards=False)
    except Exception as error:
        raise UnsupportedModel(
            f"torch.export cannot trace {type(model).__name__}: {str(error).strip().splitlines()[0] if str(error) else error!r} "
            "Compaction needs a forward without data-dependent control flow; see torch.export's documentation."
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    free = any(
        isinstance(node.meta.get("val"), Tensor) and node.meta["val"].ndim and isinstance(node.meta["val"].shape[0], torch.SymInt)
        for node in placeholders
    )
    return Trace(module, tuple(pytree.tree_leaves((args, kwargs))), _aliases(network, module), free)


def evaluating_copy(model: nn.Module) -> nn.Module:
    """A deep copy of `model` in eval mode."""
    try:
        return copy.deepcopy(model).eval()
    except RuntimeError as error:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be copied: {error}. Remove tensors with a gradient history that it keeps as attributes."
        ) from error


def run_example(model: nn.Module, example: Inputs) -> Any:
    """The network's output on the example, without gradients.

    Raises:
        ShapeMismatch: if the network does not run on the example.
    """
    args, kwargs = arguments(example)
    try:
        with torch.no_grad():
            return model(*args, **kwargs)
    except Exception as error:
        shapes = [tuple(x.shape) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        raise ShapeMismatch(
            f"{type(model).__name__} does not run on the example (shapes {shapes}): {error} "
            "Pass inputs as the network takes them, with a batch dimension: a tensor, a tuple of arguments, or a dict."
        ) from error


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, tied ones under each of their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


class Walker(fx.Interpreter):
    """Runs a trace with real tensors and shows every node, its arguments and its result to `visit`.

    Args:
        trace: the graph.
        tensors: values for its parameters and buffers; its own where missing.
    """

    def __init__(self, trace: Trace, tensors: Mapping[str, Tensor] | None = None):
        super().__init__(trace.module)
        self.trace = trace
        self.tensors = tensors or {}

    def walk(self) -> None:
        """Visit every node in order."""
        with torch.no_grad():
            self.run(*self.trace.inputs, enable_io_processing=False)
        self.env.clear()

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and visit it."""
        if n.op == "get_attr" and n.target in self.tensors:
            result: Any = self.tensors[str(n.target)]
        else:
            result = super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        self.visit(n, args, kwargs, result)
        return result

    def visit(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """What to do at a node."""
        raise NotImplementedError


def _pair(network: nn.Module, example: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example cut or repeated to a batch of two where the network allows it: small, and never the special size one."""
    original = arguments(example)
    size = _batch_size(original)

    def resize(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.ndim and x.shape[0] == size):
            return x
        return x[:2].clone() if size > 2 else torch.cat([x, x])

    if size in (0, 2):
        return original
    paired: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(resize, original)
    try:
        with torch.no_grad():
            network(*paired[0], **paired[1])
    except Exception:
        return original
    return paired


def _batch_size(inputs: Any) -> int:
    sizes = [x.shape[0] for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor) and x.ndim]
    return sizes[0] if sizes else 0


def _aliases(network: nn.Module, module: fx.GraphModule) -> dict[str, tuple[str, ...]]:
    """All names of each tensor in the graph; the graph itself uses one name per tensor."""
    own = tensors_of(network)
    used = [str(node.target) for node in module.graph.nodes if node.op == "get_attr" and node.users]
    by_identity: dict[int, list[str]] = {}
    for name, tensor in own.items():
        by_identity.setdefault(id(tensor), []).append(name)
    return {name: tuple(by_identity[id(own[name])]) if name in own else (name,) for name in used}
