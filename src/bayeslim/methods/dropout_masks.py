"""Dropout at test time, in a network that is otherwise in evaluation mode, with masks for all inputs or for each.

Modules that drop out (`nn.Dropout` and its kin, recurrent layers and attention with a dropout of their own) are put in
training mode, and functional dropout that is told not to (`F.dropout(x, p, self.training)`) is told to. What a module
hides from it stays off, such as a `dropout_p` that it sets to zero outside of training.

A mask that is drawn for all inputs at once makes the outputs those of one network: it is the same for every example,
and drawn again from the same seed for every batch. All of torch's dropout draws its masks by `bernoulli_` or is one
kernel, `native_dropout`, except inside cuDNN's recurrent layers: there, every example has a mask of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bayeslim.samplers.run import seed_of_chain
from bayeslim.stochastic import own_layers

FUNCTIONS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


def drops_out(module: nn.Module) -> bool:
    """Whether a module of torch's drops something out in training mode."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, nn.MultiheadAttention) and module.dropout > 0


def mentions_dropout(module: nn.Module) -> bool:
    """Whether the forward of a module that is not torch's calls something named after dropout."""
    code = getattr(type(module).forward, "__code__", None)
    own = not type(module).__module__.startswith("torch.")
    return own and code is not None and any("dropout" in name.lower() for name in code.co_names)


class Always(TorchFunctionMode):
    """Functional dropout that is told not to drop out does so all the same; `seen` says whether there was any."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for every function of torch."""
        kwargs = kwargs or {}
        if func in FUNCTIONS and kwargs.get("p", 0.5) > 0:
            self.seen = True
            kwargs = {**kwargs, "training": True}
        return func(*args, **kwargs)


class Shared(TorchDispatchMode):
    """Every mask is the same for all examples.

    Args:
        seed: of this network; the same one gives the same masks, in the order they are drawn in.
        examples: how many there are in the batch, to know which dimension of a mask they are in.
    """

    def __init__(self, seed: int, examples: int):
        super().__init__()
        self.seed, self.examples, self.drawn = seed, examples, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for every operation."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.bernoulli_.float and kwargs.get("generator") is None:
            mask: Tensor = args[0]
            return mask.copy_(self._mask(mask, args[1] if len(args) > 1 else 0.5))
        if func is torch.ops.aten.native_dropout.default:
            values, p = args[:2]
            kept = self._mask(values, 1 - p)
            return values * kept / (1 - p), kept.bool()
        return func(*args, **kwargs)

    def _mask(self, like: Tensor, p: float) -> Tensor:
        """Ones with probability p, else zeros, the same for all examples."""
        generator = torch.Generator(like.device).manual_seed(seed_of_chain(self.seed, self.drawn))
        self.drawn += 1
        apart, together = shapes_of(tuple(like.shape), self.examples)
        one = torch.empty(together, dtype=like.dtype, device=like.device).bernoulli_(p, generator=generator)
        return one.expand(apart).reshape(like.shape)


def shapes_of(shape: tuple[int, ...], examples: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape with examples in a dimension of their own, and the same with one example; no change where there is none.

    >>> shapes_of((8, 5), 8), shapes_of((7, 8, 5), 8)  # examples first, or after the positions of a sequence
    (((8, 5), (1, 5)), ((7, 8, 5), (7, 1, 5)))
    >>> shapes_of((16, 7, 7), 8)  # two heads of attention each
    ((8, 2, 7, 7), (1, 2, 7, 7))
    """
    if shape[:1] == (examples,):
        return shape, (1, *shape[1:])
    if shape[1:2] == (examples,):
        return shape, (shape[0], 1, *shape[2:])
    if shape and shape[0] and shape[0] % examples == 0:
        rest = (shape[0] // examples, *shape[1:])
        return (examples, *rest), (1, *rest)
    return shape, shape


@contextmanager
def dropping_out(model: nn.Module) -> Iterator[Always]:
    """A model in evaluation mode drops out all the same, every example for itself."""
    modules = [m for m in model.modules() if drops_out(m) and not m.training]
    for module in modules:
        module.training = True
    always = Always()
    try:
        with own_layers(), always:
            yield always
    finally:
        for module in modules:
            module.training = False


@contextmanager
def masks_of(seed: int | None, examples: int) -> Iterator[None]:
    """Masks are those of the network of a seed, the same for all examples; every example has its own without a seed."""
    if seed is None:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH), Shared(seed, examples):  # fused attention would draw its masks by itself
        yield
