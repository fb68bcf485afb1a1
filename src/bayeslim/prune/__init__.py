"""Pruning by the posterior: criteria, budgets, plans, and the cut as conditioning.

`plan` decides what goes and `prune` carries it out; see `score` for what the criteria mean.
"""

from __future__ import annotations

from bayeslim.compact.compact import compact
from bayeslim.prune.align import align
from bayeslim.prune.budget import Budget
from bayeslim.prune.criteria import CRITERIA, Criterion, default_criterion
from bayeslim.prune.decide import plan
from bayeslim.prune.plan import EmptyLayer, NothingToCut, ParameterCut, Plan
from bayeslim.prune.prune import prune
from bayeslim.prune.tune import fine_tune

__all__ = [
    "CRITERIA",
    "Budget",
    "Criterion",
    "EmptyLayer",
    "NothingToCut",
    "ParameterCut",
    "Plan",
    "align",
    "compact",
    "default_criterion",
    "fine_tune",
    "plan",
    "prune",
]
