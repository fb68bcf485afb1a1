"""Carrying a plan out: pruning is conditioning.

The new network's posterior is the old one given that the cut weights are zero. Independent survivors stay where they
are; correlated ones move to where the posterior wants them, μ_R − Σ_RS Σ_SS⁻¹ μ_S.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.posteriors import Gaussian
from bayeslim.posteriors.gaussian import How
from bayeslim.prune.plan import Plan
from bayeslim.types import Params


def cut(bnn: Bayesian, plan: Plan, how: How = "joint") -> Bayesian:
    """A copy of `bnn` with a plan carried out on top of what was cut before; `bnn` is not touched.

    Args:
        bnn: the network.
        plan: what to cut.
        how: how the survivors of correlated posteriors are solved for; see `Gaussian.condition`.
    """
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
    return pruned


def _with_earlier_cuts(plan: Plan, bnn: Bayesian) -> Plan:
    """The plan that also tells what was cut from a network before; the very plan, if it tells that already."""
    earlier = plan if bnn.plan_ is None else bnn.plan_  # cuts without a plan have no words of their own
    masks = {name: torch.ones_like(mask) for name, mask in earlier.masks.items()}
    masks |= {name: mask.cpu() for name, mask in bnn.masks.items()}
    unread = {name: gone & ~masks[name] for name, gone in earlier.unread.items()}
    whole = replace(earlier, masks=masks, unread=unread).merge(plan)
    if (whole.cut, whole.masks.keys()) == (plan.cut, plan.masks.keys()):
        return plan
    criterion, granularity, budget = map(_once, (whole.criterion, whole.granularity, whole.budget))
    return replace(whole, criterion=criterion, granularity=granularity, budget=budget)


def _once(words: str) -> str:
    """Joined words without those that every step of a cut would add again."""
    return " + ".join(dict.fromkeys(words.split(" + ")))


def silence(bnn: Bayesian, unread: Mapping[str, Tensor]) -> None:
    """Set the mean of weights that nothing reads to zero, in place, so that nothing makes up for them."""
    posterior = bnn.posterior_ if unread else None
    if not isinstance(posterior, Gaussian):
        return
    if "posterior" not in bnn.state:  # it is trained, and its mean are the network's own parameters
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
    """Condition a network's posterior on masks, in place; parameters without a posterior are set to zero."""
    posterior = bnn.posterior_
    inside = {name: mask for name, mask in masks.items() if name in posterior.names}
    # Where weights are independent, solving jointly and by rows are the same nothing.
    options: dict[str, Any] = {"how": how} if isinstance(posterior, Gaussian) else {}
    bnn.method.condition(bnn, inside, **options)
    bnn.keep_zeros()
