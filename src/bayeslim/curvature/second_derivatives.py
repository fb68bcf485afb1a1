"""Second derivatives of operations whose own backward pass cannot be differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bayeslim.attention import ExplicitAttention
from bayeslim.curvature.probe import graph_nodes


class TwiceDifferentiable(ExplicitAttention):
    """Compute attention and hard sigmoids so that they differentiate twice.

    A context manager.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, or its explicit form."""
        if func is F.hardsigmoid:
            return _hardsigmoid(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    result = F.relu6(input + 3) / 6
    return input.copy_(result) if inplace else result


def check_not_once_differentiable(*gradients: Tensor) -> None:
    """Raise if a custom function of the graph can be differentiated only once.

    Torch would take zeros for its second derivatives.
    """
    if any(node.name().endswith("::Error") for node in graph_nodes(*gradients)):
        raise RuntimeError("a custom function is marked once_differentiable")
