"""Variance networks: weights around zero, whose spreads carry the information."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim import families, gates, likelihoods, priors
from bayeslim.posteriors import ZeroMeanDiagonal

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def variance_network(estimator: str = "auto", prior: priors.Prior | None = None, **options) -> bl.Bayesian:
    method = bl.Variational(families.ZeroMean(), estimator=estimator)
    likelihood = likelihoods.Categorical()
    return bl.bayesianize(mlp(), method, likelihood=likelihood, prior=prior, num_data=16, **options)


def test_spreads_start_at_the_sizes_of_the_weights() -> None:
    bnn, plain = variance_network(), mlp()
    for name in ("0.weight", "2.weight"):
        torch.testing.assert_close(bnn.posterior_.std[name], plain.get_parameter(name).detach().abs())
        assert not bnn.posterior_.mean[name].any()
    fixed = bl.bayesianize(mlp(), bl.Variational(families.ZeroMean(0.2)), likelihood=likelihoods.Categorical())
    torch.testing.assert_close(fixed.posterior_.std["0.weight"], torch.full((4, 5), 0.2))


@pytest.mark.parametrize("estimator", ["local", "shared", "flipout"])
def test_outputs_have_the_variance_of_the_squares(estimator: str) -> None:
    """One layer against its exact moments: mean b, variance x² σ²."""
    torch.manual_seed(1)
    method = bl.Variational(families.ZeroMean(), estimator=estimator)  # type: ignore[arg-type]
    layer = nn.Linear(5, 4)
    bnn = bl.bayesianize(layer, method, likelihood=likelihoods.Gaussian(1.0), num_data=16).train()
    with torch.no_grad():
        draws = torch.stack([bnn(X) for _ in range(4000)])
    variance = X.square() @ layer.weight.detach().square().T
    torch.testing.assert_close(draws.var(0), variance, rtol=0.15, atol=1e-3)
    assert ((draws.mean(0) - layer.bias).abs() < 5 * (variance / 4000).sqrt()).all()


def test_the_divergence_is_that_of_the_spreads() -> None:
    bnn = variance_network(prior=priors.Normal(0.5))
    bnn.loss((X, Y))
    std = torch.cat([s.flatten() for s in bnn.posterior_.std.values()])
    wanted = torch.distributions.kl_divergence(
        torch.distributions.Normal(0.0, std), torch.distributions.Normal(0.0, 0.5)
    ).sum()
    assert bnn.terms is not None
    torch.testing.assert_close(bnn.terms.kl.detach(), wanted)
    free = variance_network(prior=priors.LogUniform())
    free.loss((X, Y)).backward()
    assert free.terms is not None
    assert free.terms.kl.item() == 0.0


@pytest.mark.parametrize("prior", [priors.Normal(1.0, mean=0.5), priors.StudentT(3.0, 1.0)])
def test_no_prior_moves_the_means(prior: priors.Prior) -> None:
    bnn = variance_network(prior=prior)
    bnn.fit(bl.data.Loader(X, Y, batch_size=8), epochs=2, lr=0.1, progress=False)
    assert not any(mean.any() for mean in bnn.posterior_.mean.values())
    assert all(p.requires_grad for p in bnn.mean_network().parameters())


def test_draws_learn_what_the_mean_network_cannot_say() -> None:
    """Two classes that differ in which input is large: the spreads tell them apart, the means are chance."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (400,), generator=generator)
    x = torch.randn(400, 2, generator=generator) * torch.where(y[:, None] == torch.arange(2), 3.0, 0.1)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 30), nn.ReLU(), nn.Linear(30, 2))
    method = bl.Variational(families.ZeroMean(), std_rate=10.0)
    bnn = bl.bayesianize(
        network, method, likelihood=likelihoods.Categorical(), prior=priors.LogUniform(), sites=["0.weight"]
    )
    bnn.fit(bl.data.Loader(x, y, batch_size=50), epochs=30, lr=1e-2, seed=0, progress=False)
    assert bl.metrics.error(bl.predict(bnn, x, samples=32).probs, y) < 0.1
    constant = bnn.mean_network()(x)
    assert torch.equal(constant, constant[:1].expand_as(constant))


def test_weights_are_cut_by_their_spreads() -> None:
    bnn = variance_network()
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5))
    assert pruned.plan_.criterion == "density"
    std = torch.cat([s.flatten() for s in bnn.posterior_.std.values()])
    kept = torch.cat([mask.flatten() for mask in pruned.masks.values()])
    assert std[kept].min() >= std[~kept].max()
    assert isinstance(pruned.posterior_, ZeroMeanDiagonal)
    pruned.fit(bl.data.Loader(X, Y, batch_size=8), epochs=2, lr=0.01, progress=False)
    after = torch.cat([s.flatten() for s in pruned.posterior_.std.values()])
    assert not after[~kept].any()
    assert after[kept].min() > 0
    assert bl.plan(bnn, bl.Budget(sparsity=0.5), granularity="unit", example=X).criterion == "density"


@pytest.mark.parametrize("criterion", ["snr", "curvature", "log_alpha", "magnitude", "sign_stability"])
def test_criteria_of_the_means_are_refused(criterion: str) -> None:
    with pytest.raises(TypeError, match="all zero"):
        bl.plan(variance_network(), bl.Budget(sparsity=0.5), criterion=criterion)


def test_a_file_keeps_the_network(tmp_path: Path) -> None:
    bnn = variance_network()
    bnn.fit(bl.data.Loader(X, Y, batch_size=8), epochs=1, lr=0.1, progress=False)
    bl.save(bnn, tmp_path)
    found = bl.load(tmp_path, mlp())
    generator = torch.Generator()
    one = bl.predict(bnn, X, samples=4, generator=generator.manual_seed(0))
    other = bl.predict(found, X, samples=4, generator=generator.manual_seed(0))
    assert torch.equal(one.probs, other.probs)
    assert not found.model.get_parameter("0.weight").requires_grad


def test_what_needs_means_is_refused() -> None:
    with pytest.raises(ValueError, match="no means"):
        bl.fine_tune(variance_network(), bl.data.Loader(X, Y, batch_size=8))
    with pytest.raises(ValueError, match="have none"):
        bl.Variational(families.ZeroMean(), gates=gates.NormalJeffreys())
    with pytest.raises(ValueError, match="IVON needs"):
        bl.IVON(family=families.ZeroMean())
    with pytest.raises(ValueError, match="initial_std"):
        families.ZeroMean(initial_std=0.0)
