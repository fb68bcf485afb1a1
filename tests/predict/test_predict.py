"""Prediction: against the exact predictive, whatever the batches, and without a trace on the network."""

from __future__ import annotations

import importlib
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl
from bayeslim import likelihoods
from bayeslim.errors import ShapeMismatch
from bayeslim.posteriors import Diagonal
from oracles import linear_regression


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classifier(method: bl.Method | None = None, std: float = 0.3) -> bl.Bayesian:
    family = bl.families.DiagonalGaussian(initial_std=std)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 4))
    method = method or bl.Variational(family=family)
    return bl.bayesianize(model, method, likelihood=likelihoods.Categorical(), num_data=10)


def at_posterior(model: nn.Module, likelihood, mean, std) -> bl.Bayesian:
    """A Bayesian network whose posterior is what is given."""
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=likelihood, num_data=1)
    for name in bnn.sites.names:
        bnn.model.get_parameter(name).data.copy_(mean)
        bnn.method.family.log_std(bnn.model, name).data.copy_(std.log())
    return bnn


@pytest.mark.parametrize("how", ["sample", "auto", "local"])
def test_converges_to_the_exact_predictive_of_linear_regression(how):
    """Orthogonal inputs make the exact posterior diagonal, so mean-field prediction has nothing to lose."""
    noise, n, samples = 0.6, 12, 3000
    X = torch.linalg.qr(torch.randn(n, 3).double())[0] * torch.tensor([3.0, 2.0, 1.0])
    y = X @ torch.randn(3).double() + noise * torch.randn(n)
    mean, covariance, _ = linear_regression(X, y, noise, 1.0)
    assert torch.allclose(covariance, torch.diag(covariance.diagonal()), atol=1e-12)
    bnn = at_posterior(
        nn.Linear(3, 1, bias=False).double(), likelihoods.Gaussian(noise), mean, covariance.diagonal().sqrt()
    )
    x = torch.randn(5, 3).double()
    prediction = bl.predict(bnn, x, samples=samples, how=how, generator=seeded())
    spread = (x @ covariance * x).sum(1, keepdim=True)
    assert ((prediction.mean - (x @ mean)[:, None]).abs() < 4 * (spread / samples).sqrt()).all()
    assert torch.allclose(prediction.epistemic, spread, rtol=4 * (2 / samples) ** 0.5)
    assert torch.allclose(prediction.aleatoric, torch.full_like(spread, noise**2))
    assert torch.equal(prediction.variance, prediction.aleatoric + prediction.epistemic)
    assert prediction.samples.shape == (samples, 5, 1)


def test_weights_are_drawn_once_a_sample_not_once_a_batch(monkeypatch):
    bnn, calls = classifier(), []
    draw = Diagonal.sample
    monkeypatch.setattr(Diagonal, "sample", lambda self, n=None, **k: calls.append(n) or draw(self, n, **k))
    monkeypatch.setattr(
        importlib.import_module("bayeslim.predict.predict"), "MAX_NUMBERS_PER_DRAW", 3 * bnn.posterior_.num_parameters
    )
    x = torch.randn(1, 3).expand(10, 3)
    prediction = bl.predict(bnn, x, samples=7, batch_size=2)
    assert calls == [3, 3, 1]
    # the same example in every batch, so the same output from the same weights
    assert torch.allclose(prediction.samples, prediction.samples[:, :1].expand(7, 10, 4), atol=1e-6)
    assert prediction.samples.std(0).min() > 1e-3


@pytest.mark.parametrize("batch_size", [70, 256, 257, None])
@pytest.mark.parametrize("how", ["sample", "mean"])
def test_batch_size_does_not_change_the_result(batch_size, how):
    bnn, x = classifier(), torch.randn(300, 3)  # of more than 256 at once, one network after the other is called
    whole = bl.predict(bnn, x, samples=5, how=how, generator=seeded())
    parts = bl.predict(bnn, x, samples=5, how=how, batch_size=batch_size, generator=seeded())
    assert torch.allclose(whole.samples, parts.samples, atol=1e-6)
    assert torch.allclose(whole.epistemic, parts.epistemic, atol=1e-6)


def test_a_loader_equals_its_tensor():
    bnn, x, y = classifier(), torch.randn(10, 3), torch.zeros(10, dtype=torch.long)
    whole = bl.predict(bnn, x, samples=5, generator=seeded())
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    for source in (loader, (batch for batch in loader)):
        assert torch.allclose(whole.samples, bl.predict(bnn, source, samples=5, generator=seeded()).samples, atol=1e-6)


def test_a_shuffling_loader_never_mixes_examples():
    bnn, x = classifier(std=1e-6), torch.randn(40, 3)
    loader = DataLoader(TensorDataset(x, torch.zeros(40)), batch_size=8, shuffle=True)
    prediction = bl.predict(bnn, loader, samples=6)
    assert prediction.samples.std(0).max() < 1e-3
    assert prediction.samples[0].std(0).min() > 0.05


