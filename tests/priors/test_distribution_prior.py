"""Distributions of torch as priors: which fit, how they are saved, and what is learned of them."""

from __future__ import annotations

import json

import integrals
import pytest
import torch
from torch import distributions as D
from torch import nn

import bayeslim as bl
from bayeslim import priors
from bayeslim.errors import BayeslimError, CorruptFile, ShapeMismatch
from bayeslim.io.registry import all_registered
from bayeslim.io.storage import decode, encode

MIXTURE = D.MixtureSameFamily(
    D.Categorical(torch.tensor([0.3, 0.7])), D.Normal(torch.zeros(2), torch.tensor([1.0, 0.1]))
)


def network(distribution: D.Distribution, **options) -> bl.Bayesian:
    torch.manual_seed(0)
    prior = priors.Distribution(distribution, **options)
    likelihood = bl.likelihoods.Gaussian(1.0)
    return bl.bayesianize(nn.Linear(3, 2), bl.Variational(), likelihood=likelihood, prior=prior, num_data=10)


BATCH = torch.randn(5, 3), torch.randn(5, 2)


def test_is_the_prior_it_looks_like():
    mean, std = torch.randn(4, 3).double(), torch.rand(4, 3).double() + 0.1
    assert priors.Distribution(D.Normal(0.2, 0.5)).kl(mean, std).item() == pytest.approx(
        priors.Normal(0.5, 0.2).kl(mean, std).item(), rel=1e-6
    )
    assert priors.Distribution(D.Laplace(0.0, 0.5)).kl(mean, std).item() == pytest.approx(
        priors.Laplace(0.5).kl(mean, std).item(), rel=1e-6
    )
    same = priors.ScaleMixture(0.3, 1.0, 0.1)
    torch.testing.assert_close(priors.Distribution(MIXTURE).log_prob(mean), same.log_prob(mean), rtol=1e-5, atol=1e-5)


def test_any_distribution_trains():
    for distribution in (D.Cauchy(0.0, 1.0), MIXTURE, D.StudentT(torch.full((2, 1), 3.0)), D.Gumbel(0.0, 1.0)):
        bnn = network(distribution, samples=2)
        bnn.loss(BATCH).backward()
        assert all(torch.isfinite(p.grad).all() for p in bnn.parameters())
        assert torch.isfinite(torch.tensor(bl.log_evidence(bnn, [BATCH], samples=3).value))


def test_the_users_distribution_is_left_alone():
    distribution = D.Cauchy(torch.zeros(2, 1), torch.ones(2, 1))
    before = dict(vars(distribution))
    bnn = network(distribution)
    bnn.loss(BATCH).backward()
    assert {k: v for k, v in vars(distribution).items() if k in before} == before


def test_not_a_number_is_no_error_of_the_distribution():
    assert priors.Distribution(D.Cauchy(0.0, 1.0, validate_args=True)).log_prob(torch.tensor(torch.nan)).isnan()


@pytest.mark.parametrize(
    ("distribution", "error", "words"),
    [
        (D.HalfNormal(1.0), ValueError, "no density outside"),
        (D.Uniform(-1.0, 1.0), ValueError, "no density outside"),
        (D.Gamma(1.0, 1.0), ValueError, "no density outside"),
        (D.Poisson(1.0), ValueError, "no density outside"),
        (D.MultivariateNormal(torch.zeros(3), torch.eye(3)), ValueError, "is multivariate"),
        (D.Independent(D.Normal(torch.zeros(3), 1.0), 1), ValueError, "is multivariate"),
        (D.Normal(torch.zeros(5), 1.0), ShapeMismatch, "batch shape"),
        (D.Normal(torch.zeros(1, 2, 3), 1.0), ShapeMismatch, "batch shape"),
    ],
)
def test_what_cannot_be_a_prior_of_weights(distribution, error, words):
    with pytest.raises(error, match=words):
        network(distribution)


def test_what_is_no_distribution():
    with pytest.raises(TypeError, match=r"torch\.distributions"):
        priors.Distribution(priors.Normal(1.0))
    with pytest.raises(ValueError, match="cannot be learned"):
        priors.Distribution(MIXTURE, learn=True)


@pytest.mark.parametrize("batch", [False, True])
def test_settings_of_single_weights_are_cut_with_them(batch):
    scale = torch.rand(2, 3) + 0.1
    prior = (
        priors.Distribution(D.Cauchy(torch.zeros(2, 3), scale)) if batch else priors.Distribution(D.Cauchy(0.0, 0.3))
    )
    mask = torch.tensor([[True, False, True], [False, False, True]])
    w = torch.randn(2, 3)
    assert torch.equal(prior.at(mask).log_prob(w[mask]), prior.log_prob(w)[mask])
    uncut = priors.Distribution(
        D.MixtureSameFamily(D.Categorical(torch.ones(2, 3, 2)), D.Normal(torch.zeros(2, 3, 2), 1.0))
    )
    with pytest.raises(NotImplementedError, match="pruned"):
        uncut.at(mask)


