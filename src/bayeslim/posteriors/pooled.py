"""The posterior of pooled data, from two posteriors over the same parameters.

    p(w | D₁, D₂) ∝ p(w) p(D₁|w) p(D₂|w)        P = δ + H₁ + H₂

Dense and diagonal curvatures add exactly. A sum of Kronecker products is no Kronecker product: here the factors are
those of the pooled data, G = G₁ + G₂ and A the average of A₁ and A₂ over examples, exact when one of the two factors
agrees. The prior is counted once, and the mean is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch

import torch
from torch import Tensor

from bayeslim.errors import BayeslimError
from bayeslim.posteriors.dense import Dense
from bayeslim.posteriors.factor import Factor
from bayeslim.posteriors.gaussian import Conditioned, Gaussian
from bayeslim.posteriors.kronecker import Kronecker
from bayeslim.posteriors.kronecker_block import KroneckerFactors


@singledispatch
def pooled(first: Gaussian, second: Gaussian, sizes: tuple[int, int], mean: Mapping[str, Tensor]) -> Gaussian:
    """Pool the data of two posteriors, at `mean`, under the second's prior.

    Args:
        first: the posterior of the earlier data.
        second: that of the later data alone, of the same structure, its prior included.
        sizes: the number of examples of each.
        mean: of the result.
    """
    raise BayeslimError(
        f"Posteriors of type {type(first).__name__} cannot be pooled. Use structure kron, diag or full to learn on."
    )


@pooled.register
def _(first: Kronecker, second: Gaussian, sizes: tuple[int, int], mean: Mapping[str, Tensor]) -> Kronecker:
    _same(first, second)
    assert isinstance(second, Kronecker)
    if any(f.corrected is not None for f in (*first.factors, *second.factors)):
        raise BayeslimError("Corrected eigenvalues belong to one set of eigenvectors and cannot be pooled.")
    share = sizes[0] / sum(sizes)
    factors = []
    for old, new in zip(first.factors, second.factors, strict=True):
        inputs = _mixture(old.inputs, new.inputs, share, 1 - share)
        outputs = _mixture(old.outputs, new.outputs, 1.0, 1.0)
        factors.append(KroneckerFactors(new.weight, outputs, inputs, new.bias, transposed=new.transposed))
    rest = {name: value + second.rest_curvature[name] for name, value in first.rest_curvature.items()}
    return Kronecker(mean, factors, second.prior_precision, rest=rest, damping=second.damping)


@pooled.register
def _(first: Dense, second: Gaussian, sizes: tuple[int, int], mean: Mapping[str, Tensor]) -> Dense:
    _same(first, second)
    assert isinstance(second, Dense)
    if not torch.equal(first.places, second.places):
        raise BayeslimError("The two posteriors are of different subnetworks. Name the subset, so that it stays.")
    ordered = {name: mean[name] for name in second.mean}
    return Dense(ordered, first.curvature + second.curvature, second.prior_precision, indices=second.indices)


@pooled.register
def _(first: Conditioned, second: Gaussian, sizes: tuple[int, int], mean: Mapping[str, Tensor]) -> Gaussian:
    _same(first, second)
    assert isinstance(second, Conditioned)
    return pooled(first.base, second.base, sizes, mean).condition(second.support)


def _same(first: Gaussian, second: Gaussian) -> None:
    if type(first) is not type(second) or set(first.mean) != set(second.mean):
        raise BayeslimError(
            f"Only posteriors of one structure over the same parameters can be pooled. Got {first!r} and {second!r}."
        )


def _mixture(first: Factor, second: Factor, a: float, b: float) -> Factor:
    """Decompose a M₁ + b M₂."""
    if first.vectors is None and second.vectors is None:
        return Factor(a * first.values + b * second.values, None)
    return Factor.of(a * first.matrix + b * second.matrix)
