"""How steep a loss is: with Gaussian noise σ it is 1/σ² as steep as with noise 1, and its gradients are 1/σ as large.

Targets and weights in other units, σ y and σ w, have the same loss. With the rates below a chain takes σ times the
steps then, so that it is the same chain in other units.
"""

from __future__ import annotations

from bayeslim.likelihoods import Gaussian, Likelihood


def flatness(likelihood: Likelihood) -> float:
    """Return σ² for Gaussian noise σ < 1, and 1 otherwise.

    It is the factor on steps along gradients.
    """
    return relative_flatness(likelihood) ** 2


def relative_flatness(likelihood: Likelihood) -> float:
    """Return σ for Gaussian noise σ < 1, and 1 otherwise.

    It is the factor on steps along gradients over their size.
    """
    if isinstance(likelihood, Gaussian) and likelihood.mode != "heteroscedastic":
        return min(1.0, float(likelihood.noise.detach().min()))  # networks that train together have one each
    return 1.0
