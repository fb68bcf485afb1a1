"""Rényi bounds of the evidence: one for every order α. The ELBO is α = 1.

    L_α = log p(D) − D_α(q ‖ p(·|D)) = 1/(1−α) log E_q[ (p(D, w) / q(w))^(1−α) ]

falls as α rises. It is a lower bound of log p(D) for α > 0, log p(D) itself at α = 0 whatever q is, and an *upper*
bound for α < 0. A large α fits one mode from within, α → 0 fits the posterior's own marginals, and the minimum of the
upper bounds covers all of the posterior's mass.

From K draws of all weights, shared by all the data,

    L̂_α = 1/(1−α) log 1/K Σ_k exp((1−α) log w_k),      log w_k = log p(D|w_k) + log p(w_k) − log q(w_k),

whose limits are the mean of log w (α = 1), its smallest (α = +∞) and its largest value (α = −∞, "VR-max"); α = 0 is the
importance-weighted bound. The estimate is biased, and at K = 1 always the ELBO's: for α < 1 it rises with K to L_α, for
α > 1 it falls. Its expectation is

    α ≥ 0       never above log p(D): a lower bound for every K
    α < 0       between the ELBO and the upper bound L_α, on either side of log p(D): no bound.

*Maximising* the estimate at α < 0, as is done for networks, is a heuristic: at K → ∞ it would drive an upper bound up,
and the fit depends on K. From a minibatch log p(D|w) is itself an estimate, N/B Σ log p(y|x,w), and inside the
exponential that is a further bias: bounds are those of the whole data (`log_evidence`).

Each log-weight needs the densities at its own draw. A KL in closed form in their place would leave only the data term
to differ between draws, and the result would not be a bound.

Li & Turner 2016, arXiv:1602.02311 · Burda, Grosse & Salakhutdinov 2016, arXiv:1509.00519
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def check(alpha: float) -> None:
    """Raise unless `alpha` is a real number or ±inf."""
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or math.isnan(alpha):
        raise ValueError(f"renyi is an order α, any number or ±inf; 1 is the ELBO. Got {alpha!r}.")


def is_lower_bound(alpha: float) -> bool:
    """Check whether the expected estimate is at most log p(D) for any number of draws."""
    return alpha >= 0


def kind(alpha: float) -> str:
    """Name an evidence that is estimated at α."""
    return {1.0: "elbo", 0.0: "importance-weighted"}.get(float(alpha), f"renyi {alpha:g}")


def bound(log_weights: Tensor, alpha: float, log_shares: Tensor | None = None) -> Tensor:
    """Compute L̂_α from the log-weights (K, ...) of K draws, over the first dimension.

    Args:
        log_weights: log p(D, w_k) − log q(w_k).
        alpha: the order.
        log_shares: the logs of the draws' weights, (K,), which sum to one, for draws from the components of a mixture;
            equal if not given.

    >>> bound(torch.tensor([1.0, 3.0]), alpha=1.0)
    tensor(2.)
    >>> bound(torch.tensor([1.0, 3.0]), alpha=float("inf"))
    tensor(1.)
    """
    if log_shares is None:
        log_shares = log_weights.new_full((len(log_weights),), -math.log(len(log_weights)))
    shares = log_shares.view(-1, *[1] * (log_weights.ndim - 1))
    if alpha == 1:
        return (shares.exp() * log_weights).sum(0)
    if math.isinf(alpha):
        return log_weights.amin(0) if alpha > 0 else log_weights.amax(0)
    centre = log_weights.detach().mean(0)
    powers = (1 - alpha) * (log_weights - centre)
    # An α next to one would divide rounding errors: there log Σ s eᶻ = log(1 + Σ s (eᶻ − 1)) keeps the digits of z.
    near = (shares.exp() * torch.expm1(powers.clamp(-0.5, 0.5))).sum(0).log1p()
    small = powers.detach().abs().amax(0) < 0.5
    return centre + torch.where(small, near, (shares + powers).logsumexp(0)) / (1 - alpha)


def influence(log_weights: Tensor, alpha: float, log_shares: Tensor) -> Tensor:
    """Compute each draw's share in L̂_α, ∂L̂_α / ∂log w_k, (K,), of sum one."""
    if math.isinf(alpha):
        chosen = log_weights.argmin(0) if alpha > 0 else log_weights.argmax(0)
        return F.one_hot(chosen, len(log_weights)).to(log_weights.dtype)
    return (log_shares + (1 - alpha) * log_weights).softmax(0)


def standard_error(log_weights: Tensor, alpha: float) -> float:
    """Estimate L̂_α's standard error by the delta method; infinite if unknown."""
    count = len(log_weights)
    if count == 1 or math.isinf(alpha):
        return math.inf
    if alpha == 1:
        return float(log_weights.std()) / math.sqrt(count)
    powers = ((1 - alpha) * (log_weights - bound(log_weights, alpha))).exp()  # of mean one
    return float(powers.std()) / math.sqrt(count) / abs(1 - alpha)


def log_shares(log_weights: Tensor, samples: int) -> Tensor:
    """Compute `log_shares` of equal draws from C components, (C · samples,)."""
    return log_weights.repeat_interleave(samples) - math.log(samples)
