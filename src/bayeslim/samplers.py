"""Samplers: optimizers whose iterates are draws from the posterior, for your own training loop.

The methods `bl.SGLD`, `bl.PSGLD`, `bl.SGHMC` and `bl.SGNHT` run them as chains with burn-in, thinning and several
starts, and keep the networks as a posterior.
"""

from bayeslim.methods.psgld import PreconditionedLangevin
from bayeslim.methods.sghmc import StochasticHamiltonian
from bayeslim.methods.sgld import Langevin
from bayeslim.methods.sgnht import Thermostat
from bayeslim.methods.shared.kept_networks import read
from bayeslim.methods.shared.normal_prior import weight_decay
from bayeslim.methods.shared.sampler import Sampler

__all__ = [
    "Langevin",
    "PreconditionedLangevin",
    "Sampler",
    "StochasticHamiltonian",
    "Thermostat",
    "read",
    "weight_decay",
]
