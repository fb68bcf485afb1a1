"""An ensemble pruned by one plan: zeros in every member, smaller members, one network of their mean."""

from __future__ import annotations

import onnxruntime
import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.compact.restricted import NotRestrictable
from bayeslim.export import ensemble as exported_ensemble

X = torch.randn(240, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long() + (X[:, 2] > 1).long()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def loader() -> bl.data.Loader:
    return bl.data.Loader(X, Y, 60)


def train(model: nn.Module, method: bl.Method, epochs: int = 30) -> bl.Bayesian:
    torch.manual_seed(0)
    bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Categorical())
    bnn.fit(loader(), epochs=epochs, lr=0.02, seed=0, progress=False)
    return bnn.eval()


@pytest.fixture(scope="module")
def ensemble() -> bl.Bayesian:
    return bl.align(train(network(), bl.DeepEnsemble(3)), X[:4], average=True)


def accuracy(bnn: bl.Bayesian) -> float:
    return (bl.predict(bnn, X).classes == Y).float().mean().item()


def assert_zeros_in_every_particle(bnn: bl.Bayesian) -> None:
    for name, mask in bnn.masks.items():
        tensors = bnn.posterior_.values | bnn.posterior_.buffers
        assert not tensors[name][:, ~mask].any(), name
        assert not bnn.model.get_parameter(name)[~mask].any(), name


@pytest.mark.parametrize(
    ("criterion", "granularity"),
    [
        ("auto", "weight"),
        ("auto", "unit"),
        ("mass", "unit"),
        ("snr", "weight"),
        ("sign_stability", "unit"),
        ("density", "weight"),
    ],
)
def test_one_plan_for_all(ensemble, criterion, granularity):
    before = ensemble.posterior_.values["0.weight"].clone()
    pruned = bl.prune(ensemble, bl.Budget(sparsity=0.4), criterion=criterion, granularity=granularity, example=X[:4])
    assert pruned.plan_.criterion == ("magnitude" if criterion == "auto" else criterion)
    assert pruned.posterior_.count == 3
    assert_zeros_in_every_particle(pruned)
    for name, mask in pruned.masks.items():  # survivors stay
        assert torch.equal(pruned.posterior_.values[name][:, mask], ensemble.posterior_.values[name][:, mask])
    assert torch.equal(ensemble.posterior_.values["0.weight"], before)
    assert bl.predict(pruned, X).samples.shape == (3, 240, 3)
    for name, value in pruned.posterior_.mean.items():
        torch.testing.assert_close(pruned.mean_network().get_parameter(name).data, value)


def test_one_of_networks_that_are_not_aligned_stands_for_all():
    bnn = train(network(), bl.DeepEnsemble(3), epochs=2)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.4))
    last = bl.predict(pruned, X).samples[-1]
    for outputs in (pruned.eval()(X), pruned.mean_network().eval()(X), bl.predict(pruned, X, how="mean").samples[0]):
        torch.testing.assert_close(outputs, last)


def test_the_least_certain_weights_go(ensemble):
    pruned = bl.prune(ensemble, bl.Budget(sparsity=0.5), criterion="snr")
    snr = {n: v.abs() / ensemble.posterior_.std[n] for n, v in ensemble.posterior_.mean.items()}
    kept = torch.cat([snr[n][mask] for n, mask in pruned.masks.items()])
    gone = torch.cat([snr[n][~mask] for n, mask in pruned.masks.items()])
    assert gone.max() <= kept.min()


def test_networks_in_one_order_have_a_mean_and_those_of_any_order_do_not():
    apart = train(nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3)), bl.DeepEnsemble(3))
    aligned = bl.align(apart, X[:4], average=True)
    averaged = torch.func.functional_call(apart.mean_network(), apart.posterior_.mean, (X,))
    right = [(outputs.argmax(-1) == Y).float().mean().item() for outputs in (averaged, aligned.mean_network()(X))]
    assert right[1] > right[0] + 0.1


def test_fine_tuning_goes_on_from_every_member_with_its_zeros(ensemble):
    pruned = bl.prune(ensemble, bl.Budget(sparsity=0.6))
    start = accuracy(pruned)
    values = pruned.posterior_.values["5.weight"].clone()
    pruned.fit(loader(), epochs=15, lr=0.01, seed=1, progress=False)
    assert_zeros_in_every_particle(pruned)
    assert not torch.equal(pruned.posterior_.values["5.weight"], values)
    assert accuracy(pruned) > max(start, 0.8)


