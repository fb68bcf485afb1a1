"""Priors p(w) of the weights.

A prior is data; `log_prob` is elementwise, and `kl` is KL(q ‖ p) for a diagonal Gaussian q, summed over the weights: in
closed form where one exists, else by Monte Carlo.

`bayesianize(prior=...)` takes one prior for the whole model, or a dict from selections of parameters (names, modules,
regular expressions, as in `sites`) to priors, of which the first that matches counts.

Hyperparameters of every proper prior can be learned with the weights: `priors.Normal(1.0, learn=True)` has one standard
deviation for all parameters that it is the prior of, `priors.per_layer(...)` one for every layer, and
`bnn.priors["fc.weight"].std` is its present value.
"""

from bayeslim.priors.assignment import PriorSpec, per_layer, per_parameter, resolve
from bayeslim.priors.base import Prior
from bayeslim.priors.distribution import Distribution
from bayeslim.priors.laplace import Laplace
from bayeslim.priors.learnable import Learnable
from bayeslim.priors.log_uniform import LogUniform
from bayeslim.priors.normal import Normal
from bayeslim.priors.relevance import RelevanceDetermination
from bayeslim.priors.scale_mixture import ScaleMixture
from bayeslim.priors.soft_sharing import SoftSharing
from bayeslim.priors.student_t import StudentT
from bayeslim.priors.table import Priors

__all__ = [
    "Distribution",
    "Laplace",
    "Learnable",
    "LogUniform",
    "Normal",
    "Prior",
    "PriorSpec",
    "Priors",
    "RelevanceDetermination",
    "ScaleMixture",
    "SoftSharing",
    "StudentT",
    "per_layer",
    "per_parameter",
    "resolve",
]