EXAMPLES = [
    D.Normal(0.1, 2.0), D.Laplace(0.0, 0.5), D.StudentT(3.0, 0.1, 0.5), D.Cauchy(0.0, 0.2), D.Gumbel(0.0, 1.5),
    D.LogNormal(0.1, 0.5), D.HalfNormal(2.0), D.HalfCauchy(0.3), D.Gamma(2.0, 3.0), D.InverseGamma(2.0, 3.0),
    D.Exponential(2.0), D.Chi2(3.0), D.Weibull(1.0, 2.0), D.Beta(2.0, 3.0), D.Uniform(0.0, 2.0),
]  # fmt: skip


def test_every_known_distribution_is_saved_as_data():
    assert {type(d) for d in EXAMPLES} == set(all_registered("distribution").values())
    for distribution in EXAMPLES:
        tensors: dict[str, torch.Tensor] = {}
        prior = priors.Distribution(distribution, samples=3)
        again = decode(json.loads(json.dumps(encode(prior, tensors))), tensors)
        assert again.samples == 3
        assert type(again.distribution) is type(distribution)
        value = torch.tensor([0.2, 0.7])
        assert torch.equal(again.log_prob(value), prior.log_prob(value)), distribution


def test_save_and_load(tmp_path):
    bnn = network(D.Cauchy(torch.zeros(2, 1), torch.tensor([[0.1], [0.2]])), learn="scale")
    bnn.hyperparameters[0].raw_scale.data.add_(0.3)
    bl.save(bnn, tmp_path / "bnn")
    again = bl.load(tmp_path / "bnn", model=nn.Linear(3, 2))
    assert torch.equal(again.priors["weight"].distribution.scale, bnn.priors["weight"].distribution.scale)
    assert again.priors["weight"].distribution.scale[1].item() == pytest.approx(0.2 * 2.718281828**0.3, rel=1e-5)


def test_others_cannot_be_saved_and_leave_no_file(tmp_path):
    with pytest.raises(BayeslimError, match="MixtureSameFamily cannot be saved"):
        bl.save(network(MIXTURE), tmp_path / "bnn")
    assert not (tmp_path / "bnn").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"$dict": [["loc", 0.0], ["scale", -1.0]]},
        {"$dict": [["loc", 0.0], ["width", 1.0]]},
        {"$dict": [["loc", "a"], ["scale", 1.0]]},
        3,
    ],
)
def test_hostile_files(fields):
    with pytest.raises(CorruptFile):
        decode({"$type": "distribution:Normal", "fields": fields}, {})
    with pytest.raises(CorruptFile):
        decode({"$type": "distribution:Distribution", "fields": {"$dict": []}}, {})


def test_learns_all_but_the_location():
    bnn = network(D.StudentT(3.0, 0.0, 0.5), learn=True)
    assert [n for n, _ in bnn.hyperparameters.named_parameters()] == ["0.raw_df", "0.raw_scale"]
    with pytest.raises(ValueError, match="some of df, loc, scale"):
        priors.Distribution(D.StudentT(3.0), learn="width")
    named = network(D.StudentT(3.0, 0.0, 0.5), learn=("loc", "scale"))
    assert [n for n, _ in named.hyperparameters.named_parameters()] == ["0.raw_loc", "0.raw_scale"]


def test_gradient_of_what_is_learned():
    """Many weights with one posterior each give the expectation, whose derivative is known."""
    model, likelihood = nn.Linear(400, 500, bias=False).double(), bl.likelihoods.Gaussian(1.0)
    prior = priors.Distribution(D.Cauchy(0.0, 0.5), learn=True)
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=likelihood, prior=prior, num_data=10)
    nn.init.constant_(model.weight, 0.0)
    bnn.model.weight.data.fill_(0.3)
    bnn.model.weight_log_std.data.fill_(-1.0)
    bnn.method._weights(bnn)[2].backward()
    found = bnn.hyperparameters[0].raw_scale.grad.item() / 200_000

    def kl(log_scale: float) -> float:
        scale = torch.tensor(log_scale, dtype=torch.float64).exp()
        return integrals.kl(
            priors.Distribution(D.Cauchy(torch.zeros((), dtype=torch.float64), scale)), 0.3, 0.36787944117
        )

    assert found == pytest.approx(integrals.slope(kl, -0.69314718056, 1e-3), abs=5 / 200_000**0.5)
