"""Stochastic gradient Nosé-Hoover thermostat: momentum whose friction makes up for the unknown noise of minibatches.

    v ← (1 − α) v − lr ∇L(w) + √(2 a lr T / N) ε          w ← w + v
    α ← α + c ((1 − α/2) |v|² / (n lr T / N) − 1)

(`bayeslim.samplers.thermostat`)

Ding et al. 2014
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bayeslim.io.registry import register
from bayeslim.methods.shared.chains import ChainMethod
from bayeslim.samplers.base import Sampler
from bayeslim.samplers.thermostat import Thermostat


@register("method")
@dataclass(frozen=True)
class SGNHT(ChainMethod):
    """Stochastic gradient Nosé-Hoover thermostat; further settings as in `ChainMethod`.

    Attributes:
        friction: a, where the friction starts, and the injected noise.
        coupling: c, how fast the friction follows.
    """

    friction: float = 0.1
    coupling: float = 0.01

    name: ClassVar[str] = "sgnht"
    usual_lr: ClassVar[float] = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.friction <= 1 or not 0 < self.coupling < 1:
            raise ValueError(
                f"friction must be in (0, 1] and coupling in (0, 1). Got {self.friction} and {self.coupling}."
            )

    def sampler(self, params: Any, lr: float, burn_in_steps: int | None, **settings: Any) -> Sampler:
        """A thermostat."""
        return Thermostat(params, lr, friction=self.friction, coupling=self.coupling, **settings)
