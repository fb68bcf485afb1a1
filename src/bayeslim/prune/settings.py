"""How to decide a cut, checked before any work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.compact import UnitGraph, units
from bayeslim.errors import BayeslimError
from bayeslim.posteriors import Posterior
from bayeslim.posteriors.gaussian import How
from bayeslim.prune.budget import Budget
from bayeslim.prune.candidates import pattern
from bayeslim.prune.criteria import Criterion, WeightScores
from bayeslim.types import Inputs


@dataclass(frozen=True)
class Settings:
    """The options of `bayeslim.plan`, and two of `bayeslim.prune`.

    Attributes:
        granularity: "weight", "unit" or N:M.
        criterion: the score to rank by.
        example: inputs of the network.
        validate: validation data.
        how: how survivors are solved for.
        norm_data: data on which the batch norms of a cut that is tried out are measured; None leaves them.
    """

    granularity: str = "weight"
    criterion: str | Criterion | WeightScores = "auto"
    example: Inputs = None
    validate: Iterable[Any] | None = None
    how: How = "joint"
    norm_data: Iterable[Any] | None = None
    _found: list[UnitGraph] = field(default_factory=list, compare=False, repr=False)

    def units_of(self, bnn: Bayesian) -> UnitGraph:
        """Find the removable units of a network, once for all cuts by these settings.

        They are of one architecture, and tracing takes most of the time of a small cut. Copies made by
        `dataclasses.replace` share what was found.
        """
        if not self._found:
            self._found.append(units(bnn.mean_network(), self.example))
        return self._found[0]


def check_settings(bnn: Bayesian, budget: Budget | None, settings: Settings) -> tuple[int, int] | None:
    """Refuse options that do not fit together; return N and M of a pattern."""
    if not isinstance(bnn, Bayesian):
        raise TypeError(f"plan needs a Bayesian network: bl.bayesianize(model, ...). Got {type(bnn).__name__}.")
    n_of_m = pattern(settings.granularity) if isinstance(settings.granularity, str) else None
    if n_of_m is None and settings.granularity not in ("weight", "unit"):
        raise ValueError(f'granularity must be "weight", "unit" or "N:M", such as "2:4". Got {settings.granularity!r}.')
    if budget is None:
        if n_of_m is None:
            raise TypeError("plan needs a budget, such as bl.Budget(sparsity=0.9).")
        return n_of_m
    if not isinstance(budget, Budget):
        raise TypeError(f"budget must be a bl.Budget, such as bl.Budget(sparsity=0.9). Got {budget!r}.")
    if settings.validate is not None:
        if not isinstance(settings.validate, Iterable) or isinstance(settings.validate, Tensor):
            raise TypeError(f"validate must be a loader of batches. Got {type(settings.validate).__name__}.")
        if isinstance(settings.validate, Iterator):
            raise TypeError(
                "validate is read once for every cut that is tried out. Pass a loader or a list of batches."
            )
    needs_example = settings.granularity == "unit" or budget.goal in ("flops", "latency")
    if needs_example and settings.example is None:
        what = "Finding units" if settings.granularity == "unit" else f"Counting {budget.goal}"
        raise ValueError(f"{what} needs inputs to run the network on: pass example=x, one batch of inputs.")
    if budget.bundles and settings.granularity != "unit":
        raise ValueError(f'uniform and round_to are for granularity="unit". Got {settings.granularity!r}.')
    if budget.goal == "latency" and settings.granularity != "unit":
        raise ValueError(
            "Zeros alone do not make a network faster; removed units do. "
            'Use granularity="unit" with Budget(latency=...), or a budget in flops or bytes.'
        )
    if budget.goal in ("max_error_increase", "evidence") and settings.validate is None:
        raise ValueError(f"Budget({budget.goal}=...) is searched on validation data: pass validate=loader.")
    return n_of_m


def check_finite(posterior: Posterior, with_variance: bool) -> None:
    """Refuse a posterior with NaN or infinite values."""
    for what, values in (("mean", posterior.mean), ("variance", posterior.variance if with_variance else {})):
        for name, value in values.items():
            if not bool(torch.isfinite(value).all()):
                raise BayeslimError(
                    f'The posterior {what} of "{name}" holds NaN or infinite values, so weights cannot be ranked. '
                    "Refit the network, or go back to a checkpoint."
                )
