"""Averages over draws of networks: moments, probabilities and entropies, each in the way that suits the device.

A GPU wants few calls; a CPU passes that run along memory, and few calls where there are few values. The mean is there
at once; uncertainty takes several times as long, of small networks as long as passes do, and waits until it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from bayeslim.blas import IS_ARM, without_onednn
from bayeslim.results import Uncertainty

FEW = 2**8 if IS_ARM else 2**7
"""Of how many values one call for both moments is quicker than passes."""
SOME = 2**13 if IS_ARM else 2**11
"""Of how many values of classes calls take longer than what they compute."""
PRODUCTS, ROWS, MORE = 2**17, 2**6, 2**17 if IS_ARM else 2**21
"""Of how many products a mean of classes is quicker as one, that of all of them with a matrix of shares; if that has no
more than so many rows, of how many."""
WIDE, MANY = 32, 2**12
"""How many classes are quicker to sum over where they lie along memory; of fewer, and of more values than so many,
examples are put along it."""
VERY_MANY = 2**18 if IS_ARM and torch.backends.mkldnn.is_available() else math.inf
"""Of how many values oneDNN has the quicker softmax, a quarter off, though they are copied for it and back."""
KEPT = 2**20
"""How many probabilities are kept until they are read; more are made anew."""


def moments_over_draws(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over the first dimension: on a CPU in passes, which it makes many times faster than `var`.

    Of few values one call is quicker all the same.
    """
    if values.is_cuda or _are_few(values, FEW):
        variance, mean = torch.var_mean(values, 0, correction=0)
        return mean, variance
    mean = values.mean(0)
    away = values - mean
    return mean, away.mul_(away).mean(0)


def entropy_of(probs: Tensor, dim: int | tuple[int, ...] = -1, share: float = 1.0) -> Tensor:
    """−Σ p log p over the classes, in nats, times a share.

    On a CPU of many values it is by `log`, which takes several at once.

    Args:
        probs: probabilities.
        dim: where the classes are, and whatever else is summed over.
        share: of the sum.
    """
    if probs.is_cuda or _are_few(probs, SOME):
        entropy: Tensor = torch.special.entr(probs).sum(dim)
        return entropy if share == 1 else entropy.mul_(share)
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log_().mul_(probs).sum(dim).mul_(-share)


def class_averages(logits: Tensor, again: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Uncertainty]]:
    """The mean of class probabilities over draws, (S, ..., C), and a function for their uncertainty.

    On a CPU examples may lie along memory (`methods.chain` gives such logits), and stay there.

    Args:
        logits: of the classes.
        again: gives them again, if there are too many probabilities to keep.
    """
    lie_across = not logits.is_cuda and _are_to_lie_across(logits)
    probs = _probabilities(logits, lie_across)
    mean = _mean_of(probs, lie_across)
    kept = probs if _are_few(probs, KEPT) else None

    def uncertainty() -> Uncertainty:
        probs = _probabilities(again(), lie_across) if kept is None else kept
        mean, spread = moments_over_draws(probs)
        dim = -2 if lie_across else -1
        entropy, aleatoric = entropy_of(mean, dim), entropy_of(probs, (0, dim), 1 / len(probs))
        return Uncertainty(aleatoric, (entropy - aleatoric).relu_(), _across(spread) if lie_across else spread)

    return mean, uncertainty


def _probabilities(logits: Tensor, lie_across: bool) -> Tensor:
    if lie_across:
        return _across(logits).softmax(-2)
    if logits.stride(0) < logits.stride(1) and not logits.is_contiguous():  # of all networks beside each other
        return _softmax(logits.transpose(0, 1)).transpose(0, 1)
    return _softmax(logits)


def _softmax(logits: Tensor) -> Tensor:
    if _are_few(logits, VERY_MANY) or logits.dtype != torch.float32 or logits.requires_grad or logits.is_cuda:
        return logits.softmax(-1)
    return logits.to_mkldnn().softmax(-1).to_dense()


def _mean_of(probs: Tensor, lie_across: bool) -> Tensor:
    if not lie_across:
        return probs.mean(0)
    if not _is_one_product(probs):
        return _across(probs.mean(0))
    draws, classes, examples = probs.shape
    with without_onednn():
        return torch.mm(probs.view(draws * classes, examples).mT, _shares(draws, classes, probs.dtype))


def _is_one_product(probs: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    if probs.ndim != 3:
        return False
    draws, classes, _ = probs.shape
    return probs.numel() * classes <= (MORE if draws * classes <= ROWS else PRODUCTS)


@lru_cache
def _shares(draws: int, classes: int, dtype: torch.dtype) -> Tensor:
    """What turns probabilities of all draws, a row for every example, into their means."""
    with torch.inference_mode(False):
        return torch.eye(classes, dtype=dtype, device="cpu").repeat(draws, 1) / draws


def _across(values: Tensor) -> Tensor:
    return values.mT.contiguous()


def _are_to_lie_across(logits: Tensor) -> bool:
    if logits.shape[-1] >= WIDE:
        return False
    return logits.stride(-2) < logits.stride(-1) or not _are_few(logits, MANY)


def _are_few(values: Tensor, most: float) -> bool:
    """Whether values are no more than so many; in a graph, whose batches may be of any size, that is not asked."""
    return torch.compiler.is_compiling() or values.numel() <= most
