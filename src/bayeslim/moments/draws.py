"""Draws of Gaussian outputs, and the prediction from them.

One set of standard normals serves all inputs, as one drawn network would, so that drawing costs one matrix product. It
is a scrambled Sobol sequence (Owen 1998): every draw is a draw of the Gaussian, but together they cover it evenly.
Draws of different inputs have no joint meaning: each input's outputs are right on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from bayeslim.gaussian_outputs import concatenate
from bayeslim.likelihoods import Categorical, Likelihood
from bayeslim.moments.tensor import Moments
from bayeslim.noise import standard_normal
from bayeslim.results import Prediction

CHUNK = 1 << 18
"""Numbers handled at a time: what fits into a processor's cache."""


@dataclass(frozen=True)
class Outputs:
    """Gaussian outputs of many inputs, f = m + s ε + F ε'.

    Attributes:
        mean: m, (B, ...).
        std: s, of the same shape: each output's own spread.
        root: F, (B, O, R) over flattened outputs: what they share; None for nothing.
        last: a function still to be applied to draws, (S, B, ...), or None.
    """

    mean: Tensor
    std: Tensor
    root: Tensor | None
    last: Callable[[Tensor], Tensor] | None

    @classmethod
    def of(cls, moments: Moments) -> Outputs:
        """The outputs of a network."""
        common, variance = moments.common, moments.sigma2
        if common is None or moments.mu.ndim != 2:
            root = None
        else:
            root, variance = common.root(), variance - common.variance()
        last = None if moments.activation is None else moments.activation.apply
        return cls(moments.mu, variance.clamp(min=0).sqrt(), root, last)

    @classmethod
    def joined(cls, parts: Sequence[Outputs]) -> Outputs:
        """One from those of several batches."""
        roots = [part.root for part in parts if part.root is not None]
        return cls(
            torch.cat([part.mean for part in parts]),
            torch.cat([part.std for part in parts]),
            torch.cat(roots) if roots else None,
            parts[0].last,
        )

    def draw(self, rows: slice, noise: Tensor, out: Tensor) -> None:
        """Write draws of some inputs' outputs into `out`, (b, O, S); `noise` is (R + O, S)."""
        std = self.std[rows].flatten(1)
        own = noise[-std.shape[1] :]
        torch.mul(std.unsqueeze(-1), own, out=out)
        out += self.mean[rows].flatten(1).unsqueeze(-1)
        if self.root is not None:
            root = self.root[rows]
            out.flatten(0, 1).addmm_(root.flatten(0, 1), noise[: root.shape[-1]])


def summarise(likelihood: Likelihood, outputs: Outputs, samples: int) -> Prediction:
    """The prediction from Gaussian outputs, with draws of them, (S, B, ...)."""
    count, *shape = outputs.mean.shape
    size = outputs.mean[0].numel()
    shared = 0 if outputs.root is None else outputs.root.shape[-1]
    noise = normal_points(shared + size, samples).to(outputs.mean)
    # The draws of an output lie side by side: long vectors, however few outputs there are.
    draws = outputs.mean.new_empty(count, size, samples)
    step = max(1, CHUNK // (size * samples))
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


def normal_points(dimensions: int, count: int) -> Tensor:
    """Standard normals that cover space evenly, (dimensions, count), from torch's own seed."""
    if dimensions > SobolEngine.MAXDIM:
        return standard_normal((dimensions, count))
    seed = int(torch.randint(2**31, ()))
    uniform = SobolEngine(dimensions, scramble=True, seed=seed).draw(count, dtype=torch.float64)
    points: Tensor = torch.special.ndtri(uniform + 0.5 / 2**SobolEngine.MAXBIT)  # never exactly 0
    return points.T.contiguous()


@singledispatch
def of_draws(likelihood: Likelihood, draws: Tensor) -> Prediction:
    """The prediction from draws of the outputs, (B, ..., S)."""
    return likelihood.predict(draws.movedim(-1, 0))


@of_draws.register
def _(likelihood: Categorical, draws: Tensor) -> Prediction:
    """As `Categorical.predict`, with every pass over long vectors, and entropies without another logarithm."""
    if draws.ndim != 3:
        return likelihood.predict(draws.movedim(-1, 0))
    below = draws - draws.amax(1, keepdim=True)
    probs = below.exp()
    total = probs.sum(1, keepdim=True)
    probs *= total.reciprocal()
    mean = probs.mean(-1)
    aleatoric = total.log_().mean((1, 2)) - below.mul_(probs).sum((1, 2)) / draws.shape[-1]
    variance = probs.sub_(mean.unsqueeze(-1)).square_().mean(-1)
    entropy = torch.special.entr(mean).sum(-1)
    return Prediction(
        kind="classes",
        mean=mean,
        variance=variance,
        samples=draws.movedim(-1, 0),
        probs=mean,
        entropy=entropy,
        aleatoric=aleatoric,
        epistemic=(entropy - aleatoric).clamp_min(0),
    )
