"""Rules for activations, which are applied when they are needed (`Activation`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayeslim.predict.moments.closed_forms import Moments3, clamp, leaky_relu, quadrature, relu
from bayeslim.predict.moments.tensor import RULES, Activation, Moments, NoRule, rule


def activation(name: str, moments: Callable[..., Moments3] | None = None, *, rising: bool = False) -> None:
    """Enter an activation of torch into the table, in and out of place.

    `moments` takes the mean, the variance and the function's own arguments; Gauss-Hermite quadrature is used without
    it. `rising` says whether the function is nondecreasing.
    """
    function = getattr(F, name, None) or getattr(torch, name)

    def wait(func: Any, x: Moments, *args: Any, inplace: bool = False, **kwargs: Any) -> Moments:
        def apply(z: Tensor) -> Tensor:
            result: Tensor = function(z, *args, **kwargs)
            return result

        def carried(mean: Tensor, variance: Tensor) -> Moments3:
            if moments is None:
                return quadrature(apply, mean, variance)
            return moments(mean, variance, *args, **kwargs)

        after = x.waiting_for(Activation(name, apply, carried, rising))
        return x.become(after) if inplace or func.__name__ != name else after

    RULES[name] = RULES[f"{name}_"] = wait


activation("relu", relu, rising=True)
activation("relu6", lambda m, v: clamp(m, v, 0.0, 6.0), rising=True)
activation("hardtanh", lambda m, v, min_val=-1.0, max_val=1.0: clamp(m, v, min_val, max_val), rising=True)
activation("clamp", lambda m, v, min=None, max=None: clamp(m, v, min, max), rising=True)
activation("leaky_relu", lambda m, v, negative_slope=0.01: leaky_relu(m, v, negative_slope))
for _rising in ("tanh", "sigmoid", "softplus", "elu", "celu", "selu", "logsigmoid", "softsign", "exp", "erf"):
    activation(_rising, rising=True)
for _other in ("gelu", "silu", "mish", "sin", "cos", "square"):
    activation(_other)


@rule("softmax", "log_softmax")
def _at_the_end(func: Any, x: Moments, dim: int | None = None, **kwargs: Any) -> Moments:
    """Apply to the draws of the outputs; negative dimensions are the same for both."""
    if dim is None:
        raise NoRule(f"{func.__name__} needs dim")
    place = dim if dim < 0 else dim - x.mu.ndim
    return x.waiting_for(Activation(func.__name__, lambda z: getattr(torch, func.__name__)(z, place)))


@rule("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
def _dropout(func: Any, x: Moments, p: float = 0.5, training: bool = True, inplace: bool = False) -> Moments:
    if training and p > 0:
        raise NoRule(f"{func.__name__} drops units although the network is in evaluation mode")
    return x
