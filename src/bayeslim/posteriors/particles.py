"""Particles: S networks of equal weight, q(w) = (1/S) Σ_s δ(w − w_s).

The result of samplers, ensembles and Stein's method. There is no density, so that an ELBO or a Savage-Dickey ratio
cannot be computed. Every particle carries its own buffers: the statistics of a batch norm belong to the weights they
were gathered with.

Given zeros, every particle keeps its other weights where they were: S points do not show how weights vary together in a
small neighbourhood.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bayeslim.errors import BayeslimError, ShapeMismatch
from bayeslim.io.registry import register
from bayeslim.posteriors.base import Posterior, check_masks, keyed, unkeyed
from bayeslim.types import Params

MAX_VALUES_PER_CHUNK = 2**22
"""Statistics are computed over chunks of weights that hold at most this many values of all particles together."""


@register("posterior")
class Particles(Posterior):
    """Equally weighted networks.

    Args:
        values: the weights of all networks by parameter name, (S, *shape). They may be of a lower precision than the
            network's, or on another device: they are converted when they are used.
        buffers: other tensors that differ between the networks, by name, (S, *shape): buffers, and parameters that were
            trained as points. All others are the model's own.
        chains: how many Markov chains they come from, one after the other and equally long, in the order drawn.
        averaged: whether the one network that stands for them is their mean, with that of their buffers, whatever the
            method says (`bayeslim.align`).
    """

    kind: ClassVar[str] = "particles"

    def __init__(
        self,
        values: Mapping[str, Tensor],
        *,
        buffers: Mapping[str, Tensor] | None = None,
        chains: int = 1,
        averaged: bool = False,
    ):
        self.values = dict(values)
        self.buffers = dict(buffers or {})
        if not self.values:
            raise ShapeMismatch("Particles need the values of at least one parameter. Got none.")
        counts = {name: len(v) if v.ndim else 0 for name, v in (self.values | self.buffers).items()}
        self.count: int = next(iter(counts.values()))
        for name, count in counts.items():
            if count != self.count or count < 1:
                raise ShapeMismatch(
                    f'"{name}" needs a value for each of {max(self.count, 1)} particles, in front of its own shape. '
                    f"Got {count}."
                )
        if chains < 1 or self.count % chains:
            raise ShapeMismatch(f"{self.count} particles do not come from {chains} equally long chains.")
        self.chains = chains
        self.averaged = averaged

    @property
    def mean(self) -> Params:
        """(1/S) Σ_s w_s, which lies between the networks and may be far from all of them."""
        return {name: _averaged(value) for name, value in self.values.items()}

    @property
    def mean_buffers(self) -> Params:
        """The mean of the buffers; of whole numbers, such as counts of batches, the last."""
        return {n: _averaged(v) if v.is_floating_point() else v[-1] for n, v in self.buffers.items()}

    @property
    def variance(self) -> Params:
        """Σ_s (w_s − E w)² / (S − 1), by name; exactly zero where all particles agree."""
        return {name: spread_of(value).square().to(value.dtype) for name, value in self.values.items()}

    @property
    def std(self) -> Params:
        """Standard deviations across particles, by name."""
        return {name: spread_of(value).to(value.dtype) for name, value in self.values.items()}

    @property
    def mode(self) -> Params:
        """The particle nearest to the mean: unlike the mean, a trained network."""
        return self.particle(self.nearest_to_mean())

    def nearest_to_mean(self) -> int:
        """Find the particle nearest to the mean."""
        distances = torch.zeros(self.count, dtype=torch.float64)
        for value in self.values.values():
            for part in _chunks(value):
                distances += (part - part.mean(0)).square().sum(1, dtype=torch.float64).cpu()
        return int(distances.argmin())

    def particle(self, k: int) -> Params:
        """Take the weights of one particle."""
        return {name: value[k] for name, value in self.values.items()}

    def buffers_of(self, k: int) -> Params:
        """Copy the buffers of one particle; a forward pass may write to them."""
        return {name: value[k].clone() for name, value in self.buffers.items()}

    def network(self, k: int, model: nn.Module) -> Params:
        """Take weights and buffers of one particle, in the model's dtype and device."""
        own = tensors_of(model)
        return {name: tensor.to(own[name]) for name, tensor in (self.particle(k) | self.buffers_of(k)).items()}

    def spread(self, n: int) -> list[int]:
        """Choose `n` particles, evenly spread over all of them; all, if there are fewer."""
        if n >= self.count:
            return list(range(self.count))
        return [(2 * i + 1) * self.count // (2 * n) for i in range(n)]

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Params:
        """Draw particles with replacement."""
        device = "cpu" if generator is None else generator.device
        chosen = torch.randint(self.count, () if n is None else (n,), generator=generator, device=device)
        return {name: value[chosen.to(value.device)] for name, value in self.values.items()}

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        """Raise: particles have no density."""
        raise BayeslimError(
            f"{self.count} particles have no density, so that neither an evidence nor a score based on one can be "
            "computed. Use bl.Variational() or bl.Laplace() for these, or one of the scores across particles."
        )

    def condition(self, masks: Mapping[str, Tensor]) -> Particles:
        """Set weights to zero in every particle where a mask is False; the rest stays."""
        kept = check_masks(masks, self.particle(0) | self.buffers_of(0))
        cut = {name: value * kept[name] for name, value in (self.values | self.buffers).items() if name in masks}
        return Particles(
            {name: cut.get(name, value) for name, value in self.values.items()},
            buffers={name: cut.get(name, value) for name, value in self.buffers.items()},
            chains=self.chains,
            averaged=self.averaged,
        )

    def tensors(self) -> Params:
        """Collect `value:name` and `buffer:name`."""
        return keyed(value=self.values, buffer=self.buffers)

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Build it again from `config()` and `tensors()`."""
        return cls(unkeyed(tensors, "value"), buffers=unkeyed(tensors, "buffer"), **config)

    def config(self) -> dict[str, Any]:
        """Describe the number of chains, and whether their mean stands for them."""
        return {"chains": self.chains, "averaged": self.averaged}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return tuple(self.values)

    @property
    def num_parameters(self) -> int:
        """The number of random scalar parameters."""
        return sum(value[0].numel() for value in self.values.values())

    def __repr__(self) -> str:
        return f"{super().__repr__()}: {self.count} particles"


def tensors_of(model: nn.Module) -> Params:
    """Collect a model's parameters, then its buffers, by name, each one once."""
    modules = [(f"{path}." if path else "", vars(module)) for path, module in model.named_modules()]
    found: Params = {}
    seen = set()
    for kind in ("_parameters", "_buffers"):
        for prefix, own in modules:
            for leaf, tensor in own[kind].items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[prefix + leaf] = tensor
    return found


def stacked(networks: list[Params]) -> Params:
    """Stack the tensors of S networks by name, (S, *shape)."""
    return {name: torch.stack([network[name] for network in networks]) for name in networks[0]}


def spread_of(values: Tensor) -> Tensor:
    """Compute the standard deviation of values (S, ...); exactly zero if all agree."""
    if len(values) == 1:
        return torch.zeros_like(values[0], dtype=_precise(values))
    found = [part.std(0).masked_fill((part == part[:1]).all(0), 0.0) for part in _chunks(values)]
    return torch.cat(found).view(values.shape[1:])


def _averaged(value: Tensor) -> Tensor:
    return torch.cat([part.mean(0) for part in _chunks(value)]).view(value.shape[1:]).to(value.dtype)


def _chunks(value: Tensor) -> Iterator[Tensor]:
    """Yield all particles a chunk of weights at a time, (S, n), at least in float32."""
    flat = value.reshape(len(value), -1)
    return (part.to(_precise(value)) for part in flat.split(max(1, MAX_VALUES_PER_CHUNK // len(value)), 1))


def _precise(value: Tensor) -> torch.dtype:
    """Choose the dtype of sums: at least float32."""
    return torch.promote_types(value.dtype, torch.float32)
