"""Example inputs: a network run on them, and their batch made larger or smaller."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayeslim.errors import ShapeMismatch
from bayeslim.types import Inputs, arguments

DOUBLED = 2**6
"""Up to which size inputs are made twice as large to see whether a network takes them."""


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


def takes(model: nn.Module, inputs: Inputs) -> bool:
    """Whether a network runs on inputs; not every one takes noise (for indices), or another batch size."""
    try:
        run_example(model, inputs)
    except ShapeMismatch:
        return False
    return True


def rows_of(example: Inputs) -> int:
    """How many examples the inputs hold: the first dimension of their first tensor."""
    rows = next((tensor.shape[0] for tensor in tensors_in(example) if tensor.ndim), None)
    if rows is None:
        raise ShapeMismatch("The example holds no tensor with a batch dimension.")
    if rows == 0:
        raise ShapeMismatch("The example holds a batch of no rows. Pass at least one.")
    return rows


def with_batch_size(example: Inputs, size: int) -> Inputs:
    """The example with another number of rows, cut or repeated, wherever it has rows."""
    rows = rows_of(example)

    def resize(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.ndim and x.shape[0] == rows):
            return x
        return x.repeat(-(-size // rows), *(1 for _ in x.shape[1:]))[:size].clone()

    return pytree.tree_map(resize, example)


def resized(example: Inputs) -> list[Inputs]:
    """The example with every size that it has but for rows, one at a time, halved and doubled, wherever that stands.

    A size may be how long sequences are, or how large images; or how many features there are, which few networks take
    others of. Only small sizes are doubled: of large ones that takes long.
    """
    sizes = {size for x in tensors_in(example) for size in x.shape[1:]}
    changes = [(size, half) for size in sizes if (half := -(-size // 2)) < size]
    changes += [(size, 2 * size) for size in sizes if 0 < size <= DOUBLED]
    return [pytree.tree_map(partial(_with_size, *change), example) for change in sorted(changes)]


def _with_size(size: int, other: int, x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    for dim in range(1, x.ndim):
        if x.shape[dim] == size:
            x = x.repeat(*(2 if d == dim else 1 for d in range(x.ndim))).narrow(dim, 0, other)
    return x.clone()


def batches(network: nn.Module, example: Inputs) -> list[Inputs]:
    """The example as a batch of two, and of three, if the network takes them; else as it is."""
    try:
        sizes = [with_batch_size(example, size) for size in (2, 3)]
        for inputs in sizes:
            run_example(network, inputs)
    except (ShapeMismatch, AssertionError, TypeError):  # of a fixed size, or packed in a way that cannot be cut
        return [example]
    return sizes


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of inputs or outputs, in order."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
