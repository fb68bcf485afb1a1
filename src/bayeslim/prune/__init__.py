"""Pruning by the posterior: criteria, budgets, plans, and the cut as conditioning.

`plan` decides what to cut and `prune` carries it out; `criteria/` has the scores.
"""

from __future__ import annotations

from bayeslim.compact.compact import compact
from bayeslim.prune.align import align
from bayeslim.prune.budget import Budget
from bayeslim.prune.criteria import CRITERIA, Criterion, default_criterion
from bayeslim.prune.cuts import EmptyLayer, NothingToCut, ParameterCut
from bayeslim.prune.fine_tune import fine_tune
from bayeslim.prune.plan import Plan, plan
from bayeslim.prune.prune import prune
from bayeslim.prune.streaming.prune_blocks import PrunedBlocks, prune_blocks, prune_blocks_

__all__ = [
    "CRITERIA",
    "Budget",
    "Criterion",
    "EmptyLayer",
    "NothingToCut",
    "ParameterCut",
    "Plan",
    "PrunedBlocks",
    "align",
    "compact",
    "default_criterion",
    "fine_tune",
    "plan",
    "prune",
    "prune_blocks",
    "prune_blocks_",
]
