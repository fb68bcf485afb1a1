"""Samplers: optimizers whose iterates are draws from the posterior, for your own training loop.

The methods `bl.SGLD`, `bl.PSGLD`, `bl.SGHMC` and `bl.SGNHT` run them as chains with burn-in, thinning and several
starts, and keep the networks as a posterior.

A sampler of your own is a subclass of `Sampler`; a subclass of `ChainMethod` makes a method of it.
"""

from bayeslim.methods.psgld import PreconditionedLangevin
from bayeslim.methods.sghmc import StochasticHamiltonian
from bayeslim.methods.sgld import Langevin
from bayeslim.methods.sgnht import Thermostat
from bayeslim.methods.shared.chain_method import ChainMethod
from bayeslim.methods.shared.kept_networks import read
from bayeslim.methods.shared.normal_prior import weight_decay
from bayeslim.methods.shared.sampler import Sampler

__all__ = [
    "ChainMethod",
    "Langevin",
    "PreconditionedLangevin",
    "Sampler",
    "StochasticHamiltonian",
    "Thermostat",
    "read",
    "weight_decay",
]
