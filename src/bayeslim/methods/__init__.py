"""Methods: ways to a posterior, one file each."""

from bayeslim.methods.base import Method, Terms
from bayeslim.methods.variational import Variational

METHODS: dict[str, type[Method]] = {m.name: m for m in (Variational,)}
"""Methods by the name they are saved under; a new one is added here."""

__all__ = ["METHODS", "Method", "Terms", "Variational"]
