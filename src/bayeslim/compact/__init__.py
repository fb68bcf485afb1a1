"""Compaction: it turns a masked network into a plain, smaller network.

`units` finds the removable units, `compaction` removes the idle ones, `cost` counts parameters and FLOPs, and `sparse`
stores tensors without their zeros. `bl.compact` itself is in `bayeslim.compact.compact`.
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
