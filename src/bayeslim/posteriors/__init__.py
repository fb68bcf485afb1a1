"""Posteriors: distributions over the named parameters of a model, one file a family."""

from bayeslim.posteriors.base import Posterior, check_masks
from bayeslim.posteriors.diagonal import Diagonal

POSTERIORS: dict[str, type[Posterior]] = {p.kind: p for p in (Diagonal,)}
"""Posteriors by the name they are saved under; a new family is added here."""

__all__ = ["POSTERIORS", "Diagonal", "Posterior", "check_masks"]
