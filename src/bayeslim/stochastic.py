"""The one stochastic layer: noise at the pre-activations of any layer linear in its parameters.

Local reparametrisation (Kingma, Salimans & Welling 2015, arXiv:1506.02557) samples y = f(x; w) instead of w:
    y | x ~ N(f(x; μ), f(x²; σ²)),      independently for every example,
and Flipout (Wen et al. 2018, arXiv:1803.04386) turns one draw ΔW = σ ε into one for every example by random signs:
    y = f(x; μ) + s ∘ f(x ∘ r; ΔW),     r, s ∈ {−1, +1}.

Both run the layer's *own* forward twice, so there is no Bayesian class per dimension. A layer is retyped in place
(`layer.__class__`), which keeps its names, hooks and parameters; it draws in training mode and is its plain self in
evaluation mode. Both need every weight to be used once per example: tied weights, and layers that run never or several
times in a forward pass, are sampled whole instead (`methods/shared/first_pass.py`). Positions that share a weight
(convolutions, sequences) get independent noise, the usual mean-field approximation of the local estimator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeslim.attention import ExplicitAttention
from bayeslim.noise import current_generator, is_transformed, standard_normal_like
from bayeslim.sites import owner

if TYPE_CHECKING:
    from bayeslim.families import DiagonalGaussian

LINEAR_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
"""Layers linear in their parameters, by exact type: a subclass may do anything in its forward."""


L = TypeVar("L", bound=nn.Module)

TINY = 1e-20
"""Added to variances: the root of one that is zero (of an input that is all zeros) would have an infinite gradient."""


class _Substitute:
    """A layer seen with another weight and bias; everything else is the layer's own."""

    def __init__(self, layer: Any, weight: Tensor, bias: Tensor | None):
        self.layer = layer
        self.weight = weight
        self.bias = bias

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class ForeignSubstitute(_Substitute):
    """A layer of a user's class seen with other parameters: methods, properties and `super()` see them as well."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the layer, as `super()` asks for it."""
        return type(self.layer)

    def __getattr__(self, name: str) -> Any:
        found = getattr(type(self.layer), name, None)
        if isinstance(found, property | FunctionType):
            return found.__get__(self)
        return getattr(self.layer, name)


class _Noisy:
    """The base of local and Flipout layers."""

    plain: ClassVar[type[nn.Module]]
    channel: ClassVar[int]
    """The dimension of the features in inputs and outputs."""
    substitute: ClassVar[type[_Substitute]] = _Substitute
    training: bool
    weight: Tensor
    family: DiagonalGaussian
    reads_variances: ClassVar[bool] = False
    """Whether it computes with σ² rather than σ."""
    given: Mapping[str, tuple[Tensor, Tensor]] | None = None
    """μ and σ, or σ², of the random parameters of this layer, while `noise` provides them."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.training:
            output: Tensor = self.plain.forward(self, input, *args, **kwargs)
            return output
        return self.perturbed(input, *args, **kwargs)

    def perturbed(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def run_with(self, weight: Tensor, bias: Tensor | None, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the plain layer's own forward with other parameters."""
        layer: Any = self.substitute(self, weight, bias)
        output: Tensor = self.plain.forward(layer, input, *args, **kwargs)
        return output

    def mean_and_spread(self, leaf: str) -> tuple[Any, Any]:
        """Return μ and σ, or σ², of the weight or the bias.

        The spread is None if the parameter is not random.

        Activation checkpointing runs a layer again in the backward pass, when `given` is gone. It checks that the layer
        saves the same tensors as the first time, so those that the computation of μ and σ saves are hidden from it.
        """
        if self.given is not None and leaf in self.given:
            return self.given[leaf]
        layer: Any = self
        own: Any = getattr(self, leaf, None)
        if self.given is not None and "weight" in self.given:  # `given` holds all random parameters of the layer
            return own, None
        with _unseen_by_checkpoints():
            log_std = self.family.log_std_of(layer, leaf)
            if log_std is None:
                return own, None
            std = log_std.exp()
            return self.family.counted(own, log_std), std.square() if self.reads_variances else std


