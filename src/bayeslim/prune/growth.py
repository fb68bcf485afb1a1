"""The growth of saliencies in the course of a cut, by layer.

The saliency μ² / 2σ² is the cost of cutting one weight while all others compensate. As more weights of a layer go, the
rest compensates for less: variances shrink, and saliencies grow. They grow most in layers of strongly correlated
weights, which a global ranking by the saliencies of the whole network would cut too far.

So layers are compared by the saliencies in the middle of the cut. If a layer has the density d and the cut leaves the
fraction f of the network, that is at the density d √f. The growth of a layer is the geometric mean over its weights of
σ²(d) / σ²(d √f), with the variances of a random part of the weights (`KroneckerBlock.variance_at`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from bayeslim.posteriors import Conditioned, Kronecker, Posterior


def saliency_growth(posterior: Posterior, masks: Mapping[str, Tensor], fraction: float) -> dict[str, float]:
    """Compute the growth of each layer, by its weight's name.

    Args:
        posterior: a Kronecker posterior, conditioned or not. Other posteriors have no growth.
        masks: the weights that are left before the cut, True = kept; parameters without a mask are whole.
        fraction: the fraction of these that the cut leaves.
    """
    base = posterior.base if isinstance(posterior, Conditioned) else posterior
    found: dict[str, float] = {}
    for block in base.blocks if isinstance(base, Kronecker) else ():
        name = block.layer.weight
        density = float(masks[name].double().mean()) if name in masks else 1.0
        if density > 0:
            before, after = (block.variance_at(d).log().mean() for d in (density, density * math.sqrt(fraction)))
            found[name] = math.exp(float(before - after))
    return found
