"""Passes of networks of one architecture, one after the other, each at the price of a plain pass.

The model itself is called, with other tensors in place of its own. A functional call would take longer than a small
network does, and so would finding the tensors of every network in a stack: of particles they are kept.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bayeslim.blas import IS_ARM, ROWS, is_better_apart, products_of
from bayeslim.fused import fused
from bayeslim.posteriors import Particles
from bayeslim.types import Batches, Inputs, Params, batch_size, call, modules_of

FEW = 2**7
"""For how many inputs products gain by BLAS on ARM what functions beside them may lose."""
KEPT = 2**14
"""How many tensors of particles are kept at most."""


def passes(model: nn.Module, networks: Callable[[Params], Iterable[Params]], batches: Batches) -> Tensor:
    """The outputs of networks one after the other, (S, N, ...).

    Args:
        model: their architecture.
        networks: given the model's own tensors, those of each network, of the same precisions and on the same devices.
        batches: the inputs.
    """
    with lent(model) as (own, put), fused(model):

        def called() -> Iterator[nn.Module]:
            for network in networks(own):
                put(network)
                yield model

        return passes_of(called(), model, batches)


def passes_of(networks: Iterable[nn.Module], model: nn.Module, batches: Batches) -> Tensor:
    """The outputs of networks that are modules of the architecture of `model`, one after the other, (S, N, ...)."""
    outputs = []
    with quick_products(model, next(batches())):
        for network in networks:
            each = [call(network, x) for x in batches()]
            outputs.append(each[0] if len(each) == 1 else torch.cat(each))
    return torch.stack(outputs)


def quick_products(model: nn.Module, x: Inputs) -> AbstractContextManager[None]:
    """Passes of a network inside, of inputs such as `x`, multiply in the quickest way."""
    most, rows = ROWS if isinstance(x, Tensor) and x.ndim == 2 else FEW, batch_size(x)  # an example may have many rows
    helps = IS_ARM and rows <= most and not is_better_apart(model, rows)
    return products_of(model, rows <= FEW) if helps else nullcontext()


def converted(networks: Iterable[Params]) -> Callable[[Params], Iterable[Params]]:
    """Networks in any precision and on any device, for `passes`."""
    return lambda own: ({name: value.to(own[name]) for name, value in network.items()} for network in networks)


@contextmanager
def lent(model: nn.Module) -> Iterator[tuple[Params, Callable[[Params], None]]]:
    """The parameters and buffers of `model`, and a function that puts others there; its own are put back afterwards.

    A tensor that only its modules know is exchanged there. Others are left the objects that they are, and given other
    data: an optimizer has a list of them, and whoever has one may read it in a pass. So are those of recurrent layers,
    which take others together anew in every pass.
    """
    own, places = _places_of(model)
    recurrent = {id(p) for module in modules_of(model) if isinstance(module, nn.RNNBase) for p in module.parameters()}
    others = {name for name, count in _references(own, places).items() if count > _ALONE or id(own[name]) in recurrent}
    before = {name: own[name].data for name in others}
    moved: list[tuple[dict[str, Any], str, str]] = []

    def put(network: Params) -> None:
        if not moved:  # all networks have tensors of the same names
            moved.extend(place for place in places if place[2] in network and place[2] not in before)
        for slots, leaf, name in moved:
            slots[leaf] = network[name]
        give({name: network[name] for name in before.keys() & network.keys()})

    def give(data: Params) -> None:
        for name, values in data.items():
            own[name].data = values
        if data:
            torch.clear_autocast_cache()  # which knows tensors by what they are, not by their data

    try:
        yield own, put
    finally:
        for slots, leaf, name in places:
            slots[leaf] = own[name]
        give(before)


def _places_of(model: nn.Module) -> tuple[Params, list[tuple[dict[str, Any], str, str]]]:
    """A model's tensors by name, and where it keeps them: in which dictionary, under which key, and which one."""
    own: Params = {}
    names: dict[int, str] = {}
    places = []
    for path, module in model.named_modules():
        for slots in (module._parameters, module._buffers):
            for leaf, tensor in slots.items():
                if tensor is not None:
                    name = names.setdefault(id(tensor), f"{path}.{leaf}" if path else leaf)
                    own[name] = tensor
                    places.append((slots, leaf, name))
    return own, places


