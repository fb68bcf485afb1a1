"""Weights times scales that they share in groups: w = z ∘ w̃.

w̃ has a posterior of its own, and so has each gate z; all are independent. A weight under several gates (a column's and
a row's) is scaled by all of them. With m and v for means and variances,

    E[w] = m_w m_z,      Var[w] = v_w (m_z² + v_z) + m_w² v_z.

Weights that share a gate go up and down together, so they are *not* independent: means and variances here are those of
each weight alone, and only draws show how weights depend on each other. A closed gate is zero, and so is all it scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bayeslim.errors import BayeslimError
from bayeslim.gates import Gate
from bayeslim.gates.placement import Part, Place
from bayeslim.io.registry import register, registered
from bayeslim.noise import drawing_from
from bayeslim.posteriors.base import Posterior, check_masks, unkeyed
from bayeslim.posteriors.diagonal import Diagonal
from bayeslim.types import Params


@dataclass(frozen=True, eq=False)
class Scales:
    """The gates of one side of a layer.

    Attributes:
        gate: what they are.
        place: where they stand.
        own: their parameters, by short name.
        cut: which of them have no weights left, (count,).
        closes: whether gates that are mostly noise count as zero.
    """

    gate: Gate
    place: Place
    own: Params
    cut: Tensor
    closes: bool = True

    @cached_property
    def fixed(self) -> Tensor:
        """The scales of the mean network, (count,): zero where closed."""
        scale = self.gate.fixed(self.own)
        if not self.closes:
            scale = self.gate.mean(self.own) if self.gate.multiplies else torch.ones_like(scale)
        return scale.masked_fill(self.cut, 0.0)

    @cached_property
    def expected(self) -> Tensor:
        """E[z] of the scales, (count,); `fixed` for gates that use it in the mean network."""
        return self.gate.mean(self.own).masked_fill(self.closed, 0.0) if self.gate.multiplies else self.fixed

    @cached_property
    def closed(self) -> Tensor:
        """The mask of gates that are zero, (count,)."""
        return ~self.gate.opened(self.own) | self.cut if self.closes else self.cut

    @cached_property
    def variance(self) -> Tensor:
        """The variance of the scales, (count,)."""
        if not self.gate.multiplies:
            return torch.zeros_like(self.fixed)
        return self.gate.variance(self.own).masked_fill(self.closed, 0.0)

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        """Draw the scales, (*shape, count)."""
        if not self.gate.multiplies:
            return self.fixed.expand(*shape, -1)
        return self.gate.draw(self.own, shape).masked_fill(self.closed, 0.0)


@register("posterior")
class Gated(Posterior):
    """A posterior over scaled weights.

    Args:
        base: over the weights before they are scaled, w̃, with all parameters that gates scale, points included.
        scales: the gates.
    """

    kind: ClassVar[str] = "gated"

    def __init__(self, base: Posterior, scales: Sequence[Scales]):
        self.base = base
        self.scales = tuple(scales)

    @cached_property
    def mean(self) -> Params:
        """E[w], zero behind closed gates; hard-concrete gates use the E[z] of their paper."""
        return self._moments[0]

    @cached_property
    def variance(self) -> Params:
        """Var[w] of each weight alone, likewise."""
        return self._moments[1]

    @cached_property
    def _moments(self) -> tuple[Params, Params]:
        means, centres, variances = dict(self.base.mean), dict(self.base.mean), dict(self.base.variance)
        for scales in self.scales:
            for part in scales.place.parts:
                name, ndim = part.parameter, means[part.parameter].ndim
                each = (scales.fixed, scales.expected, scales.variance)
                fixed, m, v = (scales.place.along(t, part, ndim) for t in each)
                means[name] = (means[name] * fixed).to(means[name].dtype)
                variances[name] = variances[name] * (m.square() + v) + centres[name].square() * v
                centres[name] = centres[name] * m
        return means, variances

    def marginals(self) -> Diagonal:
        """Make independent weights with the same means and variances."""
        return Diagonal(self.mean, self.std)

    def opened(self) -> Gated:
        """Open the gates that count as closed, as in training."""
        return Gated(self.base, [replace(one, closes=False) for one in self.scales])

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Params:
        """Draw w̃, then z, and multiply."""
        weights = self.base.sample(n, generator=generator)
        with torch.no_grad(), drawing_from(generator):
            for scales in self.scales:
                z = scales.draw(() if n is None else (n,))
                for part in scales.place.parts:
                    weight = weights[part.parameter]
                    own = self.base.mean[part.parameter].ndim
                    weights[part.parameter] = (weight * scales.place.along(z, part, own)).to(weight.dtype)
        return weights

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        """Raise: the density has no closed form."""
        raise BayeslimError(
            "The density of weights that share random scales is an integral over all scales, which has no closed form. "
            "Take draws (posterior.sample), or the density of the weights before they are scaled: "
            "posterior.base.log_prob."
        )

    def condition(self, masks: Mapping[str, Tensor]) -> Gated:
        """Set weights to zero where a mask is False, and close gates without weights."""
        kept = check_masks(masks, self.base.mean)
        scales = [replace(one, cut=one.cut | ~_left(one.place, kept)) for one in self.scales]
        return Gated(self.base.condition(masks), scales)

    def silenced(self, masks: Mapping[str, Tensor]) -> Params:
        """Mask the shifts and norms behind closed gates all of whose weights go.

        A plan ranks weights. A closed gate also scales a convolution's bias, or a norm's scale and shift. These go with
        the weights, so that training cannot bring them back.
        """
        kept = check_masks({n: m for n, m in masks.items() if n in self.base.mean}, self.base.mean)
        found: Params = {}
        for scales in self.scales:
            place = scales.place
            ranked = [part for part in place.parts if kept[part.parameter].ndim > 1]
            silent = scales.closed.clone()
            for part in ranked:
                silent &= ~place.gathered(kept[part.parameter], part).any(1)
            for part in place.parts:
                if part in ranked or not bool(silent.any()):
                    continue
                mask = kept[part.parameter] & ~place.along(silent, part, kept[part.parameter].ndim)
                found[part.parameter] = found.get(part.parameter, mask) & mask
        return found

    def config(self) -> dict[str, Any]:
        """Describe the base's kind and configuration, the gates and their places."""
        scales = [
            {"gate": one.gate, "place": asdict(one.place), "own": list(one.own), "closes": one.closes}
            for one in self.scales
        ]
        return {"base": self.base.kind, "base_config": self.base.config(), "scales": scales}

    def tensors(self) -> Params:
        """Collect the tensors of the base and of every gate."""
        tensors = {f"base/{name}": t for name, t in self.base.tensors().items()}
        for scales in self.scales:
            tensors[f"cut:{scales.place.name}"] = scales.cut
            tensors |= {f"own:{scales.place.parameter(name)}": t for name, t in scales.own.items()}
        return tensors

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Build it again from `config()` and `tensors()`."""
        base_class = registered("posterior", config["base"])
        scales = []
        for entry in config["scales"]:
            parts = tuple(Part(**part) for part in entry["place"]["parts"])
            place = Place(**(entry["place"] | {"parts": parts}))
            own = {name: tensors[f"own:{place.parameter(name)}"] for name in entry["own"]}
            scales.append(Scales(entry["gate"], place, own, tensors[f"cut:{place.name}"], entry["closes"]))
        return cls(base_class.restore(config["base_config"], unkeyed(tensors, "base", "/")), scales)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return self.base.names

    def __repr__(self) -> str:
        count, closed = (sum(int(n) for n in each) for each in zip(*self._counts(), strict=True))
        return f"{super().__repr__()}: {count - closed:,} of {count:,} gates open"

    def _counts(self) -> list[tuple[int, int]]:
        return [(one.place.count, int(one.closed.sum())) for one in self.scales]


def _left(place: Place, kept: Params) -> Tensor:
    """Mask the gates that have a weight left to scale, (count,)."""
    each = [place.gathered(kept[part.parameter], part).any(1) for part in place.parts]
    return torch.stack(each).any(0)
