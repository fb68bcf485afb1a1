"""The diagonal of the Hessian, by random probing.

    diag H = E[z ⊙ H z]          z with independent random signs, H z by differentiating the gradient along z

Exact in expectation; exact outright where H is diagonal. Unlike the generalised Gauss-Newton it may have negative
entries.

Hutchinson 1989 · Bekas, Kokiopoulou & Saad 2007
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from bayeslim.curvature.columns import signs as random_signs
from bayeslim.curvature.second_derivatives import TwiceDifferentiable, check_not_once_differentiable
from bayeslim.curvature.sweep import data_pass, seeded, sum_over_processes
from bayeslim.errors import UnsupportedModel
from bayeslim.likelihoods import Likelihood
from bayeslim.types import Batch, Params, call


def hutchinson(
    model: nn.Module,
    loader: Iterable[Batch],
    likelihood: Likelihood,
    names: Iterable[str],
    *,
    probes: int,
    dtype: torch.dtype,
    seed: int,
    progress: bool,
) -> Params:
    """Estimate the diagonal of the Hessian of −Σ log p(y|f).

    The arguments are those of `diag`.
    """
    if probes < 1:
        raise ValueError(f"probes must be at least 1. Got {probes}.")
    known = dict(model.named_parameters())
    params = {name: known[name].detach().requires_grad_() for name in names}
    total = {name: torch.zeros_like(p, dtype=dtype, requires_grad=False) for name, p in params.items()}
    generator = seeded(seed)
    with data_pass(model, loader, "Hessian", progress) as (twin, data), TwiceDifferentiable():
        for inputs, targets in data:
            loss = -likelihood.log_prob(call(twin, inputs, params), targets).sum()
            for signs, products in _products(loss, list(params.values()), probes, generator):
                for name, z, product in zip(params, signs, products, strict=True):
                    total[name] += (z * product).to(dtype) / probes
    sum_over_processes(*total.values())
    return total


def _products(
    loss: Tensor, params: list[Tensor], probes: int, generator: torch.Generator
) -> Iterator[tuple[list[Tensor], tuple[Tensor, ...]]]:
    """Yield random signs z and H z; nothing for a loss linear in every parameter."""
    try:
        slopes = torch.autograd.grad(loss, params, create_graph=True, materialize_grads=True)
        check_not_once_differentiable(*slopes)
        for _ in range(probes):
            signs = [random_signs(p.shape, generator, p) for p in params]
            along = torch.stack([(s * z).sum() for s, z in zip(slopes, signs, strict=True)]).sum()
            if along.requires_grad:
                yield signs, torch.autograd.grad(along, params, retain_graph=True, materialize_grads=True)
    except RuntimeError as error:
        raise UnsupportedModel(
            "The Hessian's diagonal needs second derivatives, and an operation of the model cannot be differentiated "
            f'twice ({error}). Use kind="ggn", which needs first derivatives only.'
        ) from error
