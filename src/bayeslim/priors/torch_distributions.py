"""Distributions of torch as data: parameters by name, and copies on other devices."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch import distributions as D

from bayeslim.io.registry import register

# Distributions that can be saved and learned: their parameters determine them.
for _distribution in (
    D.Normal, D.Laplace, D.StudentT, D.Cauchy, D.Gumbel, D.LogNormal, D.HalfNormal, D.HalfCauchy, D.Gamma,
    D.InverseGamma, D.Exponential, D.Chi2, D.Weibull, D.Beta, D.Uniform,
):  # fmt: skip
    register("distribution", _distribution.__name__)(_distribution)


def parameters_of(distribution: D.Distribution) -> dict[str, Any]:
    """Return a distribution's constructor arguments by name.

    >>> parameters_of(D.Cauchy(0.0, 2.0))
    {'loc': tensor(0.), 'scale': tensor(2.)}
    """
    own: Any = distribution.arg_constraints
    return {name: getattr(distribution, name) for name in own}


def beside(distribution: D.Distribution, value: Tensor) -> D.Distribution:
    """Copy a distribution to a value's device.

    The copy does not validate values, so that NaN gives a NaN density, which `fit` reports as such.
    """
    return _moved(distribution, value.device)


def _moved(distribution: D.Distribution, device: torch.device) -> D.Distribution:
    other = copy.copy(distribution)
    other._validate_args = False
    for name, value in vars(distribution).items():
        if isinstance(value, Tensor) and value.device != device:
            setattr(other, name, value.to(device))
        elif isinstance(value, D.Distribution):
            setattr(other, name, _moved(value, device))
    return other
