"""`plan`: what to cut from a network to meet a budget.

All candidates are ranked once, and a cut is always a beginning of the ranking: every goal is a search for one number,
the number of candidates to cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.methods.shared.curvature_posterior import diagonal_factors
from bayeslim.posteriors import Gated, Gaussian
from bayeslim.prune.apply import apply_plan
from bayeslim.prune.batch_norms import measure_batch_norms
from bayeslim.prune.budget import Budget
from bayeslim.prune.bundles import bundled
from bayeslim.prune.candidates import Candidates, Pruning, block_candidates, part_of_pattern, weight_candidates
from bayeslim.prune.criteria import CRITERIA, Criterion, WeightScores, find_criterion
from bayeslim.prune.cuts import BY_HAND, Cuts, EmptyLayer, NothingToCut
from bayeslim.prune.growth import saliency_growth
from bayeslim.prune.price import price
from bayeslim.prune.ranking import MIN_CAPACITY, Ranking, rank
from bayeslim.prune.search import fewest, harm, most
from bayeslim.prune.settings import Settings, check_finite, check_settings
from bayeslim.prune.unit_candidates import unit_candidates
from bayeslim.types import Inputs, Params


class Plan(Cuts):
    """A plan of a cut, as data: made by `bayeslim.plan` or by hand, carried out by `bayeslim.prune`."""

    def tighten(self, bnn: Bayesian, budget: Budget, **options: Any) -> Plan:
        """Cut what this plan cuts, and more of `bnn`, to meet a tighter budget.

        Args:
            bnn: the network it is for.
            budget: the new budget.
            options: as for `bayeslim.plan`; criterion and granularity are this plan's unless given.
        """
        named = {"criterion": "auto" if self.criterion == BY_HAND else self.criterion, "granularity": self.granularity}
        if "criterion" not in options and named["criterion"] not in ("auto", *CRITERIA):
            raise ValueError(
                f'The plan was made by "{self.criterion}", and a plan keeps the name of a criterion only. '
                "Pass criterion=..., the function or the one to go on with."
            )
        if "granularity" not in options and " + " in self.granularity:
            raise ValueError(f"The plan has cuts by {self.granularity}. Pass the granularity= to go on with.")
        return plan(bnn, budget, start=self, **(named | options))


def plan(
    bnn: Bayesian,
    budget: Budget | None = None,
    *,
    granularity: str = "weight",
    criterion: str | Criterion | WeightScores = "auto",
    example: Inputs = None,
    validate: Iterable[Any] | None = None,
    start: Plan | None = None,
) -> Plan:
    """Decide what to cut; nothing is changed.

    Args:
        bnn: a fitted Bayesian network.
        budget: how much to cut. None is for N:M patterns: every layer that can takes the pattern.
        granularity: "weight"; "unit" (neurons, channels, heads, recurrent units: all that compaction can remove); or
            "N:M", N of every M neighbouring inputs, such as "2:4".
        criterion: the score to rank by: "auto", a name in `bayeslim.prune.CRITERIA`, or a function of posterior and
            priors that gives every weight a score, higher = keep.
        example: inputs of the network, needed for units, flops and latency.
        validate: validation data for `Budget(max_error_increase=...)` and `Budget(evidence=True)`; never test data.
        start: a plan whose cuts are taken for granted.

    Raises:
        NothingToCut: if the budget is met already, or no cut is harmless.
        EmptyLayer: if a layer would lose everything.

    >>> import bayeslim as bl
    >>> bnn = bl.bayesianize(torch.nn.Linear(8, 4), bl.Variational(), likelihood=bl.likelihoods.Categorical())
    >>> plan(bnn, Budget(sparsity=0.75)).sparsity
    0.75
    """
    return decide(bnn, budget, Settings(granularity, criterion, example, validate), start)


def decide(
    bnn: Bayesian,
    budget: Budget | None,
    settings: Settings,
    start: Plan | None = None,
    *,
    share: float = 1.0,
    reference: Bayesian | None = None,
) -> Plan:
    """Decide a cut that goes a share of the way to the budget.

    Args:
        bnn: the network.
        budget: the goal.
        settings: how to decide.
        start: a plan whose cuts are taken for granted.
        share: how far to go: on the logarithm of the remaining amount for counted goals, of the increase for an error.
        reference: the network whose error an increase is measured from; `bnn` if not given.
    """
    ranking, criterion = ranked(bnn, budget, settings, start, share)
    candidates = ranking.candidates
    if budget is None:
        count = ranking.limit
    elif budget.goal in ("max_error_increase", "evidence"):
        count = _harmless(bnn, budget, settings, ranking, share, reference)
    else:
        count = _counted(bnn, budget, settings, ranking)
        if share < 1 and count > ranking.gone and candidates.turns is None:
            left = len(candidates) - ranking.gone
            count = len(candidates) - round(left * ((len(candidates) - count) / left) ** share)
    silent = _newly_silent(bnn, ranking) if count <= ranking.gone else False
    if count <= ranking.gone and not silent:
        raise NothingToCut(_nothing(budget, ranking))
    count = max(count, ranking.gone)
    found = plan_of(ranking, count, criterion.name, settings.granularity, repr(budget) if budget else "")
    if share < 1 and candidates.turns is not None:
        found = replace(found, masks=part_of_pattern(candidates, dict(found.masks), bnn.masks, share))
    notes = [f'"{name}": {why}' for name, why in diagonal_factors(bnn.posterior_).items() if name in found.masks]
    return replace(found, notes=(*found.notes, *notes))


def ranked(
    bnn: Bayesian, budget: Budget | None, settings: Settings, start: Plan | None, share: float = 1.0
) -> tuple[Ranking, Criterion]:
    """Rank all candidates for a share of the way; return also the criterion."""
    n_of_m = check_settings(bnn, budget, settings)
    posterior = bnn.posterior_
    criterion = find_criterion(settings.criterion, posterior, settings.granularity == "unit")
    if budget is not None and budget.threshold is not None and settings.criterion == "auto":
        raise ValueError(
            f'A threshold belongs to a criterion, and "auto" may stand for another one later (here {criterion.name}). '
            f'Pass criterion="{criterion.name}", or another.'
        )
    # Marginal variances of correlated weights are expensive, and joint scores of units do not use them.
    joint = settings.granularity == "unit" and isinstance(posterior, Gaussian)
    check_finite(posterior, with_variance=criterion.name != "magnitude" and not joint)
    if start is not None and start.cut:
        start.check(bnn)
    masks: Params = {name: mask.cpu() for name, mask in bnn.masks.items()}
    for name, mask in (start.masks if start is not None and start.cut else {}).items():
        masks[name] = masks[name] & mask if name in masks else mask
    pruning = Pruning(bnn, posterior, criterion, tuple(budget.protect) if budget else (), masks)
    if n_of_m is not None:
        candidates = block_candidates(pruning, *n_of_m)
    elif settings.granularity == "unit":
        candidates = unit_candidates(pruning, settings)
    else:
        candidates = weight_candidates(pruning)
    by_size = budget is not None and criterion.additive and budget.goal != "threshold"
    if budget is not None and budget.bundles:
        candidates = bundled(candidates, by_size, uniform=budget.uniform, round_to=budget.round_to)
    if isinstance(posterior, Gated):
        candidates = replace(candidates, masks=_with_silenced(candidates, posterior))
    if budget is None:
        return rank(candidates, "global", keep_best=False), criterion
    keep_best = budget.empty_layers == "keep best"
    capacity = MIN_CAPACITY if keep_best and budget.goal != "threshold" else 0.0
    growth = None
    if budget.goal == "sparsity" and settings.granularity == "weight" and criterion.name == "curvature":
        left = 1 - float(candidates.gone.double().mean())
        fraction = min(1.0, (1 - budget.value) / left) ** share if left > 0 else 1.0
        growth = saliency_growth(posterior, masks, fraction) if 0 < fraction < 1 else None
    return rank(candidates, budget.scope, keep_best, by_size, capacity, growth), criterion


def _with_silenced(candidates: Candidates, posterior: Gated) -> Callable[[Tensor], Params]:
    """Extend the masks of a cut to the biases and norms that go with closed gates."""

    def masks(cut: Tensor) -> Params:
        own = {name: mask.cpu() for name, mask in candidates.masks(cut).items()}
        silent = {name: mask.cpu() for name, mask in posterior.silenced(own).items()}
        return own | {name: mask & own.get(name, mask) for name, mask in silent.items()}

    return masks


def _newly_silent(bnn: Bayesian, ranking: Ranking) -> bool:
    """Tell whether biases or norms of closed gates are left, with no weight to cut."""
    posterior = bnn.posterior_
    if not isinstance(posterior, Gated):
        return False
    silent = posterior.silenced(ranking.candidates.masks(ranking.cut(ranking.gone)))
    return any(bool((bnn.masks.get(n, torch.ones_like(mask)) & ~mask).any()) for n, mask in silent.items())


def _counted(bnn: Bayesian, budget: Budget, settings: Settings, ranking: Ranking) -> int:
    """Count the candidates to cut for a counted goal."""
    candidates = ranking.candidates
    if budget.goal == "threshold":
        count = ranking.gone + int((candidates.scores[ranking.order[ranking.gone :]] < budget.value).sum())
        if count > ranking.limit:
            raise EmptyLayer(_emptied(budget, ranking, f"No score there is {budget.value:g} or more"))
        return count
    target = budget.value
    if budget.goal == "sparsity":
        size = sum(bnn.model.get_parameter(name).numel() for name in candidates.weights)
        target = size - round(budget.value * size)
    counted = price(budget.goal, bnn, candidates, settings.example)

    def left(count: int) -> float:
        return counted(candidates.masks(ranking.cut(count)))

    least = left(ranking.limit)
    if least > target:
        reached = _shown(budget, least, candidates, bnn)
        if ranking.blocked:
            raise EmptyLayer(_emptied(budget, ranking, f"In the order of scores, weights can be cut to {reached}"))
        extreme = "most" if budget.goal == "sparsity" else "least"
        raise ValueError(f"{budget} cannot be met: the {extreme} possible is {reached}. Protect less, or ask for less.")
    return fewest(left, target, ranking.gone, ranking.limit)


def _harmless(
    bnn: Bayesian, budget: Budget, settings: Settings, ranking: Ranking, share: float, reference: Bayesian | None
) -> int:
    """Count the candidates that can be cut within a goal on validation data."""
    assert settings.validate is not None
    is_fine = harm(reference or bnn, budget, settings.validate, share)

    def harmless(count: int) -> bool:
        pruned = apply_plan(bnn, plan_of(ranking, count, "", settings.granularity, ""), settings.how)
        if settings.norm_data is not None:
            measure_batch_norms(pruned, settings.norm_data)
        return is_fine(pruned)

    return most(harmless, ranking.gone, ranking.limit, len(ranking.candidates))


def plan_of(ranking: Ranking, count: int, criterion: str, granularity: str, budget: str) -> Plan:
    """Make the plan that cuts the first `count` of a ranking."""
    candidates = ranking.candidates
    chosen = ranking.cut(count)
    masks = {n: m for n, m in candidates.masks(chosen).items() if n in candidates.weights or not bool(m.all())}
    stays = torch.ones_like(candidates.gone)
    stays[chosen] = False
    left = {name: why for name, why in candidates.left.items() if name not in masks}
    thresholds: dict[str, float] = {}
    notes: list[str] = []
    for place, layer in enumerate(candidates.layer_names):
        scores = candidates.scores[stays & (candidates.layers == place)]
        finite = scores[torch.isfinite(scores)]
        if len(finite):
            thresholds[layer] = float(finite.min())
        if layer in ranking.spared and len(scores) == 1:
            left[layer] = "its best one is kept, all others are cut"
            notes.append(f"{layer} would be empty, and keeps its best {granularity}")
        elif layer in masks and bool(masks[layer].all()):
            left[layer] = "all its scores are above the cut"
    return Plan(masks, criterion, granularity, budget, thresholds, left, candidates.unread(chosen), tuple(notes))


def _nothing(budget: Budget | None, ranking: Ranking) -> str:
    gone = f"{ranking.gone:,} of {len(ranking.candidates):,} are cut already"
    if budget is None:
        return f"Nothing is left to cut: {gone}."
    if budget.goal in ("max_error_increase", "evidence"):
        return f"No cut keeps within {budget} on the validation data; {gone}. Allow more, or fine-tune first."
    if budget.goal == "threshold":
        return (
            f"No score is below {budget.value:g} ({gone}). Raise the threshold, or train longer: a prior that "
            "favours zero lowers more and more scores."
        )
    return f"{budget} is met without cutting anything: {gone}. Ask for more."


def _emptied(budget: Budget, ranking: Ranking, remark: str) -> str:
    return (
        f'{budget} cannot be met without cutting everything in "{ranking.blocked}". {remark}. '
        'Use Budget(..., empty_layers="keep best") to leave such layers their best, scope="layer", or protect them.'
    )


def _shown(budget: Budget, least: float, candidates: Candidates, bnn: Bayesian) -> str:
    if budget.goal == "sparsity":
        size = sum(bnn.model.get_parameter(name).numel() for name in candidates.weights)
        return f"a sparsity of {1 - least / max(size, 1):.4f}"
    number = f"{least:.3g} s" if budget.goal == "latency" else f"{math.ceil(least):,}"
    return f"{number} ({budget.goal})"
