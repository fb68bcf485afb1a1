"""The mean field whose noisy weights count as zero."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.families import DiagonalGaussian, SparseGaussian

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3


def network(family: DiagonalGaussian, estimator: str = "auto", model: nn.Module | None = None) -> bl.Bayesian:
    """A network of which the weights of even columns are mostly noise: log α = 4, of odd ones log α = 2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)) if model is None else model
    method = bl.Variational(family, estimator=estimator)  # type: ignore[arg-type]
    bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Categorical(), prior=bl.priors.LogUniform())
    bnn.num_data = 16
    with torch.no_grad():
        for name in bnn.sites.names:
            mean, log_std = bnn.model.get_parameter(name), bnn.model.get_parameter(f"{name}_log_std")
            mean += 0.1 * mean.sign()
            log_alpha = torch.where(torch.arange(mean.shape[1]) % 2 == 0, 4.0, 2.0)
            log_std.copy_(mean.abs().log() + log_alpha / 2)
    return bnn


def kept(weight: Tensor) -> Tensor:
    return (torch.arange(weight.shape[1]) % 2 == 1).expand_as(weight)


def test_noisy_means_count_as_zero_and_the_others_as_they_are() -> None:
    bnn = network(SparseGaussian(zero_above=3.0))
    for name, mean in bnn.posterior_.mean.items():
        weight = bnn.model.get_parameter(name)
        assert torch.equal(mean, torch.where(kept(weight), weight, 0.0))
    plain = bnn.mean_network()
    assert torch.equal(bnn.eval()(X), plain(X))
    assert torch.equal(bl.predict(bnn, X, how="mean").samples[0], plain(X))


def test_the_spread_and_the_divergence_are_those_of_all_weights() -> None:
    sparse, dense = network(SparseGaussian()), network(DiagonalGaussian())
    for name, std in sparse.posterior_.std.items():
        assert torch.equal(std, dense.posterior_.std[name])
    sparse.loss((X, Y))
    dense.loss((X, Y))
    assert sparse.terms is not None
    assert dense.terms is not None
    assert torch.equal(sparse.terms.kl, dense.terms.kl)


@pytest.mark.parametrize("estimator", ["local", "shared", "flipout"])
def test_training_sees_the_zeros(estimator: str) -> None:
    """Without noise to speak of, the outputs in training are those of the network with zeros."""
    bnn = network(SparseGaussian(zero_above=3.0), estimator)
    bnn(X)  # layers are retyped when they first run
    with torch.no_grad():
        for name in bnn.sites.names:
            bnn.model.get_parameter(f"{name}_log_std").sub_(30)
    family = SparseGaussian(zero_above=3.0 - 60)
    bnn.method = bl.Variational(family, estimator=estimator)  # type: ignore[arg-type]
    for module in bnn.model.modules():
        if hasattr(module, "family"):
            module.family = family
    torch.testing.assert_close(bnn.train()(X), bnn.mean_network()(X), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(bnn(X), bnn.model.eval()(X), atol=1e-3)


@pytest.mark.parametrize("estimator", ["local", "shared", "flipout"])
def test_zeros_have_no_gradient_from_the_data_but_from_the_prior(estimator: str) -> None:
    bnn = network(SparseGaussian(zero_above=3.0), estimator)
    for weight_of_kl in (0.0, 1.0):
        bnn.zero_grad()
        bnn.loss((X, Y), kl_weight=weight_of_kl).backward()
        weight = bnn.model.get_parameter("0.weight")
        assert weight.grad is not None
        assert weight.grad[kept(weight)].abs().min() > 0
        assert bool(weight.grad[~kept(weight)].any()) == (weight_of_kl > 0)
        log_std = bnn.model.get_parameter("0.weight_log_std")
        assert log_std.grad is not None
        assert log_std.grad[~kept(log_std)].any()  # their noise stays, so that they can come back


def test_a_weight_whose_noise_shrinks_comes_back() -> None:
    bnn = network(SparseGaussian(zero_above=3.0))
    with torch.no_grad():
        bnn.model.get_parameter("0.weight_log_std").sub_(2)
    assert bnn.posterior_.mean["0.weight"].ne(0).all()


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, -1e30])
def test_extreme_weights_have_finite_losses_and_gradients(value: float) -> None:
    bnn = network(SparseGaussian())
    for log_std in (-80.0, 0.0, 20.0):
        with torch.no_grad():
            bnn.model.get_parameter("2.weight").fill_(value if abs(value) < 1 else math.copysign(10.0, value))
            bnn.model.get_parameter("2.weight_log_std").fill_(log_std)
        bnn.zero_grad()
        loss = bnn.loss((X, Y))
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(p.grad).all() for p in bnn.parameters() if p.grad is not None)


def test_pruned_weights_stay_pruned_and_files_keep_the_threshold(tmp_path: Path) -> None:
    bnn = network(SparseGaussian(zero_above=3.0))
    pruned = bl.prune(bnn, bl.Budget(threshold=-3.0), criterion="log_alpha")
    assert all(torch.equal(mask, kept(mask)) for mask in pruned.masks.values())
    pruned.fit(bl.data.Loader(X, Y, batch_size=8), epochs=2, progress=False)
    assert all(not pruned.model.get_parameter(name)[~mask].any() for name, mask in pruned.masks.items())
    bl.save(pruned, tmp_path)
    found = bl.load(tmp_path, nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)))
    assert found.method == pruned.method
    assert torch.equal(found.mean_network()(X), pruned.mean_network()(X))
    assert torch.equal(copy.deepcopy(pruned).eval()(X), pruned.eval()(X))


def test_half_precision_networks_decide_in_single_precision() -> None:
    bnn = network(SparseGaussian(zero_above=3.0))
    half = bl.bayesianize(
        nn.Linear(5, 3).bfloat16(), bl.Variational(SparseGaussian()), likelihood=bl.likelihoods.Categorical()
    )
    half.num_data = 16
    half.loss((X.bfloat16(), Y)).backward()
    assert all(torch.isfinite(p.grad).all() for p in half.parameters())
    assert half.posterior_.mean["weight"].dtype == torch.bfloat16
    assert bnn.posterior_.mean["0.weight"].dtype == torch.float32


def test_a_threshold_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="zero_above must be a finite number"):
        SparseGaussian(zero_above=math.nan)


@pytest.mark.parametrize("family", [bl.families.DropoutGaussian(0.2), bl.families.Point()])
def test_ivon_needs_spreads_of_its_own(family: bl.families.Family) -> None:
    with pytest.raises(ValueError, match="IVON needs independent Gaussians"):
        bl.IVON(family=family)
