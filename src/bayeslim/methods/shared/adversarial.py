"""Adversarial training: every batch counts half as it is, half moved to where its loss rises.

    ½ ℓ(x, y) + ½ ℓ(x', y)        x' = x + ε sign(∇_x ℓ(x, y))

Halves, so that the data weigh as much against the prior as without it.

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
    """The mean of the losses at the inputs and at those moved by ε to where the loss rises.

    Args:
        nll: the loss at inputs, a scalar.
        inputs: a tensor, or a tuple or dict with some in it; real numbers are moved.
        epsilon: how far.
    """
    leaves, build = _leaves(inputs)
    moved = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not moved:
        raise UnsupportedModel(
            "Adversarial training moves the inputs, and these are not real numbers. Use adversarial=None."
        )
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
    """The parts of inputs, and how to put such parts together again."""
    if isinstance(inputs, Mapping):
        return list(inputs.values()), lambda parts: dict(zip(inputs, parts, strict=True))
    if type(inputs) in (tuple, list):
        return list(inputs), tuple
    return [inputs], lambda parts: parts[0]
