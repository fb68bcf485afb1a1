"""The evidence lower bound against exact answers; what has no evidence is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributions, nn
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl
from bayeslim import likelihoods, priors
from bayeslim.errors import BayeslimError, ImproperPrior
from oracles import linear_regression

NOISE, PRIOR_STD = 0.5, 1.2


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def set_posterior(bnn: bl.Bayesian, std: torch.Tensor, mean: torch.Tensor | None = None) -> None:
    for name in bnn.sites.names:
        log_std = bnn.method.family.log_std(bnn.model, name)
        log_std.data.copy_(std.log().expand_as(log_std))
        if mean is not None:
            bnn.model.get_parameter(name).data.copy_(mean)


def regression(prior: priors.Prior) -> bl.Bayesian:
    model = nn.Linear(4, 1, bias=False).double()
    return bl.bayesianize(model, bl.Variational(), likelihood=likelihoods.Gaussian(NOISE), prior=prior, num_data=20)


def data(n: int = 20, orthogonal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    X = torch.randn(n, 4).double()
    if orthogonal:
        X = torch.linalg.qr(X)[0] * 2
    return X, X @ torch.randn(4).double() + NOISE * torch.randn(n)


def batches(X, y, size: int = 7) -> DataLoader:
    return DataLoader(TensorDataset(X, y[:, None]), batch_size=size)


def expected_log_likelihood(X, y, mean, variance) -> torch.Tensor:
    errors = (y - X @ mean).square() + X.square() @ variance
    return (-0.5 * errors / NOISE**2 - math.log(NOISE) - 0.5 * math.log(2 * math.pi)).sum()


def exact_elbo(X, y, q: bl.posteriors.Diagonal) -> float:
    mean, std = q.mean["weight"].view(-1), q.std["weight"].view(-1)
    prior = distributions.Normal(torch.zeros_like(mean), PRIOR_STD)
    kl = distributions.kl_divergence(distributions.Normal(mean, std), prior).sum()
    return (expected_log_likelihood(X, y, mean, std.square()) - kl).item()


def test_is_the_exact_elbo_and_a_bound():
    X, y = data()
    bnn = regression(priors.Normal(PRIOR_STD))
    set_posterior(bnn, torch.tensor([[0.1, 0.2, 0.3, 0.05]]))
    found = bl.log_evidence(bnn, batches(X, y), samples=400, generator=seeded())
    assert abs(found.value - exact_elbo(X, y, bnn.posterior_)) < 4 * found.std_error
    assert found.std_error < 0.1 * abs(found.value)
    _, _, evidence = linear_regression(X, y, NOISE, PRIOR_STD**-2)
    assert found.value + 4 * found.std_error < evidence.item()
    assert (found.kind, found.is_bound, found.num_data) == ("elbo", True, 20)


def test_is_tight_at_the_exact_posterior():
    X, y = data(orthogonal=True)
    mean, covariance, evidence = linear_regression(X, y, NOISE, PRIOR_STD**-2)
    bnn = regression(priors.Normal(PRIOR_STD))
    set_posterior(bnn, covariance.diagonal().sqrt(), mean)
    found = bl.log_evidence(bnn, batches(X, y), samples=400, generator=seeded())
    assert abs(found.value - evidence.item()) < 4 * found.std_error
    assert exact_elbo(X, y, bnn.posterior_) == pytest.approx(evidence.item(), rel=1e-6)


def check_errors(runs: list[bl.Evidence], exact: float) -> None:
    """Values around the exact one, with the spread that they claim."""
    values, claimed = (torch.tensor([getattr(run, field) for run in runs]) for field in ("value", "std_error"))
    spread = values.std().item()
    assert claimed.square().mean().sqrt().item() == pytest.approx(spread, rel=0.25)
    assert abs(values.mean().item() - exact) < 4 * spread / len(runs) ** 0.5


def test_the_standard_error_is_honest():
    X, y = data()
    bnn = regression(priors.Normal(PRIOR_STD))
    set_posterior(bnn, torch.tensor(0.2))
    exact = exact_elbo(X, y, bnn.posterior_)
    check_errors([bl.log_evidence(bnn, [(X, y[:, None])], samples=20) for _ in range(100)], exact)
    assert bl.log_evidence(bnn, batches(X, y), samples=1).std_error == math.inf


def test_batches_do_not_matter():
    X, y = data()
    bnn = regression(priors.Normal(PRIOR_STD))
    values = [bl.log_evidence(bnn, batches(X, y, size), 5, generator=seeded()).value for size in (1, 6, 20)]
    assert values == pytest.approx([values[0]] * 3, rel=1e-9)


def test_weights_reused_at_many_positions_share_their_draw():
    """Noise drawn anew at every position averages out in a pooled output, and would not give a bound."""
    model = nn.Sequential(nn.Conv1d(1, 1, 2, bias=False), nn.AdaptiveAvgPool1d(1), nn.Flatten()).double()
    bnn = bl.bayesianize(model, bl.Variational(estimator="local"), likelihood=likelihoods.Gaussian(NOISE), num_data=9)
    set_posterior(bnn, torch.tensor(0.8))
    x, y = torch.randn(9, 1, 12).double() + 1, torch.randn(9).double()
    bnn.loss((x, y))
    features = torch.cat([x[:, :, :-1].mean(-1), x[:, :, 1:].mean(-1)], 1)
    q = bnn.posterior_
    mean, std = q.mean["0.weight"].view(-1), q.std["0.weight"].view(-1)
    kl = distributions.kl_divergence(distributions.Normal(mean, std), distributions.Normal(0.0, 1.0)).sum()
    exact = (expected_log_likelihood(features, y, mean, std.square()) - kl).item()
    found = bl.log_evidence(bnn, [(x, y)], samples=2000, generator=seeded())
    assert abs(found.value - exact) < 4 * found.std_error
    local = -9 * torch.stack([bnn.loss((x, y), kl_weight=0.0).detach() for _ in range(200)]).mean().item() - kl.item()
    assert abs(local - exact) > 8 * found.std_error


class Flat(priors.Prior):
    """Everywhere the same: it does not integrate to one."""

    name = "flat"
    is_proper = False

    def log_prob(self, weight):
        return torch.zeros_like(weight)


def test_an_improper_prior_has_no_evidence():
    X, y = data()
    with pytest.raises(ImproperPrior, match="Flat does not integrate to one"):
        bl.log_evidence(regression(Flat()), batches(X, y))
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)).double()
    some = {"0": priors.Normal(1.0), "1": Flat()}
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=likelihoods.Gaussian(NOISE), prior=some)
    with pytest.raises(ImproperPrior):
        bl.log_evidence(bnn, batches(X, y))


class OnlyDensity(priors.Prior):
    """A normal prior without its closed-form KL."""

    name = "only density"

    def log_prob(self, weight):
        return distributions.Normal(0.0, PRIOR_STD).log_prob(weight)


def test_an_estimated_kl_is_unbiased_counted_in_the_error_and_repeatable():
    X, y = data(4)
    X = 0.1 * X  # so that the KL's spread is the larger part
    bnn = regression(OnlyDensity())
    set_posterior(bnn, torch.tensor(0.8))
    found = bl.log_evidence(bnn, [(X, y[:, None])], samples=500, generator=seeded())
    again = bl.log_evidence(bnn, [(X, y[:, None])], samples=500, generator=seeded())
    assert found == again
    exact = exact_elbo(X, y, bnn.posterior_)
    assert abs(found.value - exact) < 4 * found.std_error
    check_errors([bl.log_evidence(bnn, [(X, y[:, None])], samples=10) for _ in range(150)], exact)


def test_leaves_the_network_as_it_was():
    X, y = data()
    bnn = regression(priors.Normal(PRIOR_STD)).train()
    state, random_state = {k: v.clone() for k, v in bnn.state_dict().items()}, torch.get_rng_state()
    bl.log_evidence(bnn, [(X, y[:, None])], samples=3, generator=seeded())
    assert all(m.training for m in bnn.modules())
    assert all(torch.equal(v, state[k]) for k, v in bnn.state_dict().items())
    assert all(p.grad is None for p in bnn.parameters())
    assert torch.equal(random_state, torch.get_rng_state())


def test_refuses_what_it_cannot_do():
    X, y = data()
    bnn = regression(priors.Normal(PRIOR_STD))
    with pytest.raises(TypeError, match="several times"):
        bl.log_evidence(bnn, iter(batches(X, y)))
    with pytest.raises(ValueError, match="samples"):
        bl.log_evidence(bnn, batches(X, y), samples=0)


def test_without_data_there_is_no_evidence():
    bnn = bl.bayesianize(nn.Linear(2, 1), bl.Variational(), likelihood=bl.likelihoods.Gaussian(0.1), num_data=3)
    with pytest.raises(BayeslimError, match="no batches"):
        bl.log_evidence(bnn, [])
