"""Particles made ready: how their networks were called, for the next inputs of the same kind.

Finding out what is the best way to call networks takes as long as calling a few small ones. What was found out holds as
long as its premises do: the particles and the network are those they were, and nobody else has a say in calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bayeslim.belongings import Belongings
from bayeslim.fused import is_quiet
from bayeslim.methods.shared.particle_method import ParticleMethod
from bayeslim.posteriors import Particles
from bayeslim.predict.batches import batches_of
from bayeslim.stochastic import evaluating
from bayeslim.types import Batches, modules_of

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian

Way = Callable[[Tensor], Tensor | None]
"""What all networks give, (S, N, ...), if they can be called so."""

KINDS = 32
"""How many kinds of inputs are looked after, of the same particles."""

kind_of, version_of = attrgetter("dtype", "device"), attrgetter("_version")


@dataclass(eq=False, slots=True)
class Premises:
    """What networks of particles were made ready from.

    Attributes:
        model: their architecture.
        belongings: what its modules held then.
        slots: where these keep tensors.
        fits: precision and device of the first ones there.
        stack: all particles' tensors.
        versions: of these.
    """

    model: nn.Module
    belongings: Belongings
    slots: list[dict[str, Any]]
    fits: list[Any]
    stack: list[Tensor]
    versions: list[int]

    @classmethod
    def of(cls, model: nn.Module, tensors: list[Tensor]) -> Premises:
        """Those of now."""
        modules = modules_of(model)
        slots = [slots for module in modules for slots in (module._parameters, module._buffers) if slots]
        return cls(model, Belongings(modules, seen=True), slots, _fits_of(slots), tensors, [*map(version_of, tensors)])

    def hold(self, model: nn.Module, tensors: list[Tensor]) -> bool:
        """Whether all would be made the same now."""
        return (
            self.model is model
            and len(self.stack) == len(tensors)
            and all(map(is_, self.stack, tensors))
            and self.versions == [*map(version_of, tensors)]
            and self.fits == _fits_of(self.slots)
            and self.belongings.are_left()
        )


def _fits_of(slots: list[dict[str, Any]]) -> list[Any]:
    return [kind_of(tensor) for some in slots if (tensor := next(iter(some.values()))) is not None]


@dataclass(eq=False, slots=True)
class _Ready:
    """How all of the particles were called.

    Attributes:
        method: of which they are.
        premises: of all that is known.
        ways: by the kind of inputs.
    """

    method: object
    premises: Premises
    ways: dict[Any, Way] = field(default_factory=dict)


_ready: WeakKeyDictionary[Particles, _Ready] = WeakKeyDictionary()


def outputs_ready(bnn: Bayesian, x: Any) -> Tensor | None:
    """What all particles give for inputs, (S, N, ...), in evaluation mode; None if that is not ready.

    Neither the mode of modules nor whether there are gradients has a part in it.
    """
    particles = bnn.state.get("posterior")
    if type(x) is not Tensor or not isinstance(particles, Particles):
        return None
    ready = _ready.get(particles)
    if ready is None or (way := ready.ways.get(_kind(x))) is None or not is_quiet("cpu" if x.is_cpu else x.device.type):
        return None
    model: Any = bnn._modules["model"]  # as an attribute it takes a while of all this to read
    if bnn.method is ready.method and _still_hold(ready.premises, model, _tensors(particles)):
        outputs = way(x.detach() if x.requires_grad else x)
        return outputs.detach() if outputs is not None and outputs.requires_grad else outputs
    _ready.pop(particles, None)
    return None


def _still_hold(premises: Premises, model: nn.Module, tensors: list[Tensor]) -> bool:
    """Whether premises hold in evaluation mode, in which a network may be; to look into all modules takes a while."""
    if not vars(model)["training"] and premises.hold(model, tensors):
        return True
    with evaluating(model):
        return premises.hold(model, tensors)


def keep_ready(bnn: Bayesian, particles: Particles, batches: Batches, found: Callable[[], Way | None]) -> None:
    """Call all particles of a network in the way that was found, if there is one, when such inputs come again.

    Only for inputs that come in one part, and where a prediction is no more than calls, and changes would be seen.
    """
    x = next(batches())
    if type(x) is not Tensor or bnn.state.get("posterior") is not particles or not is_quiet(x.device.type):
        return
    ready = _ready.get(particles)
    known = {} if ready is None else ready.ways
    if len(known) >= KINDS or _kind(x) in known:
        return
    tensors = _tensors(particles)
    if type(bnn.method).predictive is not ParticleMethod.predictive or any(map(Tensor.is_inference, tensors)):
        return
    if len([*batches()]) > 1 or len([*batches_of(x, "auto", bnn.model, bnn.method.only_calls)()]) > 1:
        return
    if (way := found()) is None:
        return
    if ready is None or ready.method is not bnn.method or not ready.premises.hold(bnn.model, tensors):
        ready = _ready[particles] = _Ready(bnn.method, Premises.of(bnn.model, tensors))
    ready.ways[_kind(x)] = way


def _kind(x: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return x.shape, x.dtype, x.device


def _tensors(particles: Particles) -> list[Tensor]:
    return [*particles.values.values(), *particles.buffers.values()]
