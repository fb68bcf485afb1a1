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
from torch.func import grad_and_value

from bayeslim.errors import UnsupportedModel
from bayeslim.noise import is_transformed
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
    at = [leaf.detach() if index in moved else leaf for index, leaf in enumerate(leaves)]

    def of_moved(*parts: Tensor) -> Tensor:
        given = dict(zip(moved, parts, strict=True))
        return nll(build([given.get(index, leaf) for index, leaf in enumerate(at)]))

    points = [at[index] for index in moved]
    plain: Tensor
    if is_transformed():  # under `vmap` only functional gradients exist
        slopes, plain = grad_and_value(of_moved, tuple(range(len(moved))))(*points)
    else:
        with torch.enable_grad():
            points = [point.requires_grad_() for point in points]
            plain = of_moved(*points)
            slopes = torch.autograd.grad(plain, points, retain_graph=True, allow_unused=True)
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
