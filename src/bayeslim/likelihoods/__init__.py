"""Likelihoods p(y | f) of targets y given a network's outputs f.

Each one turns outputs f into per-example log-probabilities, summarises draws of outputs into a `Prediction`, and, for
curvature methods, gives the Hessian of −log p(y|f) in the outputs as a square root: columns s_k with H = Σ_k s_k s_kᵀ.

Examples are the first dimension. All further dimensions (positions in a sequence, several targets) belong to one
example and are summed, so that an example counts once in `num_data`.
"""

from bayeslim.likelihoods.base import Likelihood
from bayeslim.likelihoods.bernoulli import Bernoulli
from bayeslim.likelihoods.categorical import Categorical
from bayeslim.likelihoods.gaussian import Gaussian
from bayeslim.likelihoods.poisson import Poisson

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Likelihood", "Poisson"]
