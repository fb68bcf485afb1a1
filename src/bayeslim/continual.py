"""Continual learning: the posterior of the data so far is the prior of new data.

    p(w | D₁, D₂) ∝ p(D₂ | w) p(w | D₁)

    bnn = bl.load("yesterday/")
    bnn = bl.continual.update(bnn, todays_loader, epochs=5)
    bl.save(bnn, "today/")

The method determines what `update` does:

    Laplace(structure="kron")   online Kronecker-factored Laplace (Ritter, Botev & Barber 2018, arXiv:1805.07810): train
                                on −log p(D₂|w) + ½ (w − μ)ᵀ P (w − μ), then add the curvature of the new data to P
    Laplace(structure="diag")   the same with a diagonal P: online elastic weight consolidation (Schwarz et al. 2018,
                                arXiv:1805.06370), or, with centre="product", a penalty for every task around its own
                                optimum, as in Kirkpatrick et al. 2017, arXiv:1612.00796 (their sum is one quadratic)
    Variational()               variational continual learning (Nguyen et al. 2018, arXiv:1710.10628): the KL is to the
                                last q. Parameters trained as points are free to drift: use sites="all". A q with
                                correlated weights is remembered by the mean and spread of each weight
"""

from __future__ import annotations

import copy
from functools import singledispatch
from typing import Any, Literal

import torch

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError
from bayeslim.families import Point
from bayeslim.methods.base import Method
from bayeslim.methods.laplace import Laplace
from bayeslim.methods.shared.curvature_posterior import measured, prior_precisions
from bayeslim.methods.variational import Variational
from bayeslim.posteriors import Gaussian
from bayeslim.posteriors.pooled import pooled
from bayeslim.priors import Normal
from bayeslim.train import fit as train
from bayeslim.types import Params

Centre = Literal["latest", "product"]


def update(
    bnn: Bayesian,
    loader: Any,
    *,
    strength: float = 1.0,
    centre: Centre = "latest",
    **training: Any,
) -> Bayesian:
    """Learn from new data without forgetting the old.

    The result is a new network, whose posterior is that of all data so far.

    Args:
        bnn: a fitted Bayesian network; it is not touched.
        loader: the new data alone.
        strength: a factor on the log-density of the old posterior while training; 1 is Bayes' rule.
        centre: for Laplace, the centre of the old posterior: the network after the "latest" task, or the "product" of
            all tasks' Gaussians.
        **training: options of `bayeslim.train.fit`, such as epochs and lr.
    """
    if not isinstance(bnn, Bayesian):
        raise TypeError(f"update needs a Bayesian network. Got {type(bnn).__name__}.")
    if not strength > 0:
        raise ValueError(f"strength must be positive. Got {strength}.")
    if centre not in ("latest", "product"):
        raise ValueError(f'centre must be "latest" or "product". Got {centre!r}.')
    if bnn.num_data is None:
        raise BayeslimError("The network has seen no data yet: call bnn.fit(loader) on the first task.")
    return _update(bnn.method, copy.deepcopy(bnn), loader, strength, centre, training)


@singledispatch
def _update(
    method: Method, bnn: Bayesian, loader: Any, strength: float, centre: Centre, training: dict[str, Any]
) -> Bayesian:
    """Update a copy in place; register a method's type here for continual learning."""
    raise BayeslimError(f"{method.name} cannot learn continually. Use Laplace or Variational.")


@_update.register
def _(
    method: Variational, bnn: Bayesian, loader: Any, strength: float, centre: Centre, training: dict[str, Any]
) -> Bayesian:
    if method.gates is not None:
        raise BayeslimError(
            "A network with gates cannot learn continually: the posterior of its scaled weights is no prior of the "
            "weights before they are scaled. Use Variational without gates, or Laplace on bnn.mean_network()."
        )
    if isinstance(method.family, Point):
        raise BayeslimError("Weights that are points have no posterior to learn from. Use families.DiagonalGaussian().")
    seen = bnn.data_size()
    last = bnn.posterior_
    stds = {**last.std}
    for name in bnn.masks.keys() & stds.keys():
        stds[name] = stds[name].masked_fill(~bnn.masks[name], 1.0)  # any: the KL leaves out what was cut
    # A power of a Gaussian is a Gaussian with a smaller spread.
    bnn.priors = {name: Normal(stds[name] * strength**-0.5, last.mean[name].clone()) for name in bnn.priors}
    bnn.num_data_given, bnn.step = False, 0
    train.fit(bnn, loader, **training)
    bnn.num_data = seen + bnn.data_size()
    return bnn


@_update.register
def _(
    method: Laplace, bnn: Bayesian, loader: Any, strength: float, centre: Centre, training: dict[str, Any]
) -> Bayesian:
    seen, memory = bnn.data_size(), bnn.posterior_
    anchor = bnn.state.pop("anchor", memory)
    assert isinstance(memory, Gaussian)
    assert isinstance(anchor, Gaussian)
    bnn.num_data_given, bnn.step = False, 0
    bnn.anchor = (anchor, strength)
    try:
        train.fit(bnn, loader, **training)
    finally:
        bnn.anchor = None
    new = measured(bnn, method, loader).posterior
    sizes = (seen, bnn.data_size())
    bnn.state["posterior"] = pooled(memory, new, sizes, new.mean)
    if centre == "product":
        bnn.state["anchor"] = pooled(memory, new, sizes, _product_mean(bnn, anchor, new))
    bnn.num_data = sum(sizes)
    return bnn


def _product_mean(bnn: Bayesian, anchor: Gaussian, new: Gaussian) -> Params:
    """Find the centre c' of N(c, P₁⁻¹) times exp(−½ (w − μ)ᵀ H (w − μ)).

    It solves (P₁ + H) c' = P₁ c + H μ, with P₂ = H + δ.
    """
    together = pooled(anchor, new, (1, 1), new.mean)
    remembered, learned = anchor.precision_product(anchor.mean), new.precision_product(new.mean)
    prior = prior_precisions(bnn, new.mean)
    pull = {}
    for name, value in new.mean.items():
        delta = torch.as_tensor(prior[name], dtype=value.dtype, device=value.device)
        pull[name] = remembered[name] + learned[name] - delta * value
    centre = together.covariance_product(pull)
    return {name: centre[name].to(value.dtype) for name, value in new.mean.items()}
