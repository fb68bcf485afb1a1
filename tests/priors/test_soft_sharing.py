"""Soft weight sharing: the density, what is learned, and the codebook that it leaves."""

import pytest
import torch
from scipy import integrate
from torch import nn

import bayeslim as bl
from bayeslim import priors
from bayeslim.app.data import Loader


def test_the_density_is_the_mixtures_and_integrates_to_one():
    prior = priors.SoftSharing(components=5, spread=0.8, zero=0.6)
    assert prior.centres.tolist() == pytest.approx([0.0, -0.8, -0.4, 0.4, 0.8])
    w = torch.tensor([-0.7, 0.0, 0.31], dtype=torch.float64)
    parts = torch.distributions.Normal(prior.centres.double(), prior.stds.double())
    wanted = (parts.log_prob(w[:, None]).exp() * prior.shares.double()).sum(1).log()
    assert torch.allclose(prior.log_prob(w), wanted)
    total, _ = integrate.quad(lambda x: float(prior.log_prob(torch.tensor(x)).exp()), -5, 5, points=[0.0], limit=200)
    assert total == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("components", [2, 3, 16])
def test_no_other_component_starts_at_zero(components):
    prior = priors.SoftSharing(components=components)
    assert len(prior.means) == components - 1
    assert bool((prior.means != 0).all())
    assert float(prior.shares[0]) == pytest.approx(0.9)


def test_draws_are_from_it():
    prior = priors.SoftSharing(components=4, spread=1.0, zero=0.5)
    draws = prior.sample((200_000,), torch.Generator().manual_seed(0)).double()
    shares, centres, widths = prior.shares.double(), prior.centres.double(), prior.stds.double()
    second = float((shares * (centres.square() + widths.square())).sum())
    assert float(draws.mean()) == pytest.approx(float((shares * centres).sum()), abs=0.01)
    assert float(draws.square().mean()) == pytest.approx(second, rel=0.02)


def test_far_out_nothing_overflows():
    prior = priors.SoftSharing()
    w = torch.tensor([1e3, -1e3, 0.0], requires_grad=True)
    prior.log_prob(w).sum().backward()
    assert bool(w.grad.isfinite().all())


@pytest.fixture(scope="module")
def shared():
    """A network with weights of three kinds, trained to share them."""
    torch.manual_seed(0)
    truth = torch.randint(0, 3, (4, 12)).double() - 1
    x = torch.randn(512, 12)
    y = x @ (0.6 * truth.T.float()) + 0.02 * torch.randn(512, 4)
    prior = priors.SoftSharing(components=4, spread=1.0, zero=0.4)
    model = nn.Linear(12, 4, bias=False)
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=bl.likelihoods.Gaussian(0.05), prior=prior)
    bnn.fit(Loader(x, y, batch_size=64, seed=0), epochs=40, lr=2e-2, lr_schedule="cosine", progress=False)
    return bnn, truth


def test_components_go_where_weights_gather_and_become_a_codebook(shared):
    bnn, truth = shared
    prior = bnn.priors["weight"]
    found = bl.quantise(bnn, codebook="prior")
    grid, codes = found.grids["weight"], found.codes["weight"]
    assert torch.allclose(grid.values, prior.centres.detach().bfloat16().float())
    assert torch.equal(grid.decode(codes), found.network.weight.detach())
    assert torch.equal(found.network.weight.sign().double(), truth)
    assert torch.allclose(found.network.weight.double(), 0.6 * truth, atol=0.02)
    assert bool((codes[truth == 0] == 0).all())
    # two of the levels have weights, at ± 0.6, and each took up its share of them
    assert float(prior.stds.detach()[codes.unique()].max()) < 0.15


def test_a_weight_goes_to_the_component_most_responsible_for_it(shared):
    bnn, _ = shared
    found = bl.quantise(bnn, codebook="prior", how="nearest")
    most = bnn.priors["weight"].log_joint(bnn.posterior_.mean["weight"]).argmax(-1)
    assert torch.equal(found.codes["weight"], most)


def test_it_is_saved_and_shared_by_layer(shared, tmp_path):
    bnn, _ = shared
    bl.save(bnn, tmp_path / "net")
    again = bl.load(tmp_path / "net", model=nn.Linear(12, 4, bias=False))
    assert torch.equal(again.priors["weight"].centres, bnn.priors["weight"].centres)
    assert repr(again.priors.given["weight"]) == "SoftSharing(components=4)"
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    many = bl.bayesianize(
        model,
        bl.Variational(),
        likelihood=bl.likelihoods.Categorical(),
        prior=priors.per_layer(priors.SoftSharing(components=3)),
        num_data=10,
    )
    assert len(many.hyperparameters) == 2
    assert many.loss((torch.randn(4, 3), torch.zeros(4, dtype=torch.int64))).isfinite()


def test_pruning_keeps_it(shared):
    bnn, _ = shared
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.25))
    assert pruned.loss((torch.randn(4, 12), torch.zeros(4, 4))).isfinite()
    assert not bool(bl.quantise(pruned, codebook="prior").codes["weight"][~pruned.masks["weight"]].any())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"components": 1}, "at least one more"),
        ({"spread": 0.0}, "positive"),
        ({"zero": 1.0}, "share"),
        ({"means": torch.zeros(3)}, r"shape \(15,\)"),
        ({"stds": -torch.ones(16)}, "positive"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        priors.SoftSharing(**options)
