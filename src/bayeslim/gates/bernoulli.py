"""Binary dropout as a variational posterior, its rate fixed or learned.

    z = m / (1 − p),   m ~ Bernoulli(1 − p),      E z = 1,   Var z = p/(1 − p) = α,      p the probability of *dropping*

α is the variance of the matching Gaussian dropout noise, N(1, α). Masks are a priori fair coins, so that

    KL(q(m) ‖ p(m)) = log 2 − H(p),      H(p) = −p log p − (1 − p) log(1 − p),

and under a Normal prior N(0, s²) of the effective weights w = z w̃ the weights cost E w²/2s², a weight decay on w̃ that
grows as 1/(1 − p) = 1 + α: the term of w̃ itself, and α w̃²/2s² beside it.
Where the data do not constrain a unit, its rate goes to ½, not to 1: dropout finds the noise that a network tolerates,
and closes few gates.

The rate is learned by gradients through a relaxation ("concrete"), of temperature t,
    m = sigmoid((log u − log(1−u) − logit p) / t),   u ~ U(0, 1),
or without a bias by the score function ("reinforce"), with the mean loss of the other draws for a baseline b:
    ∂ E L(m) = E[(L(m) − b) ∂ log q(m)].

Gal & Ghahramani 2016, arXiv:1506.02142 · Gal, Hron & Kendall 2017, arXiv:1705.07832 · Williams 1992, "Simple
statistical gradient-following algorithms for connectionist reinforcement learning"
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bayeslim.gates.base import Gate, bounded_exp, positive, precise, uniform
from bayeslim.io.registry import register
from bayeslim.priors import Normal, Prior
from bayeslim.types import Params


@register("gate")
@dataclass(frozen=True)
class Bernoulli(Gate):
    """Gates that are zero with probability p and 1/(1 − p) otherwise.

    Attributes:
        rate: p, the probability of dropping; the initial one, if it is learned.
        learn: how every gate's own rate is learned, "concrete" or "reinforce"; None for a fixed rate.
        temperature: t of the relaxation. Its draws are not quite binary; means and variances are those of binary draws.
        threshold: gates that are kept with at most this probability are closed, if the rate is learned.
    """

    rate: float = 0.5
    learn: Literal["concrete", "reinforce"] | None = None
    temperature: float = 0.1
    threshold: float = 0.05
    name: ClassVar[str] = "bernoulli"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rate < 1:
            raise ValueError(f"rate is the probability of dropping and must be between 0 and 1. Got {self.rate!r}.")
        if self.learn not in (None, "concrete", "reinforce"):
            raise ValueError(f'learn must be None, "concrete" or "reinforce". Got {self.learn!r}.')
        positive("temperature", self.temperature)

    def start(self, count: int) -> Params:
        """Return the logit of p; a fixed p has one too, which gives the number of gates."""
        return {"logit": torch.full((count,), math.log(self.rate / (1 - self.rate)))}

    def draw(self, own: Params, shape: tuple[int, ...]) -> Tensor:
        """Draw z = m/(1 − p); for "reinforce", differentiable in 1/(1 − p) alone."""
        logit = self._logit(own)
        u = uniform((*shape, logit.numel()), logit)
        if self.learn == "concrete":
            mask = torch.sigmoid((torch.logit(u) - logit) / self.temperature)
        else:
            mask = (u > torch.sigmoid(logit)).to(logit.dtype)
        return mask * (1 + bounded_exp(logit))

    def mean(self, own: Params) -> Tensor:
        """Return ones."""
        return torch.ones_like(self._logit(own))

    def variance(self, own: Params) -> Tensor:
        """Compute α = p/(1 − p)."""
        return bounded_exp(self._logit(own))

    def kl(self, own: Params) -> Tensor:
        """Compute Σ log 2 − H(p)."""
        logit = self._logit(own)
        entropy = F.softplus(logit) - logit * torch.sigmoid(logit)
        return (math.log(2) - entropy).sum()

    def score(self, own: Params) -> Tensor:
        """Compute 1 − p, the probability of being kept."""
        return torch.sigmoid(-self._logit(own))

    def opened(self, own: Params) -> Tensor:
        """Keep all gates open, unless the rate is learned."""
        score = self.score(own)
        return score > self.threshold if self.learn else torch.ones_like(score, dtype=torch.bool)

    def weight_kl(
        self,
        own: Params,
        mean: Tensor,
        std: Tensor | None,
        groups: Tensor,
        prior: Prior,
        others: Tensor | None = None,
    ) -> Tensor | None:
        """Compute the KL under a Normal prior of the effective weights z w̃."""
        if not isinstance(prior, Normal):
            return None
        alpha = self.variance(own)[groups]
        if others is not None:
            alpha = (1 + alpha) * others - 1
        weight = mean.to(alpha.dtype)
        usual = -prior.log_prob(weight).sum() if std is None else prior.kl(weight, std)
        square = weight.square() if std is None else weight.square() + std.square()
        return usual + 0.5 * (alpha * square / prior.setting_like("std", weight).square()).sum()

    @property
    def has_surrogate(self) -> bool:
        """True for "reinforce"."""
        return self.learn == "reinforce"

    def surrogate(self, own: Params, z: Tensor, losses: Tensor) -> Tensor | None:
        """Compute the mean of (L − b) log q(m), minus its own value.

        The baseline b is the mean loss of the other draws, 0 for a single draw.
        """
        if not self.has_surrogate:
            return None
        logit = self._logit(own)
        log_q = torch.where(z > 0, -F.softplus(logit), -F.softplus(-logit)).sum(-1)
        losses = losses.detach().to(log_q.dtype)
        others = losses.numel() - 1
        advantage = losses - (losses.sum() - losses) / others if others else losses
        term = (advantage * log_q).mean()
        return term - term.detach()

    def _logit(self, own: Params) -> Tensor:
        (logit,) = precise(own, "logit")
        if self.learn:
            return logit
        # A gradient of zero rather than none, since distributed training waits for that of every parameter.
        return torch.full_like(logit, math.log(self.rate / (1 - self.rate))) + 0 * logit
