"""The ELBO from draws of all weights together: correlated weights, mixtures, and Rényi bounds of every order.

A Rényi bound weighs draws of all weights by their densities (`evidence/renyi.py`):

    L_α = 1/(1 − α) · log E_q[(p(D|w) p(w) / q(w))^(1 − α)]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.evidence import renyi
from bayeslim.families.base import log_prior
from bayeslim.methods.base import Terms
from bayeslim.sites import tensor_at
from bayeslim.types import Inputs, Params, call

if TYPE_CHECKING:
    from bayeslim.methods.variational import Variational


def full_weight_terms(
    method: Variational, bnn: Bayesian, inputs: Inputs, targets: Tensor, kl_weight: float | Tensor, num_data: int
) -> Terms:
    """Compute the bound from K draws of all weights from every component.

    The terms are −L_α / N in two parts. The first is log q(w) − log p(w), averaged by each draw's influence on the
    bound (at α = 1 the KL, in closed form for a Gaussian family). The second is the rest: the NLL, averaged in the same
    way, and a term for the preference between draws, at most log K / (N |1 − α|).
    """
    q = method.family.density(bnn.model, bnn.sites.names, bnn.masks)
    kl = q.kl(bnn.priors) if method.renyi == 1 else None
    log_likelihoods, excess = [], []
    for component in range(len(q.log_weights)):
        noise: Params = {}
        for k in range(method.samples):
            mirror = method.antithetic and k % 2 == 1
            noise = {n: -e for n, e in noise.items()} if mirror else q.noise()
            draw = q.draw(noise, component)
            outputs = call(bnn.model, inputs, as_parameters(bnn, draw.weights))
            log_likelihoods.append(bnn.likelihood.log_prob(outputs, targets).mean())
            if kl is None:
                excess.append(q.log_prob(draw) - log_prior(bnn.priors, draw.weights, bnn.masks))
    data = torch.stack(log_likelihoods).to(q.log_weights.dtype)
    kl_weight = kl_weight.to(data) if isinstance(kl_weight, Tensor) else kl_weight
    if kl is not None:
        return Terms(-data.mean(), kl, kl_weight, num_data)
    over, log_shares = torch.stack(excess), renyi.log_shares(q.log_weights, method.samples)
    # Means are subtracted from the log-weights: they are large, and only differences between draws matter.
    shares = log_shares.detach().exp()
    mean_data, mean_over = (shares * data).sum().detach(), (shares * over).sum().detach()
    log_weights = num_data * (data - mean_data) - kl_weight * (over - mean_over)
    gain = renyi.bound(log_weights, method.renyi, log_shares)
    kl = (renyi.influence(log_weights, method.renyi, log_shares) * over).sum().detach()
    nll = (kl_weight * (mean_over - kl) - gain) / num_data - mean_data
    return Terms(nll, kl, kl_weight, num_data)


def as_parameters(bnn: Bayesian, weights: Params) -> Params:
    """Cast weights to the dtypes of the network's own parameters."""
    return {name: value.to(tensor_at(bnn.model, name).dtype) for name, value in weights.items()}
