"""Carrying a plan out: pruning is conditioning.

The new network's posterior is the old one given that the cut weights are zero. Independent survivors stay where they
are; correlated ones move to their conditional mean, μ_R − Σ_RS Σ_SS⁻¹ μ_S.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.posteriors import Conditioned, Gaussian
from bayeslim.posteriors.gaussian import How
from bayeslim.types import Params

if TYPE_CHECKING:
    from bayeslim.prune.plan import Plan


def apply_plan(bnn: Bayesian, plan: Plan, how: How = "joint") -> Bayesian:
    """Carry a plan out on a copy of `bnn`, on top of earlier cuts."""
    plan.check(bnn)
    whole = _with_earlier_cuts(plan, bnn)
    whole.check(bnn)
    pruned = copy.deepcopy(bnn)
    pruned.masks = {
        name: mask.to(bnn.model.get_parameter(name).device)
        for name, mask in whole.masks.items()
        if not bool(mask.all())
    }
    pruned.plan_ = whole
    silence(pruned, plan.unread)
    condition(pruned, pruned.masks, how)
    posterior = pruned.posterior_
    if isinstance(posterior, Conditioned):
        pruned.plan_ = replace(whole, solves=posterior.solves)
    return pruned


def _with_earlier_cuts(plan: Plan, bnn: Bayesian) -> Plan:
    """Add the earlier cuts of a network to a plan, unless it has them already."""
    earlier = plan if bnn.plan_ is None else bnn.plan_  # cuts made without a plan have no words to add
    masks = {name: torch.ones_like(mask) for name, mask in earlier.masks.items()}
    masks |= {name: mask.cpu() for name, mask in bnn.masks.items()}
    unread = {name: gone & ~masks[name] for name, gone in earlier.unread.items()}
    whole = replace(earlier, masks=masks, unread=unread).merge(plan)
    if (whole.cut, whole.masks.keys()) == (plan.cut, plan.masks.keys()):
        return plan
    criterion, granularity, budget = map(_once, (whole.criterion, whole.granularity, whole.budget))
    return replace(whole, criterion=criterion, granularity=granularity, budget=budget)


def _once(words: str) -> str:
    """Remove the repetitions that several steps of one cut leave in joined words."""
    return " + ".join(dict.fromkeys(words.split(" + ")))


def silence(bnn: Bayesian, unread: Mapping[str, Tensor]) -> None:
    """Set the mean of unread weights to zero, in place; none compensates for them."""
    posterior = bnn.posterior_ if unread else None
    if not isinstance(posterior, Gaussian):
        return
    if "posterior" not in bnn.state:  # a trained posterior, whose mean are the network's own parameters
        with torch.no_grad():
            for name in unread.keys() & set(posterior.names):
                weight = bnn.model.get_parameter(name)
                weight.masked_fill_(unread[name].to(weight.device), 0)
        return
    tensors = posterior.tensors()
    for key, value in tensors.items():
        # a conditioned posterior has its own mean, and that of its base
        name = key.removeprefix("base/").removeprefix("mean:")
        if key.endswith(f"mean:{name}") and name in unread:
            tensors[key] = value.masked_fill(unread[name].to(value.device), 0)
    bnn.state["posterior"] = type(posterior).restore(posterior.config(), tensors)


def condition(bnn: Bayesian, masks: Params, how: How) -> None:
    """Condition a posterior in place; parameters without one are set to zero."""
    posterior = bnn.posterior_
    inside = {name: mask for name, mask in masks.items() if name in posterior.names}
    # Independent survivors do not move, whether they are solved for jointly or by rows.
    options: dict[str, Any] = {"how": how} if isinstance(posterior, Gaussian) else {}
    bnn.method.condition(bnn, inside, **options)
    bnn.keep_zeros()
