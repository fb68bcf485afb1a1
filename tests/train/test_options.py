"""Options of `fit` with impossible values are refused by name, before anything is changed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl
from bayeslim.errors import BayeslimError, ShapeMismatch
from bayeslim.likelihoods import Categorical

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 2
METHODS = {
    "variational": bl.Variational(),
    "ivon": bl.IVON(),
    "ensemble": bl.DeepEnsemble(members=2),
    "snapshot": bl.Snapshot(cycles=1),
    "swa": bl.SWA(start=0.0, every=1),
    "swag": bl.SWAG(start=0.0, every=1),
    "multi-swag": bl.MultiSWAG(members=2, start=0.0, every=1),
    "sgld": bl.SGLD(samples=2),
    "svgd": bl.SVGD(particles=2),
}


def loader(**settings) -> bl.data.Loader:
    return bl.data.Loader(X, Y, batch_size=8, **settings)


def bayesian(method: bl.Method | None = None) -> bl.Bayesian:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return bl.bayesianize(model, bl.Variational() if method is None else method, likelihood=Categorical())


def assert_refused(bnn: bl.Bayesian, error: type[Exception], words: str, **options) -> None:
    before = {name: value.clone() for name, value in bnn.state_dict().items()}
    with pytest.raises(error, match=words):
        bnn.fit(loader(), progress=False, **({"epochs": 1} | options))
    assert all(torch.equal(value, before[name]) for name, value in bnn.state_dict().items())


REFUSED = [
    ({"clip": -1}, ValueError, "clip is the largest norm .* Got -1"),
    ({"clip": math.nan}, ValueError, "clip"),
    ({"seed": "a"}, TypeError, "seed must be a whole number. Got 'a'"),
    ({"lr": "0.1"}, TypeError, "lr must be a number"),
    ({"lr": math.nan}, ValueError, "lr must be finite"),
    ({"autocast": "bf16"}, TypeError, "autocast must be torch.bfloat16"),
    ({"accumulate": 0}, ValueError, "accumulate is a number of batches"),
    ({"epochs": 0}, ValueError, "epochs must be a whole number"),
    ({"device": "cuda:77"}, ValueError, 'device="cuda:77" is not available'),
    ({"device": "meta"}, ValueError, 'device="meta" is the meta device, where tensors have no values'),
    ({"device": "gpu"}, ValueError, "device must be"),
]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_refuses_it_at_once(name):
    for options, error, words in REFUSED:
        assert_refused(bayesian(METHODS[name]), error, words, **options)


@pytest.mark.parametrize("patience", [0, -1, 1.5, True])
def test_patience_is_a_number_of_epochs(patience):
    assert_refused(bayesian(), ValueError, "patience is a number of epochs", patience=patience, validate=loader())


@pytest.mark.parametrize("name", METHODS)
def test_a_checkpoint_that_cannot_be_written_is_found_before_training(name, tmp_path):
    file = tmp_path / "file"
    file.write_text("in the way")
    seen = []
    options = {"checkpoint": file / "run", "callbacks": [seen.append]}
    assert_refused(bayesian(METHODS[name]), BayeslimError, "checkpoint must be a folder", **options)
    assert not seen


@pytest.mark.parametrize("name", ["ensemble", "snapshot", "swa", "swag", "multi-swag", "svgd", "sgld"])
def test_an_unknown_option_is_refused_before_weights_are_drawn(name):
    assert_refused(bayesian(METHODS[name]), TypeError, "patiense", patiense=3)


@pytest.mark.parametrize("name", ["snapshot", "swa", "swag", "multi-swag"])
@pytest.mark.parametrize("option", [{"lr_schedule": "cosine"}, {"patience": 2}])
def test_an_option_that_a_method_refuses_is_refused_before_weights_are_drawn(name, option):
    assert_refused(bayesian(METHODS[name]), ValueError, f"takes no {next(iter(option))}", **option)


@pytest.mark.parametrize("method", [bl.SWAG(), bl.MultiSWAG(members=1), bl.SWAG(start=0.9, every=2)])
def test_too_few_networks_for_a_variance_are_found_before_training(method):
    seen = []
    assert_refused(bayesian(method), BayeslimError, "needs at least 2", callbacks=[seen.append])
    assert not seen


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_temperatures_that_mean_nothing(temperature):
    with pytest.raises(ValueError, match=r"temperature must be (a )?finite"):
        bl.Variational(temperature=temperature)


def test_true_is_no_number_of_data():
    with pytest.raises(ValueError, match="num_data is the number"):
        bl.bayesianize(nn.Linear(3, 2), bl.Variational(), likelihood=Categorical(), num_data=True)


@pytest.mark.parametrize("method", [bl.Variational(), bl.DeepEnsemble(members=1), bl.SGLD(samples=1), bl.HMC(2, 2)])
def test_targets_that_are_all_ignored(method):
    bnn, ignored = bayesian(method), bl.data.Loader(X, torch.full_like(Y, -100), batch_size=8)
    with pytest.raises(BayeslimError, match="All targets are -100"):
        bnn.fit(ignored, progress=False)
    some = torch.where(torch.arange(24) < 20, -100, Y)
    bayesian(method).fit(bl.data.Loader(X, some, batch_size=4, shuffle=False), progress=False)


class Short:
    """A loader that gives fewer batches than it says."""

    dataset = TensorDataset(X, Y)

    def __len__(self) -> int:
        return 5

    def __iter__(self):
        return iter([(X[:8], Y[:8])] * 4)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loader_that_is_shorter_than_it_says(accumulate):
    with pytest.raises(BayeslimError, match="gave 4 batches, fewer than its length, 5"):
        bayesian().fit(Short(), epochs=2, accumulate=accumulate, progress=False)


def test_batches_of_three_for_a_network_of_one_input():
    data = DataLoader(TensorDataset(X, X, Y), batch_size=8)
    with pytest.raises(
        ShapeMismatch, match=r"A batch of 3 is taken as 2 inputs and the targets.*Yield \(inputs, targets"
    ):
        bayesian().fit(data, epochs=1, progress=False)


class Two(nn.Module):
    """A network of two inputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, a, b):
        return self.linear(a + b)