def test_in_steps_with_refreshed_members(ensemble):
    pruned = bl.prune(
        ensemble, bl.Budget(sparsity=0.6), steps=2, refresh=loader(), fine_tune={"epochs": 4, "lr": 0.01, "seed": 2}
    )
    assert_zeros_in_every_particle(pruned)
    zeros = sum(int((~mask).sum()) for mask in pruned.masks.values())
    assert zeros == round(0.6 * (5 * 16 + 16 * 8 + 8 * 3))
    assert pruned.posterior_.variance["0.weight"].max() > 0


def test_a_cut_searched_on_data_asks_the_whole_ensemble(ensemble):
    batches = [(X, Y)]
    pruned = bl.prune(ensemble, bl.Budget(max_error_increase=1.0), validate=batches)
    assert accuracy(pruned) >= accuracy(ensemble) - 0.0101
    assert pruned.plan_.sparsity > 0


def test_smaller_members_say_what_the_pruned_ones_said(ensemble, tmp_path):
    pruned = bl.prune(ensemble, bl.Budget(sparsity=0.5), granularity="unit", example=X[:4])
    slim = bl.compact(pruned, X[:4], bayesian=True)
    assert slim.posterior_.count == 3
    assert slim.model[0].out_features < 16 or slim.model[3].out_features < 8
    width = slim.model[0].out_features
    assert slim.posterior_.buffers["1.running_mean"].shape == (3, width)
    expected = bl.predict(pruned, X).samples
    torch.testing.assert_close(bl.predict(slim, X).samples, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(slim.eval()(X), pruned.eval()(X), rtol=1e-4, atol=1e-5)
    bl.save(slim, tmp_path / "slim")
    again = bl.load(tmp_path / "slim", model=network())
    assert torch.equal(bl.predict(again, X).samples, bl.predict(slim, X).samples)
    slim.fit(loader(), epochs=1, progress=False)
    assert slim.posterior_.count == 3


def test_one_network_of_aligned_members(ensemble):
    pruned = bl.prune(ensemble, bl.Budget(sparsity=0.4), granularity="unit", example=X[:4])
    plain = bl.compact(pruned, X[:4])
    assert type(plain) is nn.Sequential
    masked = pruned.mean_network().eval()
    torch.testing.assert_close(plain.eval()(X), masked(X), rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in plain.parameters()) < sum(p.numel() for p in masked.parameters())


def test_a_constant_that_differs_between_members_is_not_folded():
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    bnn = train(model, bl.DeepEnsemble(2), epochs=1)
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[2] = False  # this unit is a constant now, tanh of its bias
    pruned = bl.prune(bnn, bl.Plan({"0.weight": mask}))
    with pytest.raises(NotRestrictable, match=r'"2\.bias", and every particle has its own'):
        bl.compact(pruned, X[:4], bayesian=True)


def test_points_are_cut_with_their_unit():
    torch.manual_seed(0)
    bnn = bl.bayesianize(network(), bl.DeepEnsemble(2), likelihood=bl.likelihoods.Categorical(), sites="weights")
    bnn.fit(loader(), epochs=2, lr=0.02, progress=False)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.4), granularity="unit", example=X[:4])
    assert "3.bias" in pruned.masks
    assert "3.bias" in pruned.posterior_.buffers
    assert_zeros_in_every_particle(pruned)
    slim = bl.compact(pruned, X[:4], bayesian=True)
    torch.testing.assert_close(bl.predict(slim, X).samples, bl.predict(pruned, X).samples, rtol=1e-4, atol=1e-5)


def test_an_ensemble_is_exported_with_every_member_once(ensemble, tmp_path):
    names = ("mean", "variance", "entropy", "aleatoric", "epistemic")
    for samples, networks in ((None, 3), (2, 2), (9, 3)):
        together = exported_ensemble(ensemble, samples)
        assert len(together.members) == networks
        expected = bl.predict(ensemble, X, samples=samples)
        for found, name in zip(together(X), names, strict=True):
            torch.testing.assert_close(found, getattr(expected, name), rtol=1e-4, atol=1e-6)
    bl.export(ensemble, tmp_path / "ensemble.onnx", example=X[:4])
    session = onnxruntime.InferenceSession(tmp_path / "ensemble.onnx")
    expected = bl.predict(ensemble, X)
    for found, name in zip(session.run(None, {session.get_inputs()[0].name: X.numpy()}), names, strict=True):
        torch.testing.assert_close(torch.from_numpy(found), getattr(expected, name), rtol=1e-3, atol=1e-5)
