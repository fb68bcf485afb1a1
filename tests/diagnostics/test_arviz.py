"""Chains on their way to ArviZ."""

from __future__ import annotations

import warnings

import torch
from torch import nn

import bayeslim as bl
from bayeslim.diagnostics import summary, to_arviz
from bayeslim.posteriors import Particles

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    import arviz

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
CHAINS, DRAWS = 3, 40


def sampled() -> bl.Bayesian:
    g = torch.Generator().manual_seed(2)
    likelihood = bl.likelihoods.Categorical()
    bnn = bl.bayesianize(nn.Linear(3, 2), bl.SGLD(), likelihood=likelihood, num_data=10)
    shapes = {name: p.shape for name, p in bnn.model.named_parameters()}
    values = {n: torch.randn(CHAINS * DRAWS, *s, generator=g, dtype=torch.float64) for n, s in shapes.items()}
    bnn.method.keep(bnn, Particles(values, chains=CHAINS))
    return bnn


def test_arviz_gets_the_same_numbers():
    bnn = sampled()
    energy = torch.randn(CHAINS, DRAWS, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found, told = to_arviz(bnn, X, energy=energy), summary(bnn, X, energy=energy)
    for name, scores in told.by_name.items():
        shape = bnn.model.get_parameter(name).shape
        for kind in ("bulk", "tail"):
            theirs = torch.from_numpy(arviz.ess(found, method=kind)[name].values.copy())
            assert torch.allclose(theirs, getattr(scores, f"ess_{kind}").view(shape), rtol=1e-6)
        theirs = torch.from_numpy(arviz.rhat(found)[name].values.copy())
        assert torch.allclose(theirs, scores.r_hat.view(shape), rtol=1e-6)
    assert torch.allclose(torch.as_tensor(arviz.bfmi(found)), told.e_bfmi)
    assert found.posterior_predictive["outputs"].shape == (CHAINS, DRAWS, 5, 2)
    assert to_arviz(Particles({"w": torch.randn(8, 2).bfloat16()}, chains=8)).posterior["w"].shape == (8, 1, 2)
