"""The diagonal of the Hessian, by random probing.

    diag H = E[z ⊙ H z]          z with independent random signs, H z by differentiating the gradient along z

Exact in expectation; exact outright where H is diagonal. Unlike the generalised Gauss-Newton it may have negative
entries.

Hutchinson 1989 · Bekas, Kokiopoulou & Saad 2007
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bayeslim.curvature.sweep import batches, seeded, sum_over_processes, undisturbed
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
    """Estimate the diagonal of the Hessian of −Σ log p(y|f); the arguments are those of `diag`."""
    if probes < 1:
        raise ValueError(f"probes must be at least 1. Got {probes}.")
    known = dict(model.named_parameters())
    params = {name: known[name].detach().requires_grad_() for name in names}
    total = {name: torch.zeros_like(p, dtype=dtype, requires_grad=False) for name, p in params.items()}
    generator = seeded(seed)
    # fused attention kernels cannot be differentiated twice
    with undisturbed(model), sdpa_kernel(SDPBackend.MATH):
        for inputs, targets in batches(model, loader, "Hessian", progress):
            loss = -likelihood.log_prob(call(model, inputs, params), targets).sum()
            slopes = torch.autograd.grad(loss, list(params.values()), create_graph=True, materialize_grads=True)
            for _ in range(probes):
                signs = [_signs(p, generator) for p in params.values()]
                along = sum((s * z).sum() for s, z in zip(slopes, signs, strict=True))
                if not isinstance(along, torch.Tensor) or not along.requires_grad:
                    continue  # the loss is linear in every parameter
                products = torch.autograd.grad(along, list(params.values()), retain_graph=True, materialize_grads=True)
                for name, z, product in zip(params, signs, products, strict=True):
                    total[name] += (z * product).to(dtype) / probes
    sum_over_processes(*total.values())
    return total


def _signs(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    bits = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8)
    return bits.to(like.device, like.dtype).mul_(2).sub_(1)
