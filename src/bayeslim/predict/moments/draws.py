"""Draws of Gaussian outputs, and the prediction from them.

One set of standard normals serves all inputs, as one drawn network would, so that drawing costs one matrix product. It
is a scrambled Sobol sequence (Owen 1998): every draw is a draw of the Gaussian, but together they cover it evenly.
The draws of one input are joint draws of its outputs; those of different inputs are not joint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from torch import Tensor

from bayeslim.likelihoods import Categorical, Likelihood
from bayeslim.predict.links import concatenate, normal_points, root_of
from bayeslim.predict.moments.shared_noise import MAX_EXACT_UNITS
from bayeslim.predict.moments.tensor import Moments
from bayeslim.results import Prediction

NUMBERS_PER_CHUNK = 1 << 19
"""Numbers of draws handled at a time, which fit into a processor's cache."""


@dataclass(frozen=True)
class Outputs:
    """Gaussian outputs of many inputs, f = m + F ε + s ε'.

    Attributes:
        mean: m, (B, ...).
        root: F, (B, O, R) over flattened outputs: a root of their shared covariance, or None.
        std: s, (B, O): each output's own standard deviation, or None where the root has all of it.
        last: a function still to be applied to draws, (S, B, ...), or None.
    """

    mean: Tensor
    root: Tensor | None
    std: Tensor | None
    last: Callable[[Tensor], Tensor] | None

    @classmethod
    def of(cls, moments: Moments) -> Outputs:
        """Make the outputs of a network from their moments."""
        common, variance = moments.common, moments.sigma2.flatten(1)
        last = None if moments.activation is None else moments.activation.apply
        if common is None or moments.mu.ndim != 2:
            return cls(moments.mu, None, variance.sqrt(), last)
        own = (variance - common.variance()).clamp_(min=0)
        if variance.shape[1] <= MAX_EXACT_UNITS:
            whole = common.covariance() + torch.diag_embed(own)
            return cls(moments.mu, root_of(whole, torch.finfo(whole.dtype).tiny), None, last)
        return cls(moments.mu, common.root(), own.sqrt(), last)

    @classmethod
    def joined(cls, parts: Sequence[Outputs]) -> Outputs:
        """Join the outputs of several batches."""
        roots = [part.root for part in parts if part.root is not None]
        stds = [part.std for part in parts if part.std is not None]
        return cls(
            torch.cat([part.mean for part in parts]),
            torch.cat(roots) if roots else None,
            torch.cat(stds) if stds else None,
            parts[0].last,
        )

    @property
    def noises(self) -> int:
        """The dimensions of the noise of a draw: columns of the root, then outputs."""
        return sum(part.shape[-1] for part in (self.root, self.std) if part is not None)

    def draw(self, rows: slice, noise: Tensor, out: Tensor) -> None:
        """Write draws of some outputs into `out`, (b, O, S), from `noise`, (noises, S)."""
        mean = self.mean[rows].flatten(1).unsqueeze(-1)
        if self.root is None:
            out.copy_(mean.expand(out.shape))
        else:
            root = self.root[rows].flatten(0, 1)
            torch.addmm(mean.flatten(0, 1), root, noise[: root.shape[1]], out=out.flatten(0, 1))
        if self.std is not None:
            out.addcmul_(self.std[rows].unsqueeze(-1), noise[-out.shape[1] :])


def summarise(
    likelihood: Likelihood, outputs: Outputs, samples: int, generator: torch.Generator | None = None
) -> Prediction:
    """Turn Gaussian outputs into a prediction, with draws of them, (S, B, ...)."""
    count, *shape = outputs.mean.shape
    size = outputs.mean[0].numel()
    noise = normal_points(outputs.noises, samples, generator).to(outputs.mean)
    # The draws of an output lie side by side in memory: long vectors even where outputs are few.
    draws = outputs.mean.new_empty(count, size, samples)
    step = max(1, NUMBERS_PER_CHUNK // (size * samples))
    parts = []
    for start in range(0, count, step):
        rows = slice(start, start + step)
        outputs.draw(rows, noise, draws[rows])
        if outputs.last is not None:
            done = outputs.last(draws[rows].unflatten(1, shape).movedim(-1, 0))
            draws[rows] = done.movedim(0, -1).flatten(1, -2)
        part = of_draws(likelihood, draws[rows].unflatten(1, shape))
        parts.append(replace(part, samples=part.samples[:0]))  # they are in place already
    return replace(concatenate(parts), samples=draws.unflatten(1, shape).movedim(-1, 0))


@singledispatch
def of_draws(likelihood: Likelihood, draws: Tensor) -> Prediction:
    """Turn draws of the outputs, (B, ..., S), into a prediction."""
    return likelihood.predict(draws.movedim(-1, 0))


@of_draws.register
def _(likelihood: Categorical, draws: Tensor) -> Prediction:
    """Predict classes as `Categorical.predict`, for draws that are last in memory.

    The entropy of one draw needs no logarithm of every probability: −Σ p log p = log Σ eᵍ − Σ p g, with g = f − max f.
    """
    if draws.ndim != 3:
        return likelihood.predict(draws.movedim(-1, 0))
    below = (draws - draws.amax(1, keepdim=True)).mul_(1 / math.log(2))
    probs = below.exp2()
    total = probs.sum(1, keepdim=True)
    probs *= total.reciprocal()
    mean = probs.mean(-1)
    bits = total.log2_().mean((1, 2)) - below.mul_(probs).sum((1, 2)) / draws.shape[-1]
    aleatoric = bits * math.log(2)
    spread = probs.sub_(mean.unsqueeze(-1)).square_().mean(-1)
    entropy = torch.special.entr(mean).sum(-1)
    epistemic = (entropy - aleatoric).clamp_min(0)
    return Prediction("classes", mean, draws.movedim(-1, 0), aleatoric, epistemic, probs=mean, spread=spread)
