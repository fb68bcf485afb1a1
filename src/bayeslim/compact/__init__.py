"""Compaction: a masked network as a plain network that is really smaller.

`units` finds what can be removed, `compaction` removes what is idle, `cost` counts what is left, and `sparse` stores
it without zeros.
"""

from __future__ import annotations

from bayeslim.compact.cost import Cost, cost
from bayeslim.compact.graph import Frozen, Slice, Unit, UnitGraph, units
from bayeslim.compact.surgery import Compaction, CompactionFailed, compact_network, compaction

__all__ = [
    "Compaction",
    "CompactionFailed",
    "Cost",
    "Frozen",
    "Slice",
    "Unit",
    "UnitGraph",
    "compact_network",
    "compaction",
    "cost",
    "units",
]
