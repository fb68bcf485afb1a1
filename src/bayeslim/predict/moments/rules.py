"""The rules of torch functions on means and variances.

For a product of independent factors, summed over independent terms (linear layers and convolutions f of any kind):

    mean = f(m; μ)        variance = f(v; μ²) + f(m² + v; σ²)

Activations are approximated by Gaussians. Other approximations:

- Units are independent but for the noise that `SharedNoise` carries through linear layers and activations; all other
  operations drop it and keep each unit's own variance.
- Positions that share a kernel share its draw. A pooling window sees them move together: its maximum is the position
  with the largest mean, and an average has the averaged standard deviation. A convolution takes them for independent.
- A sum of branches that depend on the same random parameters (a residual) adds their variances. A product of such
  branches is refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayeslim.predict.moments.shared_noise import through_linear
from bayeslim.predict.moments.tensor import RULES, Moments, NoRule, rule

# Layers: bilinear in inputs and weights


@rule("linear", "matmul", "__matmul__", "bmm", "mm", *(f"conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3)))
def _layer(func: Any, x: Any, weight: Any, bias: Any = None, *rest: Any, **kwargs: Any) -> Moments:
    sources = _independent(func, x, weight) | _sources(bias)
    x = _settled(x)
    (m, v), (mu, var), (b, b_var) = _parts(x), _parts(weight), _parts(bias)
    if func is torch.conv2d:  # pooling is several times faster with channels last
        mu, var = (None if t is None else t.contiguous(memory_format=torch.channels_last) for t in (mu, var))

    def run(inputs: Tensor, weights: Tensor, offset: Tensor | None = None) -> Tensor:
        simple = offset is None and not rest and not kwargs  # a matrix product has no other arguments
        result: Tensor = func(inputs, weights) if simple else func(inputs, weights, offset, *rest, **kwargs)
        return result

    mean, common, parts = run(m, mu, b), None, []
    if v is not None and func is F.linear:
        carried, common = through_linear(v, x.common, mu)
        parts.append(carried)
    elif v is not None:
        parts.append(run(v, mu.square()))
    if var is not None:
        square = m.square()
        parts.append(run(square if v is None else square.add_(v), var, b_var))
    elif b_var is not None:
        parts.append(b_var.view(-1, *[1] * (mu.ndim - 2)).expand(mean.shape))
    variance = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    if func.__name__.startswith("conv"):
        variance = variance.clamp_min(0)  # convolutions by transforms may round to below zero
    return Moments.of(mean, variance, sources, common)


@rule("embedding")
def _embedding(func: Any, tokens: Tensor, weight: Moments, *args: Any, **kwargs: Any) -> Moments:
    mean, variance = (func(tokens, part, *args, **kwargs) for part in (weight.mu, weight.sigma2))
    return Moments.of(mean, variance, weight.sources)


@rule("batch_norm")
def _batch_norm(
    func: Any,
    x: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if training or running_mean is None or running_var is None:
        raise NoRule("batch_norm by the statistics of the batch is not linear")
    shape = (-1, *[1] * (x.ndim - 2))
    scale = (running_var + eps).rsqrt()
    if isinstance(weight, Moments):
        x, weight = (x - running_mean.view(shape)) * scale.view(shape), weight.view(shape)
        return x * weight if bias is None else x * weight + bias.view(shape)
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    return x * scale.view(shape) + shift.view(shape)


# Arithmetic


@rule("add", "add_", "__add__", "__radd__", "__iadd__")
def _add(func: Any, a: Any, b: Any, *, alpha: float = 1) -> Moments:
    return _stored(func, a, _sum(a, b, alpha))


@rule("sub", "sub_", "subtract", "__sub__", "__isub__")
def _subtract(func: Any, a: Any, b: Any, *, alpha: float = 1) -> Moments:
    return _stored(func, a, _sum(a, b, -alpha))


@rule("rsub", "__rsub__")
def _subtract_from(func: Any, a: Any, b: Any) -> Moments:
    return _sum(_product(a, -1), b, 1)


@rule("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__")
def _multiply(func: Any, a: Any, b: Any) -> Moments:
    return _stored(func, a, _product(a, b) if isinstance(a, Moments) else _product(b, a))


@rule("div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__")
def _divide(func: Any, a: Any, b: Any) -> Moments:
    if isinstance(b, Moments):
        raise NoRule("a random tensor cannot be divided by")
    return _stored(func, a, _product(a, 1 / b))


@rule("neg", "negative", "__neg__")
def _negate(func: Any, a: Moments) -> Moments:
    return _product(a, -1)


def _sum(a: Any, b: Any, factor: float) -> Moments:
    """Add factor · b to a."""
    if a is b:
        return _product(a, 1 + factor)
    a, b = _settled(a), _settled(b)
    (m, v), (n, w) = _parts(a), _parts(b)
    mean = m + factor * n
    if v is not None and w is not None:
        return Moments.of(mean, v + factor**2 * w, a.sources | b.sources)
    moving, variance = (a, v) if w is None else (b, factor**2 * w)
    common = moving.common if mean.shape == moving.mu.shape else None
    if common is not None and w is not None and factor != 1:
        common = common.scaled(torch.full_like(mean, factor))
    return Moments.of(mean, variance.expand(mean.shape), moving.sources, common)


def _product(a: Moments, b: Any) -> Moments:
    if a is b:
        squared: Moments = RULES["square"](torch.square, a)
        return squared
    if isinstance(b, Moments):
        sources = _independent(torch.mul, a, b)
        a, b = a.settled(), b.settled()
        mean = a.mu * b.mu
        return Moments.of(mean, a.sigma2 * (b.mu.square() + b.sigma2) + a.mu.square() * b.sigma2, sources)
    a = a.settled()
    factor = torch.as_tensor(b, dtype=a.mu.dtype, device=a.mu.device)
    mean = a.mu * factor
    common = a.common and a.common.scaled(factor.expand(mean.shape)) if mean.shape == a.mu.shape else None
    return Moments.of(mean, a.sigma2 * factor.square(), a.sources, common)


# Parts of the rules


def _settled(x: Any) -> Any:
    return x.settled() if isinstance(x, Moments) else x


def _parts(x: Any) -> tuple[Any, Any]:
    """Split into mean and variance; a tensor that is not random has None for it."""
    if isinstance(x, Moments):
        x = x.settled()
        return x.mu, x.sigma2
    return x, None


def _sources(*values: Any) -> frozenset[str]:
    return frozenset().union(*(x.sources for x in values if isinstance(x, Moments)))


def _independent(func: Any, a: Any, b: Any) -> frozenset[str]:
    """Join the sources of both factors of a product, which must have none in common."""
    shared = _sources(a) & _sources(b)
    if shared:
        raise NoRule(f'{func.__name__} multiplies two tensors that both depend on the random "{min(shared)}"')
    return _sources(a) | _sources(b)


def _stored(func: Any, target: Any, result: Moments) -> Moments:
    """Return the result, and put it into the target for operations in place."""
    name = func.__name__
    if name.startswith("__"):
        return target.become(result) if name.startswith("__i") and isinstance(target, Moments) else result
    if not name.endswith("_"):
        return result
    if not isinstance(target, Moments):
        raise NoRule(f"{name} would write a random tensor into one that is not")
    return target.become(result)