def test_batches_of_three_for_a_network_of_two_inputs():
    bnn = bl.bayesianize(Two(), bl.Variational(), likelihood=Categorical())
    bnn.fit(DataLoader(TensorDataset(X, X, Y), batch_size=8), epochs=1, progress=False)


@pytest.mark.parametrize("name", [*METHODS, "ensemble one by one"])
@pytest.mark.parametrize("kind", ["bayeslim", "torch"])
def test_a_seed_makes_a_run_repeat_with_a_loader_that_goes_on(name, kind):
    """The loader remembers its epoch, or its generator its state, and a seed starts both anew."""
    if kind == "bayeslim":
        data = loader()
    else:
        generator = torch.Generator().manual_seed(3)
        data = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, generator=generator)
    method = bl.DeepEnsemble(members=2, together=False) if name == "ensemble one by one" else METHODS[name]
    found = []
    for seed in (0, 0, 1):
        bnn = bayesian(method)
        bnn.fit(data, epochs=2, seed=seed, progress=False)
        found.append(torch.cat([value.flatten() for value in bnn.posterior_.sample(generator=seeded()).values()]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_a_loader_goes_on_where_it_was_after_a_run_with_a_seed():
    data = loader(seed=4)
    next(iter(data))
    before = data.state_dict()
    bayesian().fit(data, epochs=2, seed=0, progress=False)
    assert data.state_dict() == before


def test_validation_data_are_batches_of_numbers():
    with pytest.raises(TypeError, match=r"validate must be a loader of batches\. Got int"):
        bayesian().fit(loader(), epochs=1, validate=3, progress=False)
    with pytest.raises(BayeslimError, match="validation data hold NaN"):
        bayesian().fit(loader(), epochs=1, validate=[(torch.full_like(X, math.nan), Y)], progress=False)


def test_numbers_of_draws_and_of_weights_are_whole():
    with pytest.raises(ValueError, match="samples must be a whole number"):
        bl.predict(bayesian(), X, samples=True)
    with pytest.raises(ValueError, match=r"must be a whole number, at least 1\. Got 1\.5"):
        bl.Subnetwork(size=1.5).check()


def test_a_huge_rate_of_ivon_is_refused():
    with pytest.raises(ValueError, match="lr=1e\\+38 is too large"):
        bayesian(bl.IVON()).fit(loader(), epochs=1, lr=1e38, progress=False)


def test_a_fit_without_epochs_is_a_single_pass():
    assert len(bayesian().fit(loader(), progress=False).history) == 1


@pytest.mark.parametrize("kind", [bl.data.Loader, lambda x, y, **given: DataLoader(TensorDataset(x, y), **given)])
def test_an_exact_sampler_refuses_a_loader_that_leaves_examples_out(kind):
    method = bl.HMC(samples=1, warmup=1, leapfrog=1)
    with pytest.raises(BayeslimError, match=f"needs all {len(X)} examples, and the loader leaves out the last 1"):
        bayesian(method).fit(kind(X, Y, batch_size=len(X) - 1, drop_last=True), progress=False)
    bayesian(method).fit(kind(X, Y, batch_size=len(X), drop_last=True), progress=False)
