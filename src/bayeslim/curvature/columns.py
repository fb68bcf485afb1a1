"""Columns at the outputs, whose outer products are the curvature of the likelihood.

The generalised Gauss-Newton of one example is Jᵀ H J with H = −∇²_f log p(y|f) = Σ_k s_k s_kᵀ, so a backward pass of
every column s_k gives all of it. There are four kinds of columns:

    "exact"      s_k, one after another: the GGN itself, K backward passes (times the positions of a sequence or image).
    "signs"      one column Σ_k ε_k s_k with random signs ε: E[v vᵀ] = H, one backward pass, and no label is sampled, so
                 that confident predictions keep a low variance.
    "sampled"    ∇_f −log p(ŷ|f) with ŷ ~ p(y|f): the Fisher information by Monte Carlo, one backward pass.
    "empirical"  ∇_f −log p(y|f) at the observed target: the empirical Fisher, not an estimate of the GGN.

Martens 2020, arXiv:1412.1193 · Kunstner, Balles & Hennig 2019, arXiv:1905.12558
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from bayeslim.errors import ShapeMismatch
from bayeslim.likelihoods import Categorical, Likelihood

Columns: TypeAlias = Literal["signs", "exact", "sampled", "empirical"]


def check_columns(columns: str) -> None:
    """Refuse a kind of columns that does not exist."""
    if columns not in get_args(Columns):
        raise ValueError(f"columns must be one of {', '.join(get_args(Columns))}. Got {columns!r}.")


def output_columns(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, columns: Columns, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield the columns of one batch, each of the outputs' shape and dtype.

    Args:
        likelihood: whose curvature in the outputs it is.
        outputs: of the model, examples first.
        targets: of the batch; only "empirical" reads their values (and every kind the positions to ignore).
        columns: which kind.
        generator: on the CPU, for the signs and samples.
    """
    if not outputs.ndim:
        raise ShapeMismatch("The model must return one row an example, (B, ...). Got a scalar.")
    f = outputs.detach()
    f = f.float() if f.dtype in (torch.float16, torch.bfloat16) else f
    counted = _counted(likelihood, f, targets)
    if columns in ("sampled", "empirical"):
        y = targets if columns == "empirical" else likelihood.sample(f, _on_device(generator, f.device))
        column = _gradient(likelihood, f, y)
        yield (column if counted is None or columns == "empirical" else column * counted).to(outputs.dtype)
    elif columns == "signs":
        column = mixed_column(likelihood, f, generator)
        yield (column if counted is None else column * counted).to(outputs.dtype)
    else:
        roots = likelihood.sqrt_hessian(f).detach()
        roots = roots if counted is None else roots * counted
        for root in roots.to(outputs.dtype):
            yield from _by_position(root, _event_dim(likelihood, f))


def mixed_column(likelihood: Likelihood, outputs: Tensor, generator: torch.Generator) -> Tensor:
    """Mix all columns, Σ_k ε_k s_k, with signs by example and position, (B, ...)."""
    dim = _event_dim(likelihood, outputs)
    if isinstance(likelihood, Categorical):
        # Σ_c ε_c √p_c (e_c − p), without the C × C columns, so that large vocabularies fit in memory
        probs = outputs.softmax(dim)
        mixed = probs.sqrt() * signs(outputs.shape, generator, outputs)
        return mixed - probs * mixed.sum(dim, keepdim=True)
    roots = likelihood.sqrt_hessian(outputs).detach()
    shape = list(roots.shape)
    if outputs.ndim > 1:
        shape[dim + 1] = 1
    return (roots * signs(torch.Size(shape), generator, outputs)).sum(0)


def signs(shape: torch.Size, generator: torch.Generator, like: Tensor) -> Tensor:
    """Draw random signs in the dtype and on the device of `like`."""
    generator = _on_device(generator, like.device)
    bits = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device=like.device)
    return bits.to(like.dtype).mul_(2).sub_(1)


def _on_device(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """Seed a generator of the device by one of the CPU, where many draws are slow."""
    if device.type == "cpu":
        return generator
    return torch.Generator(device).manual_seed(int(torch.randint(0, 2**62, (), generator=generator)))


def _event_dim(likelihood: Likelihood, outputs: Tensor) -> int:
    """Find the dimension over which outputs depend on each other.

    Over all other dimensions the Hessian is block-diagonal.
    """
    return int(getattr(likelihood, "class_dim", -1)) % outputs.ndim


def _by_position(column: Tensor, event_dim: int) -> Iterator[Tensor]:
    """Split a column into one for every position of an example."""
    positions = [n if dim not in (0, event_dim) else 1 for dim, n in enumerate(column.shape)]
    count = math.prod(positions)
    if count == 1:
        yield column
        return
    for p in range(count):
        here = torch.zeros(count, dtype=column.dtype, device=column.device)
        here[p] = 1
        yield column * here.view(positions)


def _counted(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Mark targets that count by one, ignored ones by zero; None where all count."""
    if not isinstance(likelihood, Categorical):
        return None
    counted = targets != likelihood.ignore_index
    if bool(counted.all()):
        return None
    return counted.unsqueeze(_event_dim(likelihood, outputs)).to(outputs.dtype)


def _gradient(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    f = outputs.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(-likelihood.log_prob(f, targets).sum(), f)[0]
