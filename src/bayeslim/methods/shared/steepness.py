"""How steep a loss is: that of Gaussian noise σ is 1/σ² times as steep as that of noise 1."""

from __future__ import annotations

from bayeslim.likelihoods import Gaussian, Likelihood


def flatness(likelihood: Likelihood) -> float:
    """Return σ² for Gaussian noise σ < 1, and 1 otherwise.

    A step times this factor is short enough for the steeper loss.
    """
    if isinstance(likelihood, Gaussian) and likelihood.mode != "heteroscedastic":
        return min(1.0, float(likelihood.noise.detach().min()) ** 2)  # networks that train together have one each
    return 1.0
