"""A posterior as one plain network: S draws of the weights side by side, and what they say together.

    p(y | x, D) ≈ 1/S Σ_s p(y | x, w_s),      w_s ~ q

The outputs are those of `predict`: for classes the mean probabilities and the total, aleatoric and epistemic entropy;
for values the mean and the variance in its two parts. Nothing is random any more, so that it can be exported.
Parameters that are not random are kept once. Of a posterior made of particles the networks are these, each once.
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
from bayeslim.predict.predict import stacks_of, unstacked
from bayeslim.types import Inputs, Params, call

OUTPUTS = ("mean", "variance", "entropy", "aleatoric", "epistemic")
"""What an ensemble returns, in this order; see `bayeslim.Prediction`."""


class Ensemble(nn.Module):
    """Networks that predict together, as a plain module.

    Args:
        members: the networks; parameters they share are kept once.
        likelihood: what their outputs mean.
    """

    def __init__(self, members: list[nn.Module], likelihood: Likelihood):
        super().__init__()
        self.members = nn.ModuleList(members)
        self.likelihood = likelihood

    def forward(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Mean, variance, entropy, aleatoric and epistemic uncertainty of a prediction, each (B, ...)."""
        outputs = torch.stack([call(member, inputs) for member in self.members])
        prediction = self.likelihood.predict(outputs)
        return tuple(getattr(prediction, name) for name in OUTPUTS)


def ensemble(bnn: Bayesian, samples: int | None = None, generator: torch.Generator | None = None) -> Ensemble:
    """Draw networks from a posterior, once and for all.

    With the same generator (or seed) these are the networks that `predict(bnn, x, samples, how="sample")` averages.

    Args:
        bnn: the Bayesian network.
        samples: how many networks, S. Of particles each is taken once, all of them if not given.
        generator: where the random numbers come from.
    """
    if isinstance(bnn.method, PointNetwork):
        raise UnsupportedModel(
            f"What is random in {bnn.method.name} lies beside its weights, so there are no networks to put into one "
            "graph. Export bnn.mean_network(), or a student of it: bl.distill(bnn, loader)."
        )
    posterior = bnn.state.get("networks", bnn.posterior_)  # networks that were measured, where a method has drawn such
    if samples is None:
        if not isinstance(posterior, Particles):
            raise ValueError(f"A {posterior.kind} posterior has no number of networks: pass samples=8, or how many.")
        samples = posterior.count
    if samples < 1:
        raise ValueError(f"samples must be at least 1. Got {samples}.")
    if isinstance(bnn.method, Laplace):
        warnings.warn(
            "A Laplace posterior predicts with the linearised network, for which it was made. An exported ensemble "
            "draws whole networks from it instead, as predict(how='sample') does, which predict worse.",
            BayeslimWarning,
            stacklevel=3,
        )
    first = bnn.mean_network().eval()
    draws: Iterable[Params]
    if isinstance(posterior, Particles):
        names = (*posterior.values, *posterior.buffers)
        draws = (posterior.network(k, first) for k in posterior.spread(samples))
    else:
        names = posterior.names
        stacks = stacks_of(posterior, bnn.model, samples, generator)
        draws = (network for stack in stacks for network in unstacked(stack))
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
