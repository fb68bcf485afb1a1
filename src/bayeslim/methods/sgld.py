"""Stochastic gradient Langevin dynamics: gradient descent with noise, whose iterates are draws from the posterior.

    w ← w − lr ∇L(w) + √(2 lr T / N) ε          L = mean NLL − log p(w) / N

(`bayeslim.samplers.langevin`)

Welling & Teh 2011 · cyclical: Zhang et al. 2020, arXiv:1902.03932
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bayeslim.io.registry import register
from bayeslim.methods.shared.chains import ChainMethod
from bayeslim.samplers.base import Sampler
from bayeslim.samplers.langevin import Langevin


@register("method")
@dataclass(frozen=True)
class SGLD(ChainMethod):
    """Stochastic gradient Langevin dynamics; settings as in `ChainMethod`."""

    name: ClassVar[str] = "sgld"
    usual_lr: ClassVar[float] = 0.1

    def sampler(self, params: Any, lr: float, burn_in_steps: int | None, **settings: Any) -> Sampler:
        """Langevin dynamics."""
        return Langevin(params, lr, **settings)