def test_an_empty_loader_is_refused():
    with pytest.raises(ShapeMismatch, match="no batches"):
        bl.predict(classifier(), DataLoader([]))


@pytest.mark.parametrize("how", ["mean", "map"])
def test_the_mean_network(how):
    bnn, x = classifier(), torch.randn(6, 3)
    prediction = bl.predict(bnn, x, how=how)
    assert prediction.samples.shape == (1, 6, 4)
    assert torch.allclose(prediction.samples[0], bnn.mean_network().eval()(x), atol=1e-6)
    assert prediction.epistemic.max() == 0


def test_local_noise_is_independent_between_examples():
    bnn, x = classifier(), torch.randn(1, 3).expand(2, 3)
    local = bl.predict(bnn, x, samples=600, how="local").samples[:, :, 0]
    assert torch.corrcoef(local.T)[0, 1].abs() < 0.2
    shared = bl.predict(bnn, x, samples=50, how="sample").samples[:, :, 0]
    assert torch.corrcoef(shared.T)[0, 1] > 0.999
    assert local.std() == pytest.approx(shared.std().item(), rel=0.5)


@pytest.mark.parametrize("how", ["sample", "local", "mean"])
def test_repeats_by_generator_and_leaves_the_global_one_alone(how):
    bnn, x = classifier(), torch.randn(6, 3)
    bl.predict(bnn, x, samples=2, how=how)
    state = torch.get_rng_state()
    first = bl.predict(bnn, x, samples=3, how=how, generator=seeded(4)).samples
    torch.rand(5)
    second = bl.predict(bnn, x, samples=3, how=how, generator=seeded(4)).samples
    assert torch.equal(first, second)
    torch.set_rng_state(state)
    bl.predict(bnn, x, samples=3, how=how, generator=seeded(4))
    assert torch.equal(state, torch.get_rng_state())
    if how != "mean":
        assert not torch.equal(first, bl.predict(bnn, x, samples=3, how=how, generator=seeded(5)).samples)


@pytest.mark.parametrize("how", ["sample", "local", "mean"])
def test_leaves_the_network_as_it_was(how):
    bnn, x = classifier(), torch.randn(6, 3)
    bnn.loss((x, torch.zeros(6, dtype=torch.long))).backward()
    bnn.train()
    bnn.model[2].eval()
    modes = [m.training for m in bnn.modules()]
    gradients = [None if p.grad is None else p.grad.clone() for p in bnn.parameters()]
    state = {k: v.clone() for k, v in bnn.state_dict().items()}
    prediction = bl.predict(bnn, x, samples=3, how=how)
    assert not prediction.mean.requires_grad
    assert [m.training for m in bnn.modules()] == modes
    assert all(torch.equal(v, state[k]) for k, v in bnn.state_dict().items())
    for p, before in zip(bnn.parameters(), gradients, strict=True):
        assert p.requires_grad
        assert before is None or torch.equal(p.grad, before)


def test_mode_is_put_back_after_an_error():
    bnn = classifier().train()
    with pytest.raises(ShapeMismatch):
        bl.predict(bnn, torch.randn(6, 5))
    assert all(m.training for m in bnn.modules())


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, left, right):
        return self.a(left) + self.b(right)


def test_tuples_and_dicts():
    bnn = bl.bayesianize(TwoInputs(), bl.Variational(), likelihood=likelihoods.Categorical())
    left, right = torch.randn(10, 3), torch.randn(10, 4)
    expected = bl.predict(bnn, (left, right), samples=4, generator=seeded()).samples
    as_dict = {"left": left, "right": right}
    for x in ((left, right), as_dict, UserDict(as_dict)):
        for size in (3, None):
            got = bl.predict(bnn, x, samples=4, batch_size=size, generator=seeded()).samples
            assert torch.allclose(got, expected, atol=1e-6)
    loader = [{"left": left[i : i + 5], "right": right[i : i + 5], "labels": torch.zeros(5)} for i in (0, 5)]
    got = bl.predict(bnn, iter(loader), samples=4, generator=seeded()).samples
    assert torch.allclose(got, expected, atol=1e-6)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 5, num_layers=2, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[1][0][-1])


@pytest.mark.parametrize("how", ["sample", "local", "mean"])
def test_packed_sequences(how):
    bnn = bl.bayesianize(Recurrent(), bl.Variational(), likelihood=likelihoods.Categorical())
    sequences = [torch.randn(n, 2) for n in (5, 4, 2)]
    prediction = bl.predict(bnn, pack_sequence(sequences), samples=4, how=how, batch_size=2)
    assert prediction.probs.shape == (3, 3)
    if how == "mean":
        alone = torch.stack([bnn.mean_network()(s[None])[0] for s in sequences])
        assert torch.allclose(prediction.samples[0], alone, atol=1e-6)


def test_refuses_what_it_cannot_do():
    bnn, x = classifier(), torch.randn(6, 3)
    with pytest.raises(ValueError, match="samples"):
        bl.predict(bnn, x, samples=0)
    with pytest.raises(ValueError, match="how must be one of"):
        bl.predict(bnn, x, how="guess")


