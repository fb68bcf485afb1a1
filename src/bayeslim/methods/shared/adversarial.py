"""Adversarial training: the loss is averaged over a batch and its adversarial copy.

    ½ ℓ(x, y) + ½ ℓ(x', y)        x' = x + ε sign(∇_x ℓ(x, y))

The factors ½ keep the weight of the data against the prior.

Goodfellow, Shlens & Szegedy 2015, arXiv:1412.6572 · Lakshminarayanan, Pritzel & Blundell 2017, arXiv:1612.01474
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bayeslim.errors import UnsupportedModel
from bayeslim.types import Inputs


def adversarial_loss(nll: Callable[[Inputs], Tensor], inputs: Inputs, epsilon: float) -> Tensor:
    """Average the losses at the inputs and at their adversarial copies.

    The scalar loss is a function of inputs: a tensor, or a tuple or dict of tensors, of which floating-point ones are
    moved by ε in their own units.
    """
    leaves, build = _leaves(inputs)
    moved = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not moved:
        raise UnsupportedModel("Adversarial training needs floating-point inputs. Got none. Use adversarial=None.")
    with torch.enable_grad():
        at = [leaf.detach().requires_grad_() if index in moved else leaf for index, leaf in enumerate(leaves)]
        plain = nll(build(at))
        slopes = torch.autograd.grad(plain, [at[index] for index in moved], retain_graph=True, allow_unused=True)
    against = list(leaves)
    for index, slope in zip(moved, slopes, strict=True):
        if slope is not None:
            against[index] = leaves[index].detach() + epsilon * slope.sign()
    return 0.5 * (plain + nll(build(against)))


def _leaves(inputs: Inputs) -> tuple[list[Any], Callable[[list[Any]], Inputs]]:
    """Split inputs into parts, and return a function that joins such parts."""
    if isinstance(inputs, Mapping):
        return list(inputs.values()), lambda parts: dict(zip(inputs, parts, strict=True))
    if type(inputs) in (tuple, list):
        return list(inputs), tuple
    return [inputs], lambda parts: parts[0]
