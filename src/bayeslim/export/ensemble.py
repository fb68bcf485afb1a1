"""A posterior as one plain network: S draws and their averaged prediction.

    p(y | x, D) ≈ 1/S Σ_s p(y | x, w_s),      w_s ~ q

The outputs are those of `predict`: for classes the mean probabilities and the total, aleatoric and epistemic entropy;
for values the mean and the variance in its two parts. The module is deterministic, so that it can be exported.
Parameters that are not random are kept once. For particles the members are the particles, each once.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimWarning, UnsupportedModel
from bayeslim.likelihoods import Likelihood
from bayeslim.methods.laplace import Laplace
from bayeslim.methods.shared.point_network import PointNetwork
from bayeslim.noise import drawing_from
from bayeslim.posteriors.particles import Particles, tensors_of
from bayeslim.predict.predict import draws_of
from bayeslim.types import Inputs, Params, call

OUTPUTS = ("mean", "variance", "entropy", "aleatoric", "epistemic")
"""The outputs of an ensemble, in this order; see `bayeslim.Prediction`."""


class Ensemble(nn.Module):
    """Networks that predict together, as a plain module.

    Args:
        members: the networks; parameters they share are kept once.
        likelihood: the likelihood of their outputs.
    """

    def __init__(self, members: list[nn.Module], likelihood: Likelihood):
        super().__init__()
        self.members = nn.ModuleList(members)
        self.likelihood = likelihood

    def forward(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Compute `OUTPUTS`, each (B, ...)."""
        outputs = torch.stack([call(member, inputs) for member in self.members])
        prediction = self.likelihood.predict(outputs)
        return tuple(getattr(prediction, name) for name in OUTPUTS)


def ensemble(bnn: Bayesian, samples: int | None = None, generator: torch.Generator | None = None) -> Ensemble:
    """Draw networks from a posterior and put them into one module.

    With the same generator (or seed) these are the networks that `predict(bnn, x, samples, how="sample")` averages.

    Args:
        bnn: the Bayesian network.
        samples: the number of networks, S. Each particle is taken once, all of them if not given.
        generator: the source of randomness.
    """
    if isinstance(bnn.method, PointNetwork):
        raise UnsupportedModel(
            f"{bnn.method.name} has no random weights, so there are no networks to put into one "
            "graph. Export bnn.mean_network(), or a student of it: bl.distill(bnn, loader)."
        )
    posterior = bnn.state.get("networks", bnn.posterior_)  # some methods keep networks with measured batch norms
    if samples is None:
        if not isinstance(posterior, Particles):
            raise ValueError(
                f"A {posterior.kind} posterior has no fixed number of networks. Pass samples=8, or another number."
            )
        samples = posterior.count
    if samples < 1:
        raise ValueError(f"samples must be at least 1. Got {samples}.")
    if isinstance(bnn.method, Laplace):
        warnings.warn(
            "A Laplace posterior predicts with the linearised network, for which it was made. An exported ensemble "
            "draws whole networks from it instead, as predict(how='sample') does. These predict worse.",
            BayeslimWarning,
            stacklevel=4,
        )
    first = bnn.mean_network().eval()
    draws: Iterable[Params]
    if isinstance(posterior, Particles):
        names = (*posterior.values, *posterior.buffers)
        draws = (posterior.network(k, first) for k in posterior.spread(samples))
    else:
        names = posterior.names
        draws = draws_of(posterior, bnn.model, samples, generator)
    own = tensors_of(first)
    random = {id(own[name]) for name in names}
    fixed = {id(t): t for t in (*first.parameters(), *first.buffers()) if id(t) not in random}
    members = []
    with torch.no_grad(), drawing_from(generator):
        for draw in draws:
            member = copy.deepcopy(first, dict(fixed))
            tensors = tensors_of(member)
            for name, value in draw.items():
                tensors[name].copy_(value)
            members.append(member)
    return Ensemble(members, copy.deepcopy(bnn.likelihood)).eval()
