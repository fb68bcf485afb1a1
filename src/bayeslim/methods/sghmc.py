"""Stochastic gradient Hamiltonian Monte Carlo: momentum with noise, whose iterates are draws from the posterior.

    v ← (1 − α) v − lr ∇L(w) + √(2 α lr T / N) ε          w ← w + v

and with `adapt` the same with a scale for every weight, measured during the burn-in (`bayeslim.samplers.hamiltonian`,
which also says why nothing is taken off the injected noise for that of minibatches).

Chen, Fox & Guestrin 2014, arXiv:1402.4102 · Springenberg et al. 2016
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bayeslim.io.registry import register
from bayeslim.methods.shared.chains import ChainMethod
from bayeslim.samplers.base import Sampler
from bayeslim.samplers.hamiltonian import StochasticHamiltonian

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian


@register("method")
@dataclass(frozen=True)
class SGHMC(ChainMethod):
    """Stochastic gradient Hamiltonian Monte Carlo; further settings as in `ChainMethod`.

    Attributes:
        friction: α, one minus the momentum.
        adapt: whether scales are measured; then `lr` is as of RMSprop. Minibatches of reshuffled data make the draws
            wider than the posterior by an amount that falls with the square of `lr`.
    """

    friction: float = 0.1
    adapt: bool = False

    name: ClassVar[str] = "sghmc"
    usual_lr: ClassVar[float] = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.friction <= 1:
            raise ValueError(f"friction must be in (0, 1]. Got {self.friction}.")

    @property
    def measures(self) -> bool:
        """With `adapt`."""
        return self.adapt

    def default_lr(self, bnn: Bayesian) -> float:
        """That of SGD with momentum; with `adapt` that of RMSprop, which knows how steep the loss is."""
        return 1e-3 if self.adapt else super().default_lr(bnn)

    def sampler(self, params: Any, lr: float, burn_in_steps: int | None, **settings: Any) -> Sampler:
        """Hamiltonian dynamics with friction."""
        steps = sys.maxsize if burn_in_steps is None else max(1, burn_in_steps)
        return StochasticHamiltonian(
            params, lr, friction=self.friction, adapt_steps=steps if self.adapt else 0, **settings
        )
