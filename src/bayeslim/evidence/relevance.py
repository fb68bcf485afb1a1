"""Automatic relevance determination: a prior precision for every weight or unit, by the marginal likelihood.

A diagonal Laplace posterior has the curvature h_i of every weight, and the evidence falls into a sum over weights,

    log p(D) = log p(D|w*) + ½ Σ_i [log δ_i − δ_i (w*_i − m_i)² − log(h_i + δ_i)].

For the weights of a group g that share δ its derivative in log δ is ½ Σ_(i in g) [h_i / (h_i + δ) − δ (w*_i − m_i)²],
which falls in δ and has one root. For a single weight with off = w* − m it is

    δ = 2 h / (h off² + √(h² off⁴ + 4 h off²)),

and for the rows of a layer it is found by bisection. Weights that the data determine little get a large precision,
which pulls them to zero when training goes on under it: a network trained so can be cut further. Neither a weight that
the data do not determine at all (h = 0) nor one that is at the prior's centre has an optimum; precisions stay between
e^−25 and e^25.

MacKay 1992 · Dhahri, Immer, Charpentier, Günnemann & Fortuin 2024, arXiv:2402.15978
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from bayeslim.evidence.marginal_likelihood import MAX_LOG, DataTerm, Tuned, log_marginal_likelihood
from bayeslim.posteriors import Conditioned, Gaussian, Kronecker

Per = Literal["network", "layer", "unit", "weight"]
"""The weights that share a prior precision."""

BISECTIONS = 60
"""Halvings of the interval of log δ, 50 wide: the last is below the rounding of float64."""


def maximise_relevance(
    posterior: Gaussian, prior_mean: Mapping[str, float | Tensor], data: DataTerm, per: Per
) -> Tuned:
    """Find the prior precision of every weight or unit with the largest evidence.

    Vectors (biases, norms) have one precision each.

    Args:
        posterior: a diagonal posterior, `Laplace("diag")`; cut weights keep no precision of their own.
        prior_mean: the prior's centre by parameter name.
        data: log p(D|w*).
        per: "weight" or "unit", a row of the parameter.
    """
    base = posterior.base if isinstance(posterior, Conditioned) else posterior
    if not isinstance(base, Kronecker) or base.blocks:
        raise TypeError(
            f"A prior precision for every {per} needs the curvature's diagonal. Got a {type(base).__name__} posterior. "
            'Use bl.Laplace("diag").'
        )
    found = {}
    for name, mean in posterior.mean.items():
        off = mean.double() - torch.as_tensor(prior_mean[name]).to(mean.device, torch.float64)
        curvature, kept = base.rest_curvature[name].double().clamp(min=0), posterior.support[name]
        if per == "weight" and mean.ndim > 1:
            found[name] = of_weights(curvature, off.square())
        else:
            rows = mean.shape[0] if mean.ndim > 1 else 1
            each = of_groups(*(value.reshape(rows, -1) for value in (curvature, off.square(), kept)))
            found[name] = each.reshape(-1, *[1] * (mean.ndim - 1)) if mean.ndim else each.reshape(())
    tuned = posterior.with_prior_precision(found)
    evidence = log_marginal_likelihood(data.value, tuned, prior_mean)
    return Tuned(found, None, float(evidence), tuned)


def of_weights(curvature: Tensor, squares: Tensor) -> Tensor:
    """Compute the best precision of single weights from h and off², in closed form."""
    product = curvature * squares
    log = (2 * curvature).log() - (product + (product.square() + 4 * product).sqrt()).log()
    # no curvature: any precision is as good where the weight is at the centre, and none elsewhere
    return log.nan_to_num(-MAX_LOG, posinf=MAX_LOG, neginf=-MAX_LOG).clamp(-MAX_LOG, MAX_LOG).exp()


def of_groups(curvature: Tensor, squares: Tensor, kept: Tensor) -> Tensor:
    """Compute the best precision of each row of h and off², by bisection."""
    h, total = curvature * kept, (squares * kept).sum(1)
    low, high = torch.full_like(total, -MAX_LOG), torch.full_like(total, MAX_LOG)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        delta = middle.exp()
        rises = (h / (h + delta[:, None])).sum(1) > delta * total
        low, high = torch.where(rises, middle, low), torch.where(rises, high, middle)
    return ((low + high) / 2).exp()