def _unseen_by_checkpoints() -> AbstractContextManager[Any]:
    if torch.compiler.is_compiling():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class _LocalLinear(torch.autograd.Function):
    """x Wᵀ + b + √(x² Vᵀ) ∘ ε: a linear layer with local noise, as one fused autograd function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, variance: Tensor, bias: Tensor | None) -> Tensor:
        squares = x.square()
        output = F.linear(x, weight, bias)
        # 2 √v, for d√v = dv / (2 √v); the product itself adds and multiplies.
        twice = torch.addmm(x.new_full((1,), 4 * TINY), squares, variance.mT, alpha=4).sqrt_()
        noise = standard_normal_like(output)
        output.addcmul_(twice, noise, value=0.5)
        ctx.save_for_backward(x, squares, weight, variance, noise.div_(twice))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        x, squares, weight, variance, slope = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives, recompute by differentiable steps
            squares = x.square()
            twice = 2 * F.linear(squares, variance).add(TINY).sqrt()
            slope = (slope * twice).detach() / twice
        to_v = grad * slope
        to_x = (grad @ weight).addcmul_(x, to_v @ variance, value=2) if ctx.needs_input_grad[0] else None
        to_bias = grad.sum(0) if ctx.needs_input_grad[3] else None
        return to_x, grad.mT @ x, to_v.mT @ squares, to_bias


class _Local(_Noisy):
    reads_variances = True

    def perturbed(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight, weight_variance = self.mean_and_spread("weight")
        bias, bias_variance = self.mean_and_spread("bias")
        if self.plain is nn.Linear and bias_variance is None and _is_simple(input, weight, weight_variance):
            rows = input if input.ndim == 2 else input.reshape(-1, input.shape[-1])
            output: Tensor = _LocalLinear.apply(rows, weight, weight_variance, bias)
            return output if input.ndim == 2 else output.view(*input.shape[:-1], -1)
        mean = self.run_with(weight, bias, input, *args, **kwargs)
        if _half_precision(input, mean):
            # σ² of a small σ underflows in half precision.
            spreads: list[Any] = [None if v is None else v.float() for v in (weight_variance, bias_variance)]
            with torch.autocast(input.device.type, enabled=False):
                variance = self.run_with(*spreads, input.float().square(), *args, **kwargs)
        else:
            variance = self.run_with(weight_variance, bias_variance, input.square(), *args, **kwargs)
        std = variance.clamp_min(TINY).sqrt_()  # convolutions by FFT or Winograd may round to below zero
        return mean.add_(std.to(mean.dtype) * standard_normal_like(mean))


class _Flipout(_Noisy):
    def perturbed(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight, weight_std = self.mean_and_spread("weight")
        bias, bias_std = self.mean_and_spread("bias")
        mean = self.run_with(weight, bias, input, *args, **kwargs)
        delta = (weight_std * standard_normal_like(weight_std)).to(weight.dtype)
        channel = self.channel
        noise = _signs(mean, channel) * self.run_with(delta, None, input * _signs(input, channel), *args, **kwargs)
        if bias_std is not None:
            shape = [1] * mean.ndim
            shape[channel] = bias_std.numel()
            draws = standard_normal_like(_signs(mean, channel))
            noise = noise + (bias_std.view(shape) * draws).to(mean.dtype)
        return mean + noise


def _is_simple(*tensors: Tensor) -> bool:
    """Check for one full precision, without compiler, `vmap` or autocast."""
    if is_transformed() or torch.is_autocast_enabled(tensors[0].device.type):
        return False
    dtype = tensors[0].dtype
    return dtype in (torch.float32, torch.float64) and all(t.dtype == dtype for t in tensors)


def _half_precision(input: Tensor, mean: Tensor) -> bool:
    if torch.float16 in (input.dtype, mean.dtype):
        return True
    # A bfloat16 model outside autocast keeps log σ in single precision, so its variance branch is single precision too.
    return input.dtype == torch.bfloat16 and not torch.is_autocast_enabled(input.device.type)


def _signs(like: Tensor, channel: int) -> Tensor:
    """Draw random signs for every example and channel, the same at all positions."""
    shape = [1] * like.ndim
    shape[0], shape[channel] = like.shape[0], like.shape[channel]
    return like.new_empty(shape).bernoulli_(0.5, generator=current_generator(like.device)).mul_(2).sub_(1)


def _retyped(kind: type[_Noisy], plain: type[nn.Module], channel: int, **body: Any) -> type[nn.Module]:
    name = f"{kind.__name__.removeprefix('_')}{plain.__name__}"
    doc = f"{plain.__name__}, with noise in training mode."
    return type(
        name, (kind, plain), {"plain": plain, "channel": channel, "__module__": __name__, "__doc__": doc} | body
    )


_KINDS: dict[str, type[_Noisy]] = {"local": _Local, "flipout": _Flipout}

NOISY: dict[str, dict[type[nn.Module], type[nn.Module]]] = {
    estimator: {plain: _retyped(kind, plain, -1 if plain is nn.Linear else 1) for plain in LINEAR_LAYERS}
    for estimator, kind in _KINDS.items()
}
for _classes in NOISY.values():  # importable by name, so that copies and pickles of a model find them
    globals().update({cls.__name__: cls for cls in _classes.values()})


def linear_in_parameters(layer: type[L] | None = None, *, channel_dim: int = -1) -> Any:
    """Declare a layer class linear in its parameters.

    `Variational` then uses local reparametrisation or Flipout for it, as for `nn.Linear`. Every output must be a sum of
    products of one input and one weight, each with the factor 1, plus a bias:

        @bl.linear_in_parameters
        class MaskedLinear(nn.Linear):
            def forward(self, x):
                return F.linear(x, self.weight * self.mask, self.bias)

    The parameters are called `weight` and `bias`; a layer may have no bias, or set it to None. Its forward must read
    them from `self`, and take the input first. The first training step checks that the variance is right.

    Args:
        layer: the class; subclasses need a declaration of their own.
        channel_dim: the dimension of the features in inputs and outputs: −1 as in `nn.Linear`, 1 as in convolutions.
    """
    if layer is None:
        return partial(linear_in_parameters, channel_dim=channel_dim)
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise TypeError(f"linear_in_parameters decorates a subclass of torch.nn.Module. Got {layer!r}.")
    for estimator, kind in _KINDS.items():
        body = {"substitute": ForeignSubstitute, "__reduce_ex__": _reduce_foreign, "estimator": estimator}
        NOISY[estimator][layer] = _retyped(kind, layer, channel_dim, **body)
    return layer


def _reduce_foreign(layer: Any, protocol: SupportsIndex) -> tuple[Any, ...]:
    """Pickle a noisy layer by its plain class, which declares itself linear again."""
    return _new_foreign, (layer.plain, layer.estimator), vars(layer)


def _new_foreign(plain: type[nn.Module], estimator: str) -> nn.Module:
    cls = NOISY[estimator][plain]
    return cls.__new__(cls)


def is_linear(layer: nn.Module) -> bool:
    """Check whether a layer is known to be linear in its parameters."""
    return type(layer) in NOISY["local"]


def make_noisy(layer: nn.Module, estimator: str, family: DiagonalGaussian) -> None:
    """Retype a plain layer in place; the family knows the μ and σ of its parameters."""
    layer.__class__ = NOISY[estimator][type(layer)]
    layer.family = family  # type: ignore[assignment]


def plain_type(layer: nn.Module) -> type[nn.Module]:
    """Return a layer's type; of a noisy layer, that of its plain self."""
    return layer.plain if isinstance(layer, _Noisy) else type(layer)


