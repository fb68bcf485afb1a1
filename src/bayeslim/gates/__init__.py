"""Gates, one file each: random scales z of groups of weights.

Training closes the gates of groups that the network does not need.

    NormalJeffreys          Gaussian scales, flat prior of log |z|: Bayesian compression
    HalfCauchy              log-normal scales under the horseshoe prior
    TruncatedLogNormal      log-normal noise on an interval: structured Bayesian pruning
    HardConcrete            gates that are exactly zero at times: the L0 norm
    InformationBottleneck   Gaussian scales that pay for information
    Bernoulli               binary dropout, with a rate that may be learned

A gate is mathematics alone; where gates stand in a network is in `placement`.
"""

from bayeslim.gates.base import Gate
from bayeslim.gates.bernoulli import Bernoulli
from bayeslim.gates.half_cauchy import HalfCauchy
from bayeslim.gates.hard_concrete import HardConcrete
from bayeslim.gates.information_bottleneck import InformationBottleneck
from bayeslim.gates.normal_jeffreys import NormalJeffreys
from bayeslim.gates.truncated_log_normal import TruncatedLogNormal

__all__ = [
    "Bernoulli",
    "Gate",
    "HalfCauchy",
    "HardConcrete",
    "InformationBottleneck",
    "NormalJeffreys",
    "TruncatedLogNormal",
]