def _references(own: Params, places: list[tuple[dict[str, Any], str, str]]) -> dict[str, int]:
    """How many references to each tensor there are besides those of its modules."""
    found = {name: sys.getrefcount(tensor) for name, tensor in own.items()}
    for _, _, name in places:
        found[name] -= 1
    return found


_ALONE = _references(*_places_of(nn.LayerNorm(1, bias=False)))["weight"]
"""So many are those of `lent` itself."""


@dataclass(eq=False, slots=True)
class _Kept:
    """Networks that were taken out of particles, as they fit a model's tensors.

    Attributes:
        stack: all particles' tensors.
        fits: precisions and devices of the model's.
        versions: of the particles' tensors that were copied.
        networks: by number.
    """

    stack: list[Tensor]
    fits: list[tuple[torch.dtype, torch.device]]
    versions: dict[str, int] = field(default_factory=dict)
    networks: dict[int, Params] = field(default_factory=dict)


_kept: WeakKeyDictionary[Particles, _Kept] = WeakKeyDictionary()


def networks_of(particles: Particles, chosen: Iterable[int], model: nn.Module) -> Callable[[Params], Iterable[Params]]:
    """Weights and buffers of particles, for `passes` of a model in evaluation mode.

    What a pass may write to, and what is of another precision or elsewhere, is a copy. The rest are views, which are
    kept for the next time; so are the weights of recurrent layers on a GPU, which cuDNN wants in one piece.
    """

    def taken(own: Params) -> Iterator[Params]:
        stack = particles.values | particles.buffers
        copied = written(model, {name: own[name] for name in particles.buffers})
        known = _known(particles, stack, own)
        for k in chosen:
            network = known.networks.get(k)
            if network is None:
                # as tensors by themselves: every call takes longer with views
                network = {name: value[k].to(own[name]).data for name, value in stack.items()}
                pieces = _in_one_piece(model, network)
                network |= pieces
                lasts = _fits_of(stack, stack) == known.fits and not any(stack[name].is_inference() for name in pieces)
                if lasts and len(known.networks) * len(stack) < KEPT:
                    known.networks[k] = network
                    known.versions |= {name: stack[name]._version for name in pieces}
            yield network | {name: network[name].clone() for name in copied} if copied else network

    return taken


def _known(particles: Particles, stack: Params, own: Params) -> _Kept:
    """What is kept of particles; nothing, if it would not be the same now."""
    tensors, fits = list(stack.values()), _fits_of(stack, own)
    known = _kept.get(particles)
    if (
        known is None
        or known.fits != fits
        or not all(map(is_, known.stack, tensors))
        or any(stack[name]._version != version for name, version in known.versions.items())
    ):
        known = _kept[particles] = _Kept(tensors, fits)
    return known


def _fits_of(names: Iterable[str], tensors: Params) -> list[tuple[torch.dtype, torch.device]]:
    return [(tensor.dtype, tensor.device) for tensor in map(tensors.__getitem__, names)]


def written(model: nn.Module, buffers: Params) -> list[str]:
    """Those of some buffers that a pass may write to: all but those of norms in evaluation mode."""
    if not buffers:
        return []
    norms = [module for module in modules_of(model) if isinstance(module, _NormBase) and not module.training]
    safe = {id(buffer) for norm in norms for buffer in norm._buffers.values()}
    return [name for name, buffer in buffers.items() if id(buffer) not in safe]


def _in_one_piece(model: nn.Module, network: Params) -> Params:
    """Copies of the weights of recurrent layers on a GPU, which are views of one tensor each."""
    found: Params = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and next(module.parameters()).is_cuda:
            twin: Any = copy.deepcopy(module)
            weights = {f"{path}.{leaf}" if path else leaf: getattr(twin, leaf) for leaf in twin._flat_weights_names}
            for name in weights.keys() & network.keys():
                weights[name].data.copy_(network[name])
            twin.flatten_parameters()
            found |= {name: weights[name].data for name in weights.keys() & network.keys()}
    return found