def make_plain(layer: nn.Module) -> None:
    """Give a noisy layer its plain class back; others are left alone."""
    if isinstance(layer, _Noisy):
        setattr(layer, "__class__", layer.plain)  # noqa: B010 - a type checker takes no plain assignment here
        del layer.family


def is_noisy(layer: nn.Module) -> bool:
    """Tell whether a layer draws noise in training mode."""
    return isinstance(layer, _Noisy)


@contextmanager
def noise(model: nn.Module, on: bool, given: Mapping[str, tuple[Tensor, Tensor]] | None = None) -> Iterator[None]:
    """Turn the noise of noisy layers on or off, whatever the model's mode.

    Args:
        model: the network.
        on: whether they draw.
        given: μ and σ of all random parameters by name (σ² for local layers), to use instead of their own.
    """
    changed = [m for m in model.modules() if is_noisy(m) and m.training != on]
    for layer in changed:
        layer.training = on
    told: dict[nn.Module, dict[str, tuple[Tensor, Tensor]]] = {}
    if given and not torch.compiler.is_compiling():  # a compiler finds common expressions by itself
        for name, (mean, spread) in given.items():
            layer, leaf = owner(model, name)
            if is_noisy(layer) and type(spread) is Tensor:  # a layer cannot compute with a shard
                told.setdefault(layer, {})[leaf] = (mean, spread)
    for layer, values in told.items():
        layer.given = values  # type: ignore[assignment]
    try:
        with ExplicitAttention() if changed else nullcontext():
            yield
    finally:
        for layer in changed:
            layer.training = not on
        for layer in told:
            del layer.given


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a network that is being fitted into evaluation mode.

    Every module's own mode is restored afterwards. To predict, call a replica instead (`bayeslim.replica`): another
    thread may use the network.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
