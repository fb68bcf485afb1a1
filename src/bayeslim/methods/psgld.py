"""Preconditioned stochastic gradient Langevin dynamics: RMSprop with noise, whose iterates follow the posterior.

    w ← w − lr G ∇L(w) + √(2 lr T G / N) ε          G = 1 / (√V + ϵ),  V a running mean of ∇L²

V is measured during the burn-in and held from then on (`bayeslim.samplers.preconditioned` says why).

Li, Chen, Carlson & Carin 2016, arXiv:1512.07666
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bayeslim.io.registry import register
from bayeslim.methods.shared.chains import ChainMethod
from bayeslim.samplers.base import Sampler
from bayeslim.samplers.preconditioned import PreconditionedLangevin

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian


@register("method")
@dataclass(frozen=True)
class PSGLD(ChainMethod):
    """Preconditioned stochastic gradient Langevin dynamics; further settings as in `ChainMethod`.

    Attributes:
        decay: β of the running mean.
        floor: ϵ.
    """

    decay: float = 0.99
    floor: float = 1e-5

    name: ClassVar[str] = "psgld"
    usual_lr: ClassVar[float] = 3e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay < 1 or not self.floor > 0:
            raise ValueError(f"decay must be in [0, 1) and floor positive. Got {self.decay} and {self.floor}.")

    @property
    def measures(self) -> bool:
        """They always are."""
        return True

    def default_lr(self, bnn: Bayesian) -> float:
        """That of RMSprop, which knows how steep the loss is."""
        return self.usual_lr

    def sampler(self, params: Any, lr: float, burn_in_steps: int | None, **settings: Any) -> Sampler:
        """Preconditioned Langevin dynamics."""
        return PreconditionedLangevin(
            params, lr, decay=self.decay, floor=self.floor, adapt_steps=burn_in_steps, **settings
        )
