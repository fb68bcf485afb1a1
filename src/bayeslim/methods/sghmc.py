"""Stochastic gradient Hamiltonian Monte Carlo: momentum with noise, whose iterates are draws from the posterior.

    v ← (1 − α) v − lr ∇L(w) + √(2 α lr T / N) ε          w ← w + v

and with `adapt` a scale for every weight, and less noise where minibatches bring their own, both measured during the
burn-in (`bayeslim.samplers.hamiltonian`).

Chen, Fox & Guestrin 2014, arXiv:1402.4102 · Springenberg et al. 2016
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from bayeslim.methods.chains import ChainMethod
from bayeslim.samplers.base import Sampler
from bayeslim.samplers.hamiltonian import StochasticHamiltonian


@dataclass(frozen=True)
class SGHMC(ChainMethod):
    """Stochastic gradient Hamiltonian Monte Carlo; further settings as in `ChainMethod`.

    Attributes:
        friction: α, one minus the momentum.
        adapt: whether scales and the noise of gradients are measured; then `lr` is as of RMSprop. On minibatches of
            reshuffled data its draws are narrower than the posterior (see `bayeslim.samplers.hamiltonian`).
    """

    friction: float = 0.1
    adapt: bool = False

    name: ClassVar[str] = "sghmc"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.friction <= 1:
            raise ValueError(f"friction must be in (0, 1]. Got {self.friction}.")

    def sampler(self, params: Any, lr: float, burn_in_steps: int | None, **settings: Any) -> Sampler:
        """Hamiltonian dynamics with friction."""
        steps = sys.maxsize if burn_in_steps is None else max(1, burn_in_steps)
        return StochasticHamiltonian(
            params, lr, friction=self.friction, adapt_steps=steps if self.adapt else 0, **settings
        )
