"""Samplers: optimizers whose iterates are draws from the posterior.

For chains with burn-in, thinning and several starts, kept as a posterior, use the methods `bl.SGLD`, `bl.PSGLD`,
`bl.SGHMC` and `bl.SGNHT`; these are the steps they are made of, for training loops of one's own.
"""

from bayeslim.samplers.base import Sampler
from bayeslim.samplers.chain import read
from bayeslim.samplers.hamiltonian import StochasticHamiltonian
from bayeslim.samplers.langevin import Langevin
from bayeslim.samplers.preconditioned import PreconditionedLangevin
from bayeslim.samplers.prior import weight_decay
from bayeslim.samplers.thermostat import Thermostat

__all__ = [
    "Langevin",
    "PreconditionedLangevin",
    "Sampler",
    "StochasticHamiltonian",
    "Thermostat",
    "read",
    "weight_decay",
]
