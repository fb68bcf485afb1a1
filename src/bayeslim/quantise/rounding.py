"""Rounding within the noise: of the levels that a weight's uncertainty cannot tell apart, the cheapest to write down.

    code = argmin_q  ½ p (w − level_q)² + λ (−log P(q))

in nats: what moving the weight costs in log-posterior (p is its precision), against what the code costs in the file.
With λ = 1 the sum is the length of the whole message, data and weights, as in minimum description length; λ = 0 rounds
to the nearest level. P are the frequencies of the codes themselves, zeros that were cut before included, so rounding
and counting alternate (entropy-constrained quantisation: Chou, Lookabaugh & Gray 1989).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INWARDS = 7
"""How many codes towards zero of the nearest are tried, beside zero itself and one outwards."""
CHUNK = 2**18
"""How many weights are compared with their levels at once."""


def code_lengths(codes: Tensor, lowest: int, highest: int) -> Tensor:
    """−log P of every code from `lowest` to `highest`, in nats, from how often they occur.

    Half an occurrence is added to each, as adaptive coders start with (Krichevsky & Trofimov 1981).
    """
    counts = torch.bincount(codes.flatten().long() - lowest, minlength=highest - lowest + 1).double() + 0.5
    return -(counts / counts.sum()).log()


@dataclass(frozen=True, eq=False)
class UniformRounder:
    """Rounds to evenly spaced levels.

    Attributes:
        scale: the step; broadcasts to the weights.
        limit: the largest code, likewise.
        lengths: λ times the lengths of the codes −L, …, L in nats; None rounds to the nearest.
        has_zero: whether zero is a level, likewise; of one bit it is not.
    """

    scale: Tensor
    limit: Tensor
    lengths: Tensor | None
    has_zero: Tensor

    def flat(self, shape: torch.Size) -> UniformRounder:
        """The rounder of a parameter's weights in one dimension."""
        scale, limit, has_zero = (
            t.expand(shape).reshape(-1) if t.numel() > 1 else t for t in (self.scale, self.limit, self.has_zero)
        )
        return UniformRounder(scale, limit, self.lengths, has_zero)

    def at(self, places: Tensor | slice) -> UniformRounder:
        """The rounder of some weights of one dimension."""
        if self.scale.numel() == 1:
            return self
        return UniformRounder(self.scale[places], self.limit[places], self.lengths, self.has_zero[places])

    def levels(self, codes: Tensor) -> Tensor:
        """The levels of codes."""
        return codes * self.scale

    def __call__(self, weights: Tensor, precision: Tensor) -> Tensor:
        """The codes of weights (m,) with precisions (m,), as integers."""
        if self.lengths is None:
            return self._nearest(weights).long()
        parts = [slice(start, start + CHUNK) for start in range(0, max(1, len(weights)), CHUNK)]
        return torch.cat([self.at(part)._cheapest(weights[part], precision[part]) for part in parts])

    def _nearest(self, weights: Tensor) -> Tensor:
        nearest = (weights / self.scale).round().clamp(-self.limit, self.limit)
        return torch.where(self.has_zero | (nearest != 0), nearest, _side(weights))

    def _cheapest(self, weights: Tensor, precision: Tensor) -> Tensor:
        assert self.lengths is not None
        middle, nearest, side = len(self.lengths) // 2, self._nearest(weights), _side(weights)
        # What is cheaper to write mostly lies inwards, as frequencies fall away from zero.
        inwards = torch.arange(-1, min(INWARDS, middle) + 1, device=weights.device)[:, None]
        others = torch.cat([nearest - side * inwards, torch.zeros_like(nearest)[None]])
        allowed = (others * side >= 0) & (others.abs() <= self.limit) & (self.has_zero | (others != 0))
        codes = torch.where(allowed, others, nearest).long()
        price = 0.5 * precision * (weights - codes * self.scale).square() + self.lengths[codes + middle]
        return codes.gather(0, price.argmin(0)[None])[0]


def _side(weights: Tensor) -> Tensor:
    return torch.where(weights < 0, -1.0, 1.0).to(weights)


@dataclass(frozen=True, eq=False)
class CodebookRounder:
    """Rounds to the levels of a codebook.

    Attributes:
        values: the levels, (K,).
        lengths: λ times the lengths of their codes in nats, (K,); None rounds to the nearest.
    """

    values: Tensor
    lengths: Tensor | None

    def flat(self, shape: torch.Size) -> CodebookRounder:
        """Itself: all weights have the same."""
        return self

    def at(self, places: Tensor | slice) -> CodebookRounder:
        """Likewise."""
        return self

    def levels(self, codes: Tensor) -> Tensor:
        """The levels of codes."""
        return self.values[codes]

    def __call__(self, weights: Tensor, precision: Tensor) -> Tensor:
        """The codes, as integers."""
        values = self.values.to(weights)
        flat, sharp = weights.reshape(-1), precision.expand_as(weights).reshape(-1)
        found = []
        for w, p in zip(*(t.split(max(1, 16 * CHUNK // len(values))) for t in (flat, sharp)), strict=True):
            price = 0.5 * (w[:, None] - values).square()
            if self.lengths is not None:
                price = p[:, None] * price + self.lengths.to(weights)
            found.append(price.argmin(1))
        return torch.cat(found).reshape(weights.shape) if found else flat.long().reshape(weights.shape)


Rounder = UniformRounder | CodebookRounder
