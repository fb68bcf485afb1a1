"""Soft weight sharing: a learned mixture of Gaussians, one of them fixed at zero.

    p(w) = π₀ N(w | 0, s₀²) + Σ_k π_k N(w | m_k, s_k²)

Means, widths and shares are learned with the weights, and the weights move towards the means. Afterwards
`bayeslim.quantise(bnn, codebook="prior")` sets each weight to a component's mean, most to zero. The KL is estimated.

Nowlan & Hinton 1992, "Simplifying neural networks by soft weight-sharing" · Ullrich, Meeds & Welling 2017,
arXiv:1702.04008, who start from a trained network, and hold the share of zero near one
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import constraints

from bayeslim.io.registry import register
from bayeslim.priors.learnable import Learnable

MAX_COMPONENTS = 1 << 16
"""The size of a codebook of 16 bits, beyond which sharing saves nothing."""


@register("prior")
@dataclass(frozen=True, repr=False)
class SoftSharing(Learnable):
    """A mixture of Gaussians that all parameters with this prior share.

    Use `priors.per_layer` for a mixture per layer.

    Attributes:
        components: the number of components, with the one at zero; 2^bits for a codebook of `bits`.
        spread: the means start evenly between −spread and spread; choose about the largest weight.
        zero: the initial share of the component at zero.
        means: the initial means of the others instead, (components − 1,).
        stds: the initial widths, zero's first, (components,); by default a third of the means' distance.
        logits: the initial log-shares up to a constant, zero's first, (components,).
        samples: the number of draws that estimate the KL.
    """

    components: int = 16
    spread: float = 0.5
    zero: float = 0.9
    means: Any = field(default=None, kw_only=True)
    stds: Any = field(default=None, kw_only=True)
    logits: Any = field(default=None, kw_only=True)
    samples: int = field(default=1, kw_only=True)
    learn: bool | str | tuple[str, ...] = field(default=True, kw_only=True)
    name: ClassVar[str] = "soft_sharing"
    limits: ClassVar = {"means": constraints.real, "stds": constraints.positive, "logits": constraints.real}

    def __post_init__(self) -> None:
        if type(self.components) is not int or not 2 <= self.components <= MAX_COMPONENTS:
            raise ValueError(
                f"SoftSharing needs zero and at least one more component, {MAX_COMPONENTS:,} at most. "
                f"Got {self.components!r}."
            )
        if not 0 < self.spread < math.inf or not 0 < self.zero < 1:
            raise ValueError(f"spread must be positive, and zero a share. Got {self.spread} and {self.zero}.")
        others = self.components - 1
        below, above = others // 2, others - others // 2
        start = torch.cat([-torch.arange(below, 0, -1) / max(below, 1), torch.arange(1, above + 1) / above])
        shares = torch.tensor([self.zero, *[(1 - self.zero) / others] * others], dtype=torch.float64)
        for name, value in (
            ("means", self.spread * start.double()),
            ("stds", torch.full((self.components,), self.spread / above / 3, dtype=torch.float64)),
            ("logits", shares.log()),
        ):
            given = getattr(self, name)
            if given is None:
                object.__setattr__(self, name, value.float())
            elif not isinstance(given, Tensor) or given.shape != value.shape:
                shown = tuple(given.shape) if isinstance(given, Tensor) else given
                raise ValueError(
                    f"SoftSharing({name}=...) must be a tensor of shape {tuple(value.shape)}. Got {shown}."
                )
        super().__post_init__()

    @property
    def centres(self) -> Tensor:
        """The components' means, zero first, (components,)."""
        means: Tensor = self.means
        return torch.cat([means.new_zeros(1), means])

    @property
    def shares(self) -> Tensor:
        """The components' shares π, (components,)."""
        logits: Tensor = self.logits
        return logits.softmax(0)

    def log_joint(self, weight: Tensor) -> Tensor:
        """Compute log π_k N(w | m_k, s_k²) by weight and component, (..., components)."""
        widths = self.setting_like("stds", weight)
        off = (weight.unsqueeze(-1) - self.centres.to(weight)) / widths
        return self.shares.to(weight).log() - widths.log() - 0.5 * off.square() - 0.5 * math.log(2 * math.pi)

    def log_prob(self, weight: Tensor) -> Tensor:
        """Compute log Σ_k π_k N(w | m_k, s_k²)."""
        return self.log_joint(weight).logsumexp(-1)

    def sample(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw a component for each weight, then the weight."""
        count = math.prod(shape)
        chosen = torch.multinomial(self.shares.detach(), count, replacement=True, generator=generator).reshape(shape)
        stds: Tensor = self.stds
        return self.centres[chosen] + stds[chosen] * torch.randn(shape, generator=generator)

    def at(self, mask: Tensor) -> Self:
        """Return the prior itself: no weight has settings of its own."""
        return self

    def check_fits(self, name: str, parameter: Tensor) -> None:
        """Accept every parameter."""

    def __repr__(self) -> str:
        learned = "" if self.learned else ", learn=False"
        return f"SoftSharing(components={self.components}{learned})"
