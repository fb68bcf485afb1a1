"""A summary of the diagnostics of a set of chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.diagnostics import traces
from bayeslim.diagnostics.estimators import autocorrelation, e_bfmi, ess, r_hat
from bayeslim.posteriors import Particles
from bayeslim.types import Inputs

MAX_WEIGHTS_PER_PARAMETER = 10_000
"""The weights of one parameter that are examined, evenly spread over it."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Diagnostics of many scalars; NaN for a scalar that never changes.

    Attributes:
        ess_bulk: effective sample size for means and medians, (K,).
        ess_tail: effective sample size for the 5 % and 95 % quantiles, (K,).
        r_hat: rank-normalised split R-hat, (K,).
        lag_one: the correlation of neighbouring draws, (K,).
    """

    ess_bulk: Tensor
    ess_tail: Tensor
    r_hat: Tensor
    lag_one: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Scores:
        """Compute them from traces, (chains, draws, ...)."""
        flat = values.flatten(2) if values.ndim > 2 else values.unsqueeze(-1)
        return cls(ess(flat), ess(flat, "tail"), r_hat(flat), autocorrelation(flat))

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Join the diagnostics of several sets of scalars."""
        fields = ("ess_bulk", "ess_tail", "r_hat", "lag_one")
        return cls(*(torch.cat([getattr(part, field) for part in parts]) for field in fields))

    @property
    def worst(self) -> dict[str, float]:
        """The smallest sample sizes, the largest R-hat and correlation."""
        return {
            "ess_bulk": _extreme(self.ess_bulk, largest=False),
            "ess_tail": _extreme(self.ess_tail, largest=False),
            "r_hat": _extreme(self.r_hat, largest=True),
            "lag_one": _extreme(self.lag_one, largest=True),
        }

    @property
    def median(self) -> dict[str, float]:
        """The medians over the scalars that change."""
        return {name: float(getattr(self, name).nanmedian()) for name in self.worst}

    @property
    def changing(self) -> int:
        """The number of scalars that change."""
        return int((~self.lag_one.isnan()).sum())

    def line(self) -> str:
        """Format worst and median of each as a row of a table."""
        worst, median = self.worst, self.median
        cells = [f"{worst[name]:>8.0f} {median[name]:>8.0f}" for name in ("ess_bulk", "ess_tail")]
        cells += [
            f"{worst['r_hat']:>8.3f} {median['r_hat']:>8.3f}",
            f"{worst['lag_one']:>8.2f} {median['lag_one']:>8.2f}",
        ]
        return " ".join([f"{self.changing:>8,}", *cells])


@dataclass(frozen=True, eq=False)
class Summary:
    """Diagnostics of chains of networks; printed, a table.

    Attributes:
        chains: the number of chains.
        draws: the number of networks of each.
        by_name: diagnostics of the weights of every parameter, of `MAX_WEIGHTS_PER_PARAMETER` at most.
        weights: diagnostics of all these weights.
        outputs: diagnostics of the predictions for the given inputs, or None.
        e_bfmi: the fraction of missing information of every chain, or None without energies.
    """

    chains: int
    draws: int
    by_name: Mapping[str, Scores]
    weights: Scores
    outputs: Scores | None = None
    e_bfmi: Tensor | None = None

    def __repr__(self) -> str:
        rows = {**{f"  {name}": scores for name, scores in self.by_name.items()}, "weights": self.weights}
        if self.outputs is not None:
            rows["outputs"] = self.outputs
        width = max(len(name) for name in rows)
        head = " ".join(f"{name:>17}" for name in ("ess bulk", "ess tail", "r-hat", "lag 1"))
        kinds = " ".join([f"{'worst':>8} {'median':>8}"] * 4)
        lines = [
            f"Diagnostics of {self.chains} chains of {self.draws} draws",
            f"{'':{width}} {'':>8} {head}",
            f"{'':{width}} {'scalars':>8} {kinds}",
            *(f"{name:{width}} {scores.line()}" for name, scores in rows.items()),
        ]
        if self.e_bfmi is not None:
            lines.append(f"E-BFMI {', '.join(f'{value:.2f}' for value in self.e_bfmi.tolist())}")
        return "\n".join(line.rstrip() for line in lines)


def summary(
    source: Bayesian | Particles,
    x: Inputs = None,
    *,
    chains: int | None = None,
    energy: Tensor | Sequence[Any] | None = None,
) -> Summary:
    """Summarise how well chains of networks have mixed.

    The measures are effective sample sizes, split R-hat and autocorrelation.

    Args:
        source: a network whose posterior was sampled, or its particles.
        x: inputs to judge predictions on (function space); needs the network.
        chains: the number of chains, one after the other; by default that of the particles.
        energy: the Hamiltonian at every draw, (chains, draws), where the sampler keeps it.

    >>> import bayeslim as bl
    >>> draws = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    >>> found = summary(bl.posteriors.Particles({"w": draws}), chains=4)
    >>> found.weights.worst["r_hat"] < 1.02, found.weights.worst["ess_bulk"] > 300
    (True, True)
    """
    particles = traces.particles_of(source)
    chains = particles.chains if chains is None else chains
    by_name = {name: Scores.of(_spread(trace)) for name, trace in traces.weights(particles, chains).items()}
    draws = particles.count // chains
    return Summary(
        chains,
        draws,
        by_name,
        Scores.joined(list(by_name.values())),
        None if x is None else Scores.of(traces.outputs(source, x, chains)),
        None if energy is None else e_bfmi(traces.energies(energy, chains, draws)),
    )


def _spread(values: Tensor) -> Tensor:
    """Select scalars of (chains, draws, ...), evenly spread."""
    flat = values.flatten(2) if values.ndim > 2 else values.unsqueeze(-1)
    size = flat.shape[-1]
    if size <= MAX_WEIGHTS_PER_PARAMETER:
        return flat
    places = torch.arange(MAX_WEIGHTS_PER_PARAMETER, device=flat.device) * size // MAX_WEIGHTS_PER_PARAMETER
    return flat[..., places]


def _extreme(values: Tensor, largest: bool) -> float:
    known = values[~values.isnan()]
    if not len(known):
        return float("nan")
    return float(known.max() if largest else known.min())
