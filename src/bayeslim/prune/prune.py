"""`prune`: cut by a plan or to a budget, at once or in steps.

In steps, each cut goes the same factor of the way: with R steps left, (remaining at the goal / remaining now)^(1/R) of
the candidates stay. Between cuts the posterior is found again where the last cut left the network, since the curvature
changes as weights go (the ranking after ten small cuts is not the one before the first). Before that, the statistics of
batch norms are measured anew, since they belong to the network before the cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from bayeslim.bayesian import Bayesian
from bayeslim.methods.laplace import Laplace
from bayeslim.posteriors.gaussian import How
from bayeslim.prune.apply import apply_plan, condition
from bayeslim.prune.batch_norms import measure_batch_norms
from bayeslim.prune.bias_correction import correct_biases
from bayeslim.prune.budget import Budget
from bayeslim.prune.criteria import Criterion, WeightScores
from bayeslim.prune.cuts import NothingToCut
from bayeslim.prune.plan import Plan, decide
from bayeslim.prune.settings import Settings
from bayeslim.train.fit import fit
from bayeslim.train.progress import progress as progress_bar
from bayeslim.train.progress import showing
from bayeslim.types import Inputs

BatchNorms = Literal["measure", "keep"]


def prune(
    bnn: Bayesian,
    what: Plan | Budget,
    *,
    refresh: Any = None,
    steps: int = 1,
    fine_tune: Mapping[str, Any] | None = None,
    validate: Iterable[Any] | None = None,
    example: Inputs = None,
    granularity: str = "weight",
    criterion: str | Criterion | WeightScores = "auto",
    how: How = "joint",
    batch_norms: BatchNorms = "measure",
    bias_correction: bool = False,
    progress: bool = True,
) -> Bayesian:
    """Cut weights or units: a new network whose posterior is conditioned on the zeros.

    `bnn` is not touched. The result predicts, trains with its zeros kept and can be pruned again; its `plan_` shows
    what was cut, and how the survivors of the last step were solved for.

    Args:
        bnn: a fitted Bayesian network.
        what: a plan, or a budget to make plans for.
        refresh: a loader of training data. After every cut the method is fitted on it again from where the network is:
            for post-hoc methods the curvature is recomputed and no weight moves, for others one epoch is trained.
        steps: the number of cuts that lead to the budget. With `refresh` each sees the posterior of the network it
            cuts.
        fine_tune: options of `bayeslim.train.fit`, such as {"epochs": 1, "lr": 1e-3}, to train with between cuts and
            after the last, on `refresh`.
        validate: validation data, for a budget that is searched on data.
        example: inputs, for units, flops and latency.
        granularity: as for `plan`.
        criterion: as for `plan`.
        how: "joint" solves for all survivors of a layer together; "row" (Kronecker only) for each row alone, faster
            and approximate.
        batch_norms: "measure" the statistics of batch norms anew on `refresh` after every cut, or "keep" them.
        bias_correction: whether to bring the mean outputs of cut layers back to those before the cut, on `refresh`, by
            their biases; for networks without norms.
        progress: whether to show progress bars; `BAYESLIM_PROGRESS=0` in the environment turns all of them off.
    """
    norm_data = refresh if batch_norms == "measure" else None
    settings = Settings(granularity, criterion, example, validate, how, norm_data)
    _check(bnn, what, settings, refresh, steps, fine_tune, batch_norms, bias_correction)
    refit = Refresh(refresh, fine_tune, how, batch_norms, bias_correction)
    with showing(progress):
        if isinstance(what, Plan):
            return refit(apply_plan(bnn, what, how), bnn)
        return _in_steps(bnn, what, settings, steps, refit)


def _in_steps(bnn: Bayesian, what: Budget, settings: Settings, steps: int, refit: Refresh) -> Bayesian:
    pruned = bnn
    for step in progress_bar(range(steps), "pruning", enabled=steps > 1):
        measured = what.goal in ("max_error_increase", "evidence")
        share = (step + 1) / steps if measured else 1 / (steps - step)
        try:
            chosen = decide(pruned, what, settings, share=share, reference=bnn)
        except NothingToCut:
            if pruned is bnn and step + 1 == steps:
                raise
            continue  # a small share of the way may round to no cut at all
        pruned = refit(apply_plan(pruned, chosen, settings.how), pruned)
    return pruned


@dataclass(frozen=True)
class Refresh:
    """How the posterior is found again after a cut; see the arguments of `prune`."""

    loader: Any
    fine_tune: Mapping[str, Any] | None = None
    how: How = "joint"
    batch_norms: BatchNorms = "measure"
    bias_correction: bool = False

    def __call__(self, bnn: Bayesian, before: Bayesian | None = None) -> Bayesian:
        """Find the posterior again, in place, with the zeros kept."""
        if self.loader is None:
            return bnn
        if self.bias_correction and before is not None:
            dense: nn.Module = before.mean_network()
            correct_biases(dense, bnn, self.loader)
        if self.batch_norms == "measure" and before is not None:
            measure_batch_norms(bnn, self.loader)
        if isinstance(bnn.method, Laplace):  # its own fit measures the curvature of the network as it is
            if self.fine_tune is not None:
                fit(bnn, self.loader, **self.fine_tune)
            bnn.fit(self.loader)
        else:
            bnn.fit(self.loader, **(self.fine_tune or {}))
        condition(bnn, bnn.masks, self.how)
        return bnn


def _check(
    bnn: Any,
    what: Any,
    settings: Settings,
    refresh: Any,
    steps: Any,
    fine_tune: Mapping[str, Any] | None,
    batch_norms: Any,
    bias_correction: bool,
) -> None:
    if not isinstance(bnn, Bayesian):
        raise TypeError(f"prune needs a Bayesian network: bl.bayesianize(model, ...). Got {type(bnn).__name__}.")
    if not isinstance(what, (Plan, Budget)):
        raise TypeError(
            "prune needs a bl.Budget, such as bl.Budget(sparsity=0.9), or a bl.Plan, such as "
            f'bl.plan(bnn, granularity="2:4"). Got {what!r}.'
        )
    if settings.how not in ("joint", "row"):
        raise ValueError(f'how must be "joint" or "row". Got {settings.how!r}.')
    if batch_norms not in get_args(BatchNorms):
        raise ValueError(f'batch_norms must be "measure" or "keep". Got {batch_norms!r}.')
    if type(steps) is not int or steps < 1:
        raise ValueError(f"steps must be a whole number, at least 1. Got {steps!r}.")
    if fine_tune is not None and refresh is None:
        raise ValueError("fine_tune needs data to train on: pass refresh=loader.")
    if bias_correction and refresh is None:
        raise ValueError("bias_correction measures outputs on data: pass refresh=loader.")
    plain = Settings(example=settings.example, how=settings.how, norm_data=settings.norm_data)
    if isinstance(what, Plan) and (settings != plain or steps != 1):
        raise TypeError(
            "steps, validate, granularity and criterion belong to a Budget: a Plan has decided already. "
            "Pass a bl.Budget, or leave them out."
        )
