"""Networks of any kind under one `vmap`, where that is seen to do the same.

Of few inputs a GPU waits for calls, and S networks under one `vmap` make it wait once. But a module's own forward may
do anything, such as keeping what it computed, which is of no use outside of `vmap`. So networks are first called both
ways, and never again abreast if that failed, said something else, or left anything behind in a module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.conv import _ConvNd

from bayeslim.belongings import Belongings
from bayeslim.fused import is_plain
from bayeslim.methods.chain import has_ties
from bayeslim.passes import written
from bayeslim.posteriors import Particles
from bayeslim.posteriors.particles import tensors_of
from bayeslim.types import Batches, Params, as_tensor, modules_of
from bayeslim.unrolled import is_followed

FEW = {"cpu": (0, 0), "cuda": (2**26, 2**20)}
"""Of how many numbers inputs may be: times channels of the widest convolution, and for networks without any."""
TOGETHER = 2**24
"""Of how many numbers inputs of all networks may be, as all of their activations are in memory at once."""
MEMBERS, MADE_READY = 5, 6
"""Fewer networks are quicker one after the other; and so are fewer with convolutions that were made ready for it."""
TOLERANCE = 1e-2
"""How far outputs may be apart, relative to the largest: convolutions on a GPU round to ten bits or so."""

_agrees: WeakKeyDictionary[Particles, bool] = WeakKeyDictionary()
"""Whether networks were seen to say and do the same both ways."""


def is_worth_trying(
    model: nn.Module, particles: Particles, chosen: Sequence[int], batches: Batches, are_ready: bool = False
) -> bool:
    """Whether networks are likely to take less time abreast, and nobody looks on.

    Args:
        model: their architecture.
        particles: the networks.
        chosen: their numbers.
        batches: the inputs.
        are_ready: whether they are kept as modules (`twins`).
    """
    if not MEMBERS <= len(chosen) == particles.count or not _agrees.get(particles, True):
        return False
    x = next(batches())
    if not isinstance(x, Tensor) or x.device.type not in FEW or x.numel() > max(FEW[x.device.type]):
        return False
    modules = modules_of(model)
    channels = max((module.out_channels for module in modules if isinstance(module, _ConvNd)), default=0)
    if channels and are_ready and len(chosen) < MADE_READY:
        return False
    of_maps, few = FEW[x.device.type]
    most = min(of_maps // channels if channels else few, TOGETHER // particles.count)
    return x.numel() <= most and all(map(is_plain, modules))


def outputs_mapped(
    model: nn.Module, particles: Particles, batches: Batches, one_by_one: Callable[[], Tensor]
) -> Tensor:
    """The outputs of all particles, (S, N, ...): under `vmap` if that does the same, else one by one."""
    is_new = particles not in _agrees
    before = Belongings(filter(is_followed, modules_of(model)))  # torch's own leave nothing behind
    outputs = _tried(model, particles, batches) if not is_new or _can_be_mapped(model, particles) else None
    if outputs is None or not before.are_left():
        before.put_back()
        _agrees[particles] = False
        return one_by_one()  # and modules keep what this leaves with them
    if is_new:
        alone = one_by_one()
        _agrees[particles] = is_same(outputs, alone)
        return outputs if _agrees[particles] else alone
    return outputs


def _can_be_mapped(model: nn.Module, particles: Particles) -> bool:
    """Not networks of other precisions than the model, nor those that write to buffers, tie weights or recur."""
    if any(isinstance(module, nn.RNNBase) for module in modules_of(model)) or has_ties(model):
        return False
    own = tensors_of(model)
    if written(model, {name: own[name] for name in particles.buffers}):
        return False
    stack = particles.values | particles.buffers
    return all(value.dtype == own[name].dtype and value.device == own[name].device for name, value in stack.items())


def _tried(model: nn.Module, particles: Particles, batches: Batches) -> Tensor | None:
    stack = particles.values | particles.buffers
    try:
        each = [vmap(partial(_called, model, x))(stack) for x in batches()]
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError):
        return None  # what is wrong with inputs is said again, one by one
    return each[0] if len(each) == 1 else torch.cat(each, 1)


def _called(model: nn.Module, x: Tensor, tensors: Params) -> Tensor:
    return as_tensor(functional_call(model, tensors, (x,), tie_weights=False), model)


def is_same(outputs: Tensor, alone: Tensor) -> bool:
    """Whether networks gave the same in another way as alone, but for rounding."""
    same_kind = outputs.shape == alone.shape and outputs.dtype == alone.dtype
    return same_kind and bool((outputs - alone).abs().max() <= TOLERANCE * alone.abs().max())
