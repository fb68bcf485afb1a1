"""Normal priors as the weight decay of a sampler: one pass over the weights, where the loss takes several."""

from __future__ import annotations

from bayeslim.bayesian import Bayesian
from bayeslim.priors import Normal, Prior


def weight_decay(bnn: Bayesian) -> float | None:
    """Return λ = 1 / (s² N) for a sampler whose loss omits the prior.

    It is None unless the prior is N(0, s²) for all weights.

    For your own loop:

        sampler = bnn.optimizer(lr)
        sampler.param_groups[0]["weight_decay"] = bl.samplers.weight_decay(bnn)
        ...
        bnn.loss(batch, kl_weight=0).backward()
    """
    if bnn.anchor is not None or len(bnn.priors.learned):
        return None
    stds = {_scale(prior) for prior in bnn.priors.given.values()}
    std = stds.pop() if len(stds) == 1 else None
    return None if std is None else 1 / (std**2 * bnn.data_size())


def _scale(prior: Prior) -> float | None:
    """Return the scale of a simple Normal prior, else None."""
    simple = type(prior) is Normal and isinstance(prior.std, (int, float)) and isinstance(prior.mean, (int, float))
    return float(prior.std) if isinstance(prior, Normal) and simple and prior.mean == 0 else None
