"""Compaction: a masked network as a plain network that is really smaller."""

from __future__ import annotations

from bayeslim.compact.graph import Frozen, Slice, Unit, UnitGraph, units
from bayeslim.compact.surgery import Compaction, CompactionFailed, compact_network, compaction

__all__ = ["Compaction", "CompactionFailed", "Frozen", "Slice", "Unit", "UnitGraph", "compact_network", "compaction", "units"]
