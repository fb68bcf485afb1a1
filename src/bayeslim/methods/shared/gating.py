"""Gates in a network that is being trained: w = z ∘ w̃.

The parameters of gates are registered at the layer they scale (`fc1.inputs_gate_log_std`). Where a layer runs once in a
forward pass and is linear in its weights, or is a norm, z is drawn for every example and multiplied at the layer's
inputs or outputs, the same z at all positions of a sequence or an image. Elsewhere (recurrent layers, attention, tied
weights, shared noise) one z is drawn for a pass and multiplied into the weights.

Examples are taken to be in the first dimension. For a layer whose sequences have time first, every step has one z,
shared by the examples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from bayeslim.bayesian import Bayesian
from bayeslim.errors import ShapeMismatch, UnsupportedModel
from bayeslim.families import ZeroMean
from bayeslim.families.base import Family, add_parameter, precise_dtype
from bayeslim.gates import Gate
from bayeslim.gates.placement import GateAt, Part, Place, place_gates
from bayeslim.posteriors.gated import Scales
from bayeslim.priors import Prior
from bayeslim.sites import is_norm, owner, tensor_at
from bayeslim.types import Inputs, Params, call


def check(gate: Any, gate_at: Any, family: Family, mean_field: bool) -> None:
    """Raise if settings do not fit together."""
    if gate is None:
        if gate_at is not None:
            raise ValueError(
                f"gate_at places gates, and there are none. Pass gates=... as well. Got gate_at={gate_at!r}."
            )
        return
    if not isinstance(gate, Gate):
        raise TypeError(f"gates must be one of bayeslim.gates, such as NormalJeffreys(). Got {gate!r}.")
    if not mean_field:
        raise ValueError(
            "gates scale independent weights or points and are trained by the KL. They need renyi=1 and "
            f"family=DiagonalGaussian(), SparseGaussian() or Point(). Got family={family!r}."
        )
    if isinstance(family, ZeroMean):
        raise ValueError(
            "gates scale weights that have a mean, and those of family=ZeroMean() have none: their variances are "
            "scales already. Use family=DiagonalGaussian(), SparseGaussian() or Point()."
        )
    if gate_at is not None and not (
        isinstance(gate_at, Mapping) and gate_at and all(map(_names_sides, gate_at.values()))
    ):
        raise TypeError(f'gate_at must map names of layers to sides, such as {{"fc1": "inputs"}}. Got {gate_at!r}.')


def _names_sides(sides: Any) -> bool:
    several = isinstance(sides, (tuple, list)) and bool(sides) and all(isinstance(side, str) for side in sides)
    return isinstance(sides, str) or several


def install(bnn: Bayesian, gate: Gate, gate_at: GateAt | None) -> None:
    """Register the parameters of the gates at the layers of a network."""
    places = place_gates(bnn.model, bnn.sites.names, gate_at)
    if not gate.multiplies:
        places = _of_priors(places, bnn.sites.names)
    start: dict[str, tuple[Tensor, Place]] = {}
    for place in places:
        start |= {place.parameter(own): (value, place) for own, value in gate.start(place.count).items()}
    for path in start:
        module, leaf = owner(bnn.model, path)
        if hasattr(module, leaf):
            raise UnsupportedModel(f'"{path}" already exists in the model. Start from the plain network.')
    for path, (value, place) in start.items():
        like = bnn.model.get_parameter(place.parts[0].parameter)
        add_parameter(bnn.model, path, value.to(device=like.device, dtype=precise_dtype(like)))
    bnn.state["places"], bnn.state["gate_names"] = places, tuple(gate.start(1))


def strip(model: nn.Module, places: Collection[Place], gate: Gate) -> None:
    """Remove what `install` and `Gating.stand_at` added."""
    for place in places:
        module = model.get_submodule(place.layer)
        for own in gate.start(1):
            delattr(*owner(model, place.parameter(own)))
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, AtLayer)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _of_priors(places: tuple[Place, ...], sites: Collection[str]) -> tuple[Place, ...]:
    """Keep the places of random weights, and raise if a weight has two scales."""
    kept = tuple(place for place in places if any(part.parameter in sites for part in place.parts))
    scaled = [part.parameter for place in kept for part in place.parts]
    twice = next((name for name in scaled if scaled.count(name) > 1), None)
    if twice is not None:
        raise UnsupportedModel(
            f'"{twice}" would have two centred scales, and the prior of a weight has one. Choose one side of its '
            "layer with gate_at, or use non-centred gates."
        )
    if not kept:
        raise UnsupportedModel(
            "Centred gates scale priors, and no gated parameter is random. Add gated layers to sites=..., or use "
            "non-centred gates."
        )
    return kept


def forget_masks(bnn: Bayesian) -> None:
    """Forget which gates have weights left, after the masks have changed."""
    bnn.state.pop("gates_left", None)


class AtLayer:
    """A hook that multiplies a layer's inputs or outputs by draws of its gates.

    It acts in training mode only, unless `on` is set.
    """

    def __init__(self, gate: Gate, place: Place):
        self.gate, self.place = gate, place
        self.names = tuple(gate.start(1))
        self.on: bool | None = None
        self.drawn: list[Tensor] = []
        """The draws of a pass, where the gate has a surrogate loss."""

    def scaled(self, module: nn.Module, values: Tensor) -> Tensor:
        """Multiply values by z."""
        if not (module.training if self.on is None else self.on):
            return values
        channel = _channel_dim(module, values)
        own = {name: getattr(module, f"{self.place.tag}_gate_{name}") for name in self.names}
        z = self.gate.draw(own, tuple(values.shape[:1]) if channel else ())
        if self.gate.has_surrogate:
            self.drawn.append(z)
        shape = [1] * values.ndim
        shape[0] = values.shape[0]
        shape[channel] = values.shape[channel]
        return values * self.place.widened(z).view(shape).to(values.dtype)


class AtInputs(AtLayer):
    """The hook before a layer runs."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Scale the input among the arguments."""
        if args:
            return (self.scaled(module, args[0]), *args[1:]), kwargs
        return args, kwargs | {"input": self.scaled(module, kwargs["input"])}


