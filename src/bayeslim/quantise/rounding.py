"""Entropy-constrained rounding: expected loss against code length.

    code = argmin_q  ½ p (w − level_q)² + λ (−log P(q))

in nats: the loss of log-posterior (p is the weight's precision) plus λ times the code length. With λ = 1 the sum is the
length of the whole message, data and weights, as in minimum description length; λ = 0 rounds to the nearest level. P
are the frequencies of the codes themselves, weights cut before included, so rounding and counting alternate
(entropy-constrained quantisation: Chou, Lookabaugh & Gray 1989).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INWARD_CODES = 7
"""The codes from the nearest towards zero that are tried, beside zero and the next one outwards."""
CHUNK_WEIGHTS = 2**18
"""The weights that are compared with their levels at once."""


def code_lengths(codes: Tensor, lowest: int, highest: int) -> Tensor:
    """Compute −log P of every code from `lowest` to `highest`, in nats, by frequency.

    Each count starts at one half, as in adaptive coders (Krichevsky & Trofimov 1981).
    """
    counts = torch.bincount(codes.flatten().long() - lowest, minlength=highest - lowest + 1).double() + 0.5
    return -(counts / counts.sum()).log()


@dataclass(frozen=True, eq=False)
class UniformRounder:
    """A rounder to uniform levels.

    Attributes:
        scale: the step; broadcasts to the weights.
        limit: the largest code, likewise.
        lengths: λ times the code lengths of −L, …, L in nats; None rounds to the nearest level.
        has_zero: whether zero is a level, likewise; with one bit it is not.
    """

    scale: Tensor
    limit: Tensor
    lengths: Tensor | None
    has_zero: Tensor

    def flat(self, shape: torch.Size) -> UniformRounder:
        """Expand to a parameter's flattened weights."""
        scale, limit, has_zero = (
            t.expand(shape).reshape(-1) if t.numel() > 1 else t for t in (self.scale, self.limit, self.has_zero)
        )
        return UniformRounder(scale, limit, self.lengths, has_zero)

    def at(self, places: Tensor | slice) -> UniformRounder:
        """Select some of the flattened weights."""
        if self.scale.numel() == 1:
            return self
        return UniformRounder(self.scale[places], self.limit[places], self.lengths, self.has_zero[places])

    def levels(self, codes: Tensor) -> Tensor:
        """Return the levels of codes."""
        return codes * self.scale

    def __call__(self, weights: Tensor, precision: Tensor) -> Tensor:
        """Round weights (m,) with precisions (m,) to integer codes."""
        if self.lengths is None:
            return self._nearest(weights).long()
        parts = [slice(start, start + CHUNK_WEIGHTS) for start in range(0, max(1, len(weights)), CHUNK_WEIGHTS)]
        return torch.cat([self.at(part)._cheapest(weights[part], precision[part]) for part in parts])

    def _nearest(self, weights: Tensor) -> Tensor:
        nearest = (weights / self.scale).round().clamp(-self.limit, self.limit)
        return torch.where(self.has_zero | (nearest != 0), nearest, _side(weights))

    def _cheapest(self, weights: Tensor, precision: Tensor) -> Tensor:
        assert self.lengths is not None
        middle, nearest, side = len(self.lengths) // 2, self._nearest(weights), _side(weights)
        # Frequencies fall away from zero, so shorter codes mostly lie inwards.
        inwards = torch.arange(-1, min(INWARD_CODES, middle) + 1, device=weights.device)[:, None]
        others = torch.cat([nearest - side * inwards, torch.zeros_like(nearest)[None]])
        allowed = (others * side >= 0) & (others.abs() <= self.limit) & (self.has_zero | (others != 0))
        codes = torch.where(allowed, others, nearest).long()
        price = 0.5 * precision * (weights - codes * self.scale).square() + self.lengths[codes + middle]
        return codes.gather(0, price.argmin(0)[None])[0]


def _side(weights: Tensor) -> Tensor:
    return torch.where(weights < 0, -1.0, 1.0).to(weights)


@dataclass(frozen=True, eq=False)
class CodebookRounder:
    """A rounder to the levels of a codebook.

    Attributes:
        values: the levels, (K,).
        lengths: λ times their code lengths in nats, (K,); None rounds to the nearest level.
    """

    values: Tensor
    lengths: Tensor | None

    def flat(self, shape: torch.Size) -> CodebookRounder:
        """Return itself: all weights share the codebook."""
        return self

    def at(self, places: Tensor | slice) -> CodebookRounder:
        """Return itself: all weights share the codebook."""
        return self

    def levels(self, codes: Tensor) -> Tensor:
        """Return the levels of codes."""
        return self.values[codes]

    def __call__(self, weights: Tensor, precision: Tensor) -> Tensor:
        """Round weights to integer codes."""
        values = self.values.to(weights)
        flat, sharp = weights.reshape(-1), precision.expand_as(weights).reshape(-1)
        found = []
        for w, p in zip(*(t.split(max(1, 16 * CHUNK_WEIGHTS // len(values))) for t in (flat, sharp)), strict=True):
            price = 0.5 * (w[:, None] - values).square()
            if self.lengths is not None:
                price = p[:, None] * price + self.lengths.to(weights)
            found.append(price.argmin(1))
        return torch.cat(found).reshape(weights.shape) if found else flat.long().reshape(weights.shape)


Rounder = UniformRounder | CodebookRounder
