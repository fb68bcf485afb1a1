"""Networks of particles, each as a module of its own, made ready once and kept with the particles.

A twin of an unrolled network (`unrolled`) has the tensors of one particle, as views. What can be made ready is: batch
norms are scaled into the convolutions before them, biases are moved behind rectifiers, and layers are called as `fused`
calls them. Exchanging the model's tensors in every prediction, and finding out what to call, takes longer than a small
network does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from bayeslim.blas import IS_ARM
from bayeslim.fused import AtLeast, is_fixed, is_full, is_plain, is_quiet, quicker
from bayeslim.graphs import Graph, asks_for_layout
from bayeslim.passes import passes_of, quick_products, written
from bayeslim.posteriors import Particles
from bayeslim.posteriors.particles import tensors_of
from bayeslim.ready import Premises, kind_of
from bayeslim.types import Batches, Inputs, Params, as_tensor, modules_of
from bayeslim.unrolled import is_unrolled

KEPT = 2**12
"""How many tensors all networks that are kept may have; a module around one takes some thousand bytes."""
SCALED = 2**24
"""How many weights of all particles may be copied to scale batch norms into them."""
IMAGES = 8
"""From how many images on they are laid out for convolutions."""
_CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d}
_SCALED = ((nn.Conv1d, nn.BatchNorm1d), (nn.Conv2d, nn.BatchNorm2d))
LARGEST = 16
"""How large a bias may be to be moved behind a rectifier."""


@dataclass(eq=False, slots=True)
class _Twins:
    """Those of particles.

    Attributes:
        premises: what they were made from.
        modules: the twins, by number.
    """

    premises: Premises
    modules: dict[int, nn.Module] = field(default_factory=dict)


_kept: WeakKeyDictionary[Particles, _Twins] = WeakKeyDictionary()


def twins_of(
    particles: Particles, chosen: Sequence[int], model: nn.Module, x: Inputs | None = None
) -> list[nn.Module] | None:
    """Modules that are networks of the particles; None where they cannot be kept, or anything else has a say in calls.

    Args:
        particles: the networks.
        chosen: their numbers.
        model: their architecture, unrolled, in evaluation mode.
        x: inputs such as they are called on.
    """
    stack = particles.values | particles.buffers
    tensors = list(stack.values())
    if not is_unrolled(model) or not is_quiet(tensors[0].device.type) or _may_have_no_batch(model, x):
        return None
    kept = _kept.get(particles)
    if kept is None or not kept.premises.hold(model, tensors):
        if not _can_be_kept(model, stack):
            return None
        kept = _kept[particles] = _Twins(Premises.of(model, tensors))
    for k in chosen:
        if k not in kept.modules:
            kept.modules[k] = _twin(model, {name: values[k].data for name, values in stack.items()}, particles.count)
    return [kept.modules[k] for k in chosen]


def _may_have_no_batch(model: nn.Module, x: Inputs | None) -> bool:
    """Whether inputs may be one example alone, whose channels norms take for examples: these cannot be scaled then."""
    if not isinstance(x, Tensor) or x.ndim != 2:
        return False
    kinds = set(map(type, modules_of(model)))
    return nn.Conv1d in kinds and nn.BatchNorm1d in kinds


def outputs_of(twins: Sequence[nn.Module], batches: Batches) -> Tensor:
    """The outputs of twins, one after the other, (S, N, ...); what is the same for all of them is computed once."""
    x, *more = islice(batches(), 2)
    if not more:
        return way_of(twins, x)(x)
    model = twins[0]
    return passes_of(twins, model, lambda: (laid_out(part, model) for part in batches()))


def way_of(twins: Sequence[nn.Module], x: Inputs) -> Callable[[Inputs], Tensor]:
    """How twins are called on inputs such as `x`, that come in one part; gives their outputs, (S, N, ...)."""
    model = twins[0]
    are_laid_out = laid_out(x, model) is not x
    products = type(quick_products(model, x))  # found once, entered in every call
    calls: list[Callable[..., Any]]
    if isinstance(model, Graph):
        calls = [partial(twin.rest, twin) for twin in cast(Sequence[Graph], twins)]
    else:
        calls = [partial(_forward, twin) for twin in twins]

    def outputs(x: Inputs) -> Tensor:
        if are_laid_out:
            x = laid_out(x, model)
        with torch.set_grad_enabled(False), products():  # of which some layers take notice
            values = model.first(model, x) if isinstance(model, Graph) else (x,)
            return torch.stack([called(*values) for called in calls])

    return outputs


def _forward(twin: nn.Module, x: Inputs) -> Tensor:
    return as_tensor(twin.forward(x), twin)


def laid_out(x: Inputs, model: nn.Module) -> Inputs:
    """Inputs as unrolled networks take the least time: a sixth less of images with channels along memory, on a CPU.

    On ARM of signals, too. Not where a network may ask how values lie there.
    """
    if not isinstance(x, Tensor) or x.ndim not in _CONVOLUTIONS or not x.is_cpu or x.dtype != torch.float32:
        return x
    if x.shape[0] < IMAGES or x.shape[1] == 1 or (x.ndim == 3 and not IS_ARM):
        return x
    first = next((module for module in modules_of(model) if module._parameters), None)
    if type(first) is not _CONVOLUTIONS[x.ndim] or asks_for_layout(model):
        return x
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def _can_be_kept(model: nn.Module, stack: Params) -> bool:
    """Whether particles have all tensors that a network is made of, of the same kind, and changes would be seen."""
    own = tensors_of(model)
    return (
        all(map(is_plain, modules_of(model)))
        and own.keys() == stack.keys()
        and not written(model, dict(model.named_buffers()))
        and len(stack) * len(next(iter(stack.values()))) <= KEPT
        and all(kind_of(values) == kind_of(own[name]) and not values.is_inference() for name, values in stack.items())
    )


def _twin(model: nn.Module, network: Params, count: int) -> nn.Module:
    twin = copy.deepcopy(model, {id(own): network[name] for name, own in tensors_of(model).items()})
    modules = modules_of(twin)
    scaled = sum(c.weight.numel() for c in modules if isinstance(c, (nn.Conv1d, nn.Conv2d))) * count <= SCALED
    for module in modules:
        if type(module) is nn.Sequential:
            if scaled:
                _scale_norms(module)
            _move_biases(module)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    for module, forward in list(quicker(twin, lasting=True)):
        vars(module)["forward"] = forward
    if isinstance(twin, Graph):
        twin.bind()
    return twin


def _scale_norms(row: nn.Sequential) -> None:
    """Scale every batch norm after a convolution into a copy of that."""
    before = ""
    modules: list[tuple[str, Any]] = list(row._modules.items())
    for name, norm in modules:
        layer: Any = row._modules.get(before)
        if (type(layer), type(norm)) in _SCALED and _can_be_scaled(layer, norm):
            row._modules[before] = fuse_conv_bn_eval(layer, norm)
            del row._modules[name]
        before = name


def _can_be_scaled(layer: Any, norm: Any) -> bool:
    return is_fixed(norm) and norm.running_var is not None and is_full(layer.weight, norm.running_var)


def _move_biases(row: nn.Sequential) -> None:
    """Add biases behind rectifiers, to the bias of the product that follows: one pass over values less each time.

    V max(W x + b, 0) = V max(W x, −b) + V b. Not of large biases, which would round away what is added to them. A GPU
    adds biases in the product; ARM CPUs were not looked at.
    """
    names = list(row._modules)
    for before, rectifier, after in zip(names, names[1:], names[2:], strict=False):
        layers: list[Any] = [row._modules[name] for name in (before, rectifier, after)]
        if [*map(type, layers)] != [nn.Linear, nn.ReLU, nn.Linear] or layers[0].bias is None:
            continue
        first, _, second = layers
        if IS_ARM or not first.bias.is_cpu or not is_full(first.weight, first.bias, second.weight):
            continue
        if not first.bias.abs().max() <= LARGEST:
            continue
        moved = second.weight @ first.bias
        row._modules[before] = _linear(first.weight, None)
        row._modules[rectifier] = AtLeast(-first.bias)
        row._modules[after] = _linear(second.weight, moved if second.bias is None else moved + second.bias)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(1, 1, device="meta")
    layer.out_features, layer.in_features = weight.shape
    layer._parameters.update({"weight": weight, "bias": bias})  # type: ignore[dict-item]
    return layer.eval()
