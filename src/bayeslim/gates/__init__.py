"""Gates: random scales of groups of weights, one file each, that learn which groups a network can do without."""

from bayeslim.gates.base import Gate

GATES: dict[str, type[Gate]] = {}
"""Gates by the name they are saved under; a new one is added here."""

__all__ = ["GATES", "Gate"]