def test_a_method_may_know_better():
    known = likelihoods.Categorical().predict(torch.zeros(1, 2, 3))

    class Knowing(bl.Variational):
        def predictive(self, bnn, batches, samples, how, generator):
            return known if how == "auto" else None

    bnn = classifier(Knowing())
    assert bl.predict(bnn, torch.randn(6, 3)) is known
    assert len(bl.predict(bnn, torch.randn(6, 3), how="sample", samples=2)) == 6


class Watched(nn.Module):
    """Remembers how many examples it was given at once."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
        self.seen: list[int] = []

    def forward(self, x):
        self.seen.append(len(x))
        return self.layers(x)


@pytest.mark.parametrize(
    "method",
    [
        bl.Variational(), bl.Laplace(), bl.MCDropout(), bl.MCAugmentation(noise=0.1), bl.MCBatchNorm(2),
        bl.SWAG(samples=2, every=1), bl.SWA(), bl.SGLD(samples=2), bl.SVGD(particles=2), bl.DeepEnsemble(2),
    ],
    ids=lambda method: method.name,
)  # fmt: skip
@pytest.mark.parametrize("how", ["auto", "mean"])
def test_no_more_examples_at_once_than_asked_for(method, how):
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    bnn = bl.bayesianize(Watched(), method, likelihood=likelihoods.Categorical())
    options = {} if method.name in ("laplace", "mc-batch-norm") else {"epochs": 4}
    bnn.fit(bl.data.Loader(x, y, batch_size=10), **options)
    bnn.model.seen.clear()
    prediction = bl.predict(bnn, x, samples=2, how=how, batch_size=5)
    assert len(prediction) == 20
    probes = 1 if method.name == "mc-dropout" else 0  # a pass with one more tells which dimension has the examples
    assert 0 < max(bnn.model.seen) <= 5 + probes
    bnn.model.seen.clear()
    bl.predict(bnn, x, samples=2, how=how, batch_size=None)
    assert max(bnn.model.seen) >= 20


def test_a_layer_with_a_forward_of_its_own_is_called():
    model, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(6, 3)
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=likelihoods.Gaussian())
    bnn.model[2].forward = lambda hidden: torch.full((len(hidden), 2), 7.0)
    assert (bl.predict(bnn, x, samples=3, how="sample").samples == 7).all()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"batch_size": 0}, ValueError, "positive whole number. Got 0"),
        ({"batch_size": "all"}, ValueError, "Got 'all'"),
        ({"samples": 1.5}, ValueError, "a whole number, at least 1. Got 1.5"),
        ({"generator": 0}, TypeError, "manual_seed"),
        ({"x": torch.zeros(0, 3)}, ShapeMismatch, "no examples"),
    ],
)
@pytest.mark.parametrize("method", [bl.Variational(), bl.DeepEnsemble(2), bl.Laplace()])
def test_what_cannot_be_predicted_is_refused(method, options, error, words):
    x, y = torch.randn(12, 3), torch.randn(12, 1)
    bnn = bl.bayesianize(nn.Linear(3, 1), method, likelihood=bl.likelihoods.Gaussian(0.1))
    bnn.fit([(x, y)], progress=False, **({} if method.name == "laplace" else {"epochs": 1}))
    with pytest.raises(error, match=words):
        bl.predict(bnn, **{"x": x} | options)


@pytest.mark.parametrize("method", [bl.Variational(), bl.Laplace()])
def test_a_loader_to_predict_from_needs_no_targets(method):
    x, y = torch.randn(12, 3), torch.randn(12, 1)
    bnn = bl.bayesianize(nn.Linear(3, 1), method, likelihood=bl.likelihoods.Gaussian(0.1), num_data=12)
    bnn.fit([(x, y)], progress=False, **({} if method.name == "laplace" else {"epochs": 1}))
    wanted = bl.predict(bnn, x, generator=seeded()).mean
    for loader in ([(x, y)], torch.utils.data.DataLoader(x, 5), [(x,)]):
        loader = loader if not isinstance(loader, list) else torch.utils.data.DataLoader(loader, batch_size=None)
        torch.testing.assert_close(bl.predict(bnn, loader, generator=seeded()).mean, wanted)


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), (4, 5), r"takes 6 features, and was given 5.*\(4, 5\)"),
        (nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten()), (4, 1, 2, 2), r"takes 3 channels, and was given 1"),
    ],
)
def test_inputs_of_another_width_are_refused_in_the_networks_own_terms(model, shape, message):
    bnn = bl.bayesianize(model, bl.DeepEnsemble(3), likelihood=bl.likelihoods.Gaussian())
    stack = {name: torch.randn(3, *p.shape) for name, p in model.named_parameters()}
    bnn.state["posterior"] = bl.posteriors.Particles(stack)
    with pytest.raises(ShapeMismatch, match=message):
        bl.predict(bnn, torch.randn(shape))
