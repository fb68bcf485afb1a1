"""Subnetwork inference: a full covariance over the few weights that matter most, the others at their MAP values.

Under independence the squared 2-Wasserstein distance between the posterior of all weights and that of a subnetwork is
the sum of the variances left out, Σ_{d ∉ S} σ_d²: it is least for the S weights with the largest marginal variances

    σ_d² = 1 / (h_d + δ_d)          h = diag GGN.

Weights that move no output on the training data (inputs that are always zero, dead units) have h = 0 and the prior's
variance, the largest of all, but no effect on predictions for inputs like the data. They are chosen last. The prior
precision of a subnetwork of S of D weights is δ S/D, which keeps the magnitude of the predictive variance.

Daxberger et al. 2021, arXiv:2010.14689
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bayeslim.errors import BayeslimWarning
from bayeslim.types import Params

MAX_INERT_CURVATURE = 1e-6
"""A weight whose curvature is below this part of its prior precision has the prior's variance, to rounding."""


class Subnetwork(NamedTuple):
    """Which weights have a full covariance.

    Attributes:
        size: how many, S.
        by: "variance", the largest marginal variances; "snr", the smallest |μ|/σ; "random".
        seed: of the random choice.
    """

    size: int = 1000
    by: Literal["variance", "snr", "random"] = "variance"
    seed: int = 0

    def check(self) -> None:
        """Refuse settings that mean nothing."""
        if self.by not in ("variance", "snr", "random"):
            raise ValueError(f'Subnetwork(by=...) must be "variance", "snr" or "random". Got {self.by!r}.')
        if type(self.size) is not int or self.size < 1:
            raise ValueError(f"Subnetwork(size=...) must be a whole number, at least 1. Got {self.size!r}.")

    def choose(
        self, mean: Mapping[str, Tensor], curvature: Mapping[str, Tensor], prior: Mapping[str, Tensor], masks: Params
    ) -> Params:
        """Choose weights: ascending flat indices by name, of parameters that have any.

        The diagonal h of the curvature is not read for a random choice. The prior holds δ of the weights' shapes; masks
        say which weights may be chosen (True), and parameters without one are free.
        """
        free = _flat({name: masks.get(name, torch.ones_like(w, dtype=torch.bool)) for name, w in mean.items()}).bool()
        count = int(free.sum())
        if self.size > count:
            raise ValueError(
                f"A subnetwork of {self.size} weights was asked for, and there are {count} to choose from. "
                f"Use Subnetwork(size={count}) or fewer."
            )
        order = self._order(_flat(mean).double(), curvature, prior, free)
        chosen = order[free[order]][: self.size].sort().values
        indices, start = {}, 0
        for name, w in mean.items():
            inside = chosen[(chosen >= start) & (chosen < start + w.numel())] - start
            if len(inside):
                indices[name] = inside
            start += w.numel()
        return indices

    def _order(
        self, mean: Tensor, curvature: Mapping[str, Tensor], prior: Mapping[str, Tensor], free: Tensor
    ) -> Tensor:
        """Order all weights, the first choice first."""
        if self.by == "random":
            return torch.randperm(len(mean), generator=torch.Generator().manual_seed(self.seed))
        h, delta = _flat(curvature).double(), _flat(prior).double()
        inert = h <= MAX_INERT_CURVATURE * delta
        self._warn(int((inert & free).sum()), int(free.sum()))
        variance = 1 / (h + delta)
        score = variance if self.by == "variance" else -mean.square() / variance
        # stable sorts, the last one decides: usefulness among equals, then the score, then the inert last
        order = (mean.square() * h).argsort(descending=True, stable=True)
        order = order[h[order].where(inert[order], score[order]).argsort(descending=True, stable=True)]
        return order[inert[order].long().argsort(stable=True)]

    def _warn(self, inert: int, free: int) -> None:
        if not inert:
            return
        needed = self.size - (free - inert)
        rest = f"; {needed} of them had to be taken" if needed > 0 else ""
        warnings.warn(
            f"{inert:,} of {free:,} weights move no output on the training data and keep their prior's variance. "
            f"They are passed over in choosing the subnetwork{rest}.",
            BayeslimWarning,
            stacklevel=2,
        )


def settled(subset: Any) -> str | tuple[str, ...] | Subnetwork:
    """Turn lists, as settings read from a file have them, into a subset's own types."""
    if isinstance(subset, Subnetwork) or (isinstance(subset, list) and subset and isinstance(subset[0], int)):
        chosen = Subnetwork(*subset)
        chosen.check()
        return chosen
    if isinstance(subset, (list, tuple)) and subset and all(isinstance(name, str) for name in subset):
        return tuple(subset)
    if isinstance(subset, str):
        return subset
    raise TypeError(f'subset must be "all", "last-layer", names, or a bl.Subnetwork. Got {subset!r}.')


def _flat(params: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten().cpu() for value in params.values()])