class AtOutputs(AtLayer):
    """The hook after a layer has run."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Scale the output."""
        return self.scaled(module, output)


def _channel_dim(module: nn.Module, values: Tensor) -> int:
    """Return the channel dimension; 0 if there is no dimension of examples."""
    if isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm)):
        return values.ndim - 1
    if isinstance(module, _ConvNd):
        return values.ndim - module.weight.ndim + 1
    if isinstance(module, _InstanceNorm):
        return int(values.ndim - module._get_no_batch_dim())
    return 1


@contextmanager
def drawing(model: nn.Module, on: bool) -> Iterator[list[AtLayer]]:
    """Switch gates at layers on or off inside; return those that record their draws."""
    changed: list[tuple[AtLayer, bool | None]] = []
    recording: list[AtLayer] = []
    for module, hook in _at_layers(model):
        if (module.training if hook.on is None else hook.on) != on:
            changed.append((hook, hook.on))
        if hook.gate.has_surrogate:
            recording.append(hook)
    for hook, _ in changed:
        hook.on = on
    for hook in recording:
        hook.drawn = []
    try:
        yield recording
    finally:
        for hook, before in changed:
            hook.on = before
        for hook in recording:
            hook.drawn = []


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Keep gates at layers from drawing, in training mode too, unless `drawing` is on."""
    hooks = [hook for _, hook in _at_layers(model)]
    for hook in hooks:
        hook.on = False
    try:
        yield
    finally:
        for hook in hooks:
            hook.on = None


def _at_layers(model: nn.Module) -> Iterator[tuple[nn.Module, AtLayer]]:
    for module in model.modules():
        hooks: tuple[Any, ...] = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        for hook in hooks:
            if isinstance(hook, AtLayer):
                yield module, hook


@dataclass(frozen=True)
class Gating:
    """The gates of a network as they are now, differentiable.

    Attributes:
        gate: the kind of gate.
        bnn: the network.
    """

    gate: Gate
    bnn: Bayesian

    @property
    def places(self) -> tuple[Place, ...]:
        """The places of the gates."""
        places: tuple[Place, ...] = self.bnn.state["places"]
        return places

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that they scale."""
        return tuple(dict.fromkeys(part.parameter for place in self.places for part in place.parts))

    def layers(self, linear: Collection[type[nn.Module]]) -> set[str]:
        """List the gated layers that can be scaled at inputs or outputs if they run once."""
        tied = {site.name for site in self.bnn.sites if site.aliases}
        found = set()
        for place in self.places if self.gate.multiplies else ():
            module = self.bnn.model.get_submodule(place.layer)
            simple = type(module) in linear or (is_norm(module) and type(module).__module__.startswith("torch.nn."))
            if simple and not any(part.parameter in tied for part in place.parts):
                found.add(place.layer)
        return found

    def stand_at(self, layers: Collection[str]) -> None:
        """Scale these layers at inputs or outputs from now on, not their weights."""
        for place in self.places:
            module = self.bnn.model.get_submodule(place.layer)
            if place.layer not in layers:
                continue
            if place.side == "inputs":
                module.register_forward_pre_hook(AtInputs(self.gate, place), with_kwargs=True)
            else:  # before the user's own hooks, so that they see the scaled output
                module.register_forward_hook(AtOutputs(self.gate, place), prepend=True)
        self.bnn.state["at_layers"] = set(layers)

    def own(self, place: Place) -> Params:
        """Return the parameters of the gates at a place."""
        names = self.bnn.state["gate_names"]
        return {name: tensor_at(self.bnn.model, place.parameter(name)) for name in names}

    def kl(self) -> Tensor:
        """Compute KL(q(z) ‖ p(z)) of the gates that have weights left."""
        gates = []
        for place in self.places:
            own, left = self.own(place), self._left(place)
            gates.append(own if left is None else self.gate.pick(own, left))
        if self.gate.per != "gate":
            kls = [self.gate.kl(own) * place.weights for own, place in zip(gates, self.places, strict=True)]
            if self.gate.per == "example":  # the loss divides by the number of examples
                weights = sum(place.weights * place.count for place in self.places)
                return torch.stack(kls).sum() * (self.bnn.data_size() / weights)
        elif self.gate.shared:
            kls = [self.gate.kl(own) for own in gates]
        else:  # concatenated, in one call for all places
            return self.gate.kl({name: torch.cat([own[name] for own in gates]) for name in gates[0]})
        return torch.stack(kls).sum()

    def weight_kl(self, name: str, mean: Tensor, log_std: Tensor | None, prior: Prior) -> Tensor | None:
        """Compute the KL of a parameter's remaining weights; None if gates have none."""
        found = [(place, part) for place in self.places for part in place.parts if part.parameter == name]
        if not found or type(self.gate).weight_kl is Gate.weight_kl:
            return None
        (place, part), *more = found
        groups = place.along(torch.arange(place.count, device=mean.device), part, mean.ndim)
        others = self._mean_squares(more, mean.ndim)
        std = None if log_std is None else log_std.exp()
        if name in self.bnn.masks:
            kept = self.bnn.masks[name].to(mean.device)
            groups, prior = groups.expand_as(mean)[kept], prior.at(kept)
            others = None if others is None else others.expand_as(mean)[kept]
            mean, std = mean[kept], None if std is None else std[kept]
        return self.gate.weight_kl(self.own(place), mean, std, groups, prior, others)

    def _mean_squares(self, gates: Sequence[tuple[Place, Part]], ndim: int) -> Tensor | None:
        """Compute E[z²] of the product of several gates of a parameter."""
        product = None
        for place, part in gates:
            own = self.own(place)
            square = place.along(self.gate.mean(own).square() + self.gate.variance(own), part, ndim)
            product = square if product is None else product * square
        return product

    def run(self, inputs: Inputs, params: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the outputs for one draw of the gates, with draws of some w̃ by name.

        The second result are the draws that a surrogate loss needs, by place.
        """
        weights, draws = dict(params), {}
        at_layers = self.bnn.state.get("at_layers", ())
        for place in self.places if self.gate.multiplies else ():
            if place.layer not in at_layers:
                draws[place.name] = self.gate.draw(self.own(place), ())
                self._multiply(weights, place, draws[place.name])
        with drawing(self.bnn.model, on=True) as recording:
            outputs = call(self.bnn.model, inputs, weights)
            draws |= {hook.place.name: hook.drawn[-1] for hook in recording if hook.drawn}
        return outputs, draws

    def log_likelihood(self, inputs: Inputs, targets: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean over examples, with gradients of the surrogate loss."""
        outputs, draws = self.run(inputs, params)
        each = self.bnn.likelihood.log_prob(outputs, targets)
        if not self.gate.has_surrogate:
            return each.mean()
        return each.mean() - self._surrogate(draws, -each.detach())

    def _surrogate(self, draws: Mapping[str, Tensor], losses: Tensor) -> Tensor:
        total = losses.new_zeros(())
        for place in self.places:
            z = draws.get(place.name)
            if z is None:  # its layer did not run
                continue
            if z.ndim == 2 and len(z) != len(losses):
                raise ShapeMismatch(
                    f'The gates at "{place.name}" were drawn {len(z)} times in a pass over {len(losses)} examples, so '
                    'losses and draws cannot be matched. Use estimator="shared".'
                )
            each, met = (z, losses) if z.ndim == 2 else (z[None], losses.mean(0, keepdim=True))
            term = self.gate.surrogate(self.own(place), each, met)
            total = total if term is None else total + term
        return total

    def mean_params(self, means: Mapping[str, Tensor]) -> Params:
        """Compute the weights of the mean network, zero behind closed gates.

        `means` are the means of w̃ that differ from the model's own parameters.
        """
        weights = dict(means)
        for place in self.places:
            fixed, left = self.gate.fixed(self.own(place)), self._left(place)
            self._multiply(weights, place, fixed if left is None else fixed * _mask(left, fixed))
        return weights

    def _multiply(self, weights: Params, place: Place, scales: Tensor) -> None:
        for part in place.parts:
            own = tensor_at(self.bnn.model, part.parameter)
            weight = weights.get(part.parameter, own)
            weights[part.parameter] = (weight * place.along(scales, part, own.ndim)).to(own.dtype)

    def scales(self) -> list[Scales]:
        """Copy the gates as data, which further training does not change."""
        found = []
        for place in self.places:
            own = {name: value.detach().clone() for name, value in self.own(place).items()}
            left = self._left(place)
            none = torch.zeros_like(next(iter(own.values())).expand(place.count), dtype=torch.bool)
            found.append(Scales(self.gate, place, own, none if left is None else ~_mask(left, none)))
        return found

    def _left(self, place: Place) -> Tensor | None:
        """Return the indices of the gates at a place that have weights left; None for all."""
        masks = self.bnn.masks
        if not any(part.parameter in masks for part in place.parts):
            return None
        known: dict[str, Tensor] = self.bnn.state.setdefault("gates_left", {})
        if place.name not in known:  # cached: `nonzero` synchronises with the device
            alive = []
            for part in place.parts:
                like = tensor_at(self.bnn.model, part.parameter)
                mask = masks.get(part.parameter, torch.ones_like(like, dtype=torch.bool)).to(like.device)
                alive.append(place.gathered(mask, part).any(1))
            known[place.name] = torch.stack(alive).any(0).nonzero()[:, 0]
        return known[place.name].to(tensor_at(self.bnn.model, place.parts[0].parameter).device)


def _mask(numbers: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).index_fill(0, numbers, 1)
