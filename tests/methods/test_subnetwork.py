"""Which weights a subnetwork takes, and what its posterior is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bayeslim as bl
import oracles
from bayeslim.errors import BayeslimError, BayeslimWarning
from bayeslim.likelihoods import Categorical


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def data(dead_input: bool = False) -> tuple[Tensor, Tensor]:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(1)).double()
    if dead_input:
        x[:, 2] = 0
    return x, torch.arange(30) % 3


def fitted(subset: bl.Subnetwork, dead_input: bool = False, std: float = 2.0) -> bl.Bayesian:
    method = bl.Laplace(subset=subset, curvature="exact")
    bnn = bl.bayesianize(network(), method, likelihood=Categorical(), prior=bl.priors.Normal(std))
    bnn.fit([data(dead_input)], progress=False)
    return bnn


def places(bnn: bl.Bayesian) -> list[int]:
    """The chosen weights in the long vector of all."""
    offset, found = 0, []
    for name, p in bnn.model.named_parameters():
        found += [offset + int(i) for i in bnn.posterior_.indices.get(name, ())]
        offset += p.numel()
    return found


def curvature(x: Tensor, y: Tensor) -> Tensor:
    return oracles.ggn(network(), [(x, y)], Categorical())


def test_the_largest_variances_are_taken():
    bnn = fitted(bl.Subnetwork(10))
    variance = 1 / (curvature(*data()).diagonal() + 0.25)
    assert places(bnn) == variance.topk(10).indices.sort().values.tolist()


def test_the_smallest_signal_to_noise_is_taken():
    bnn = fitted(bl.Subnetwork(10, "snr"))
    weights = oracles.flat(dict(network().named_parameters()), oracles.parameter_names(network())).detach()
    snr = weights.abs() * (curvature(*data()).diagonal() + 0.25).sqrt()
    assert places(bnn) == (-snr).topk(10).indices.sort().values.tolist()


def test_a_random_subnetwork_follows_its_seed():
    first, again, other = (places(fitted(bl.Subnetwork(10, "random", seed))) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(set(first)) == 10


@pytest.mark.parametrize("by", ["variance", "snr", "random"])
def test_the_posterior_is_the_subnetworks_own_block(by):
    """Its precision is a block of the whole precision, not of the inverse, with the prior rescaled by S/D."""
    bnn = fitted(bl.Subnetwork(10, by))
    chosen, (x, y) = places(bnn), data()
    block = curvature(x, y)[chosen][:, chosen]
    size = sum(p.numel() for p in network().parameters())
    precision = block + 0.25 * 10 / size * torch.eye(10).double()
    torch.testing.assert_close(bnn.posterior_.precision, precision)
    J = oracles.jacobian(network(), x)[:, :, chosen]
    expected = J @ torch.linalg.inv(precision) @ J.mT
    kappa = (1 + torch.pi / 8 * expected.diagonal(dim1=1, dim2=2)).rsqrt()
    torch.testing.assert_close(bl.predict(bnn, x, how="probit").probs, (network()(x).detach() * kappa).softmax(-1))
    random = bnn.posterior_.support
    draw = bnn.posterior_.sample()
    for name, p in network().named_parameters():
        if name in draw:
            assert torch.equal(draw[name][~random[name]], p.detach()[~random[name]])
    weights = oracles.flat(dict(network().named_parameters()), oracles.parameter_names(network())).detach()[chosen]
    prior = 0.25 * 10 / size
    log_prior = 0.5 * (10 * torch.tensor(prior).double().log() - prior * weights.square().sum())
    likelihood = Categorical().log_prob(network()(x), y).sum().detach()
    evidence = likelihood + log_prior - 0.5 * precision.logdet()
    assert bl.log_evidence(bnn, [(x, y)]).value == pytest.approx(float(evidence), rel=1e-8)


def test_inert_weights_are_passed_over_with_a_warning():
    with pytest.warns(BayeslimWarning, match=r"6 of 51 weights move no output .* passed over in choosing"):
        bnn = fitted(bl.Subnetwork(12), dead_input=True)
    rows, columns = bnn.posterior_.indices["0.weight"] // 4, bnn.posterior_.indices["0.weight"] % 4
    assert 2 not in columns
    assert len(rows)
    assert bl.predict(bnn, data(True)[0]).epistemic.min() > 0


def test_inert_weights_are_taken_when_there_is_nothing_else():
    with pytest.warns(BayeslimWarning, match="3 of them had to be taken"):
        bnn = fitted(bl.Subnetwork(48), dead_input=True)
    assert sum(int(i) % 4 == 2 for i in bnn.posterior_.indices["0.weight"]) == 3


def test_ties_are_broken_by_usefulness():
    mean = {"w": torch.tensor([1.0, 3.0, 2.0, 0.5])}
    tied = {"w": torch.full((4,), 5.0)}
    chosen = bl.Subnetwork(2).choose(mean, tied, {"w": torch.ones(4)}, {})
    assert chosen["w"].tolist() == [1, 2]


def test_a_pruned_network_chooses_among_its_weights():
    method = bl.Laplace(subset=bl.Subnetwork(10), curvature="exact")
    bnn = bl.bayesianize(network(), method, likelihood=Categorical())
    bnn.masks = {"0.weight": torch.zeros(6, 4, dtype=torch.bool)}
    bnn.keep_zeros()
    bnn.fit([data()], progress=False)
    assert "0.weight" not in bnn.posterior_.mean


def test_tuning_writes_the_prior_of_the_whole_network():
    bnn = fitted(bl.Subnetwork(10))
    bnn.fit([data()], tune="evidence", progress=False)
    size = sum(p.numel() for p in network().parameters())
    name = next(iter(bnn.posterior_.mean))
    assert bnn.priors[name].std ** -2 == pytest.approx(float(bnn.posterior_.prior_precision) * size / 10)
    before = bl.log_evidence(bnn, [data()]).value
    bnn.priors |= dict.fromkeys(bnn.priors, bnn.priors[name])  # the same for all, so that the same weights are chosen
    bnn.fit([data()], progress=False)
    assert bl.log_evidence(bnn, [data()]).value == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize(
    ("subset", "words"),
    [
        (bl.Subnetwork(0), "at least 1"),
        (bl.Subnetwork(5, "size"), 'must be "variance", "snr" or "random"'),
    ],
    ids=str,
)
def test_settings_that_mean_nothing(subset, words):
    with pytest.raises(ValueError, match=words):
        bl.Laplace(subset=subset)


def test_more_weights_than_there_are():
    with pytest.raises(ValueError, match=r"52 weights was asked for, and there are 51"):
        fitted(bl.Subnetwork(52))
    with pytest.raises(BayeslimError, match=r"100,000 weights takes 40 GB"):
        fitted(bl.Subnetwork(100_000))
    with pytest.raises(ValueError, match='use structure="full"'):
        bl.Laplace("kron", bl.Subnetwork(5))


@pytest.mark.parametrize("tune", [None, "evidence"])
def test_the_rescaled_prior_shows(tmp_path, tune):
    method = bl.Laplace(subset=bl.Subnetwork(9), curvature="exact")
    bnn = bl.bayesianize(network(), method, likelihood=Categorical(), prior=bl.priors.Normal(2.0))
    size = sum(p.numel() for p in network().parameters())
    assert bnn.priors.used["0.weight"] == bnn.priors["0.weight"] == bl.priors.Normal(2.0)
    assert "rescaled" not in repr(bnn.priors)
    for _ in range(2):  # fitting again does not rescale again
        bnn.fit([data()], tune=tune, progress=False)
        name = bnn.posterior_.names[0]
        used = bnn.posterior_.prior_precision
        used = float(used[name] if isinstance(used, dict) else used)
        assert bnn.priors.used[name].std == pytest.approx(used**-0.5)
        assert bnn.priors[name].std == pytest.approx((used * size / 9) ** -0.5)
        assert f"rescaled to {bnn.priors.used[name]!r} in the subnetwork" in repr(bnn.priors)
    if tune is None:
        assert bnn.priors.used[name].std == pytest.approx(2.0 * (size / 9) ** 0.5)
    bl.save(bnn, tmp_path)
    again = bl.load(tmp_path, model=network())
    assert repr(again.priors) == repr(bnn.priors)


def test_weights_outside_of_the_subnetwork_keep_their_prior():
    bnn = fitted(bl.Subnetwork(1))
    (name,) = bnn.posterior_.names
    assert {n for n in bnn.sites.names if bnn.priors.used[n] != bnn.priors[n]} == {name}
