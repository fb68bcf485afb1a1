"""Example inputs: they run a network, and can be resized to other batch sizes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayeslim.errors import ShapeMismatch
from bayeslim.types import Inputs, arguments, with_batch_size

EXAMPLE = "slim_example"
"""The attribute in which a compacted network keeps inputs to trace it on."""


def run_example(model: nn.Module, example: Inputs) -> Any:
    """Run a network on the example without gradients.

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
            f"{type(model).__name__} does not run on the example (shapes {shapes}): {str(error).rstrip('.')}. "
            "Pass inputs as the network takes them, with a batch dimension: a tensor, a tuple of arguments, or a dict."
        ) from error


def takes(model: nn.Module, inputs: Inputs) -> bool:
    """Return whether a network runs on inputs, such as another batch size."""
    try:
        run_example(model, inputs)
    except ShapeMismatch:
        return False
    return True


def left_out(model: nn.Module, example: Inputs) -> list[str]:
    """List the optional arguments of a forward that an example does not give."""
    args, kwargs = arguments(example)
    signature = inspect.signature(model.forward)
    given = signature.bind(*args, **kwargs).arguments
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in signature.parameters.items() if name not in given and one.kind not in variadic]


def rows_of(example: Inputs) -> int:
    """Return the batch size: the first dimension of the first tensor."""
    rows = next((tensor.shape[0] for tensor in tensors_in(example) if tensor.ndim), None)
    if rows is None:
        raise ShapeMismatch("The example holds no tensor with a batch dimension.")
    if rows == 0:
        raise ShapeMismatch("The example holds an empty batch. Pass at least one row.")
    return rows


def batches(network: nn.Module, example: Inputs) -> list[Inputs]:
    """Return the example as batches of two and of three, if the network takes them."""
    try:
        sizes = [with_batch_size(example, size) for size in (2, 3)]
        for inputs in sizes:
            run_example(network, inputs)
    except (ShapeMismatch, AssertionError, TypeError):  # a fixed batch size, or a packed sequence
        return [example]
    return sizes


def tensors_in(value: Any) -> list[Tensor]:
    """List all tensors of inputs or outputs, in order."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
