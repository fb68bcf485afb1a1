"""Networks to a folder and back; whatever does not fit is refused, and nothing is changed."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.errors import BayeslimError, CorruptFile
from bayeslim.io.storage import INDEX, sealed
from bayeslim.posteriors import Diagonal

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.embed(x))


class Awkward(nn.Module):
    """Names that are also patterns: as regular expressions, "a.w" matches "aXw" too."""

    def __init__(self):
        super().__init__()
        self.aXw = nn.Parameter(torch.randn(5, 2))
        self.a = nn.Module()
        self.a.w = nn.Parameter(torch.randn(5, 2))

    def forward(self, x):
        return x @ self.aXw + x @ self.a.w


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def bayesian(model: nn.Module | None = None, **options) -> bl.Bayesian:
    settings = {"likelihood": bl.likelihoods.Categorical(), "num_data": 50} | options
    return bl.bayesianize(mlp() if model is None else model, settings.pop("method", bl.Variational()), **settings)


def assert_same(a: nn.Module, b: nn.Module) -> None:
    one, other = a.state_dict(), b.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[k], other[k]) and one[k].dtype == other[k].dtype for k in one)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": bl.Variational(estimator="flipout", samples=3, temperature=0.5)},
        {"method": bl.Variational(kl_schedule=bl.schedules.Cyclic(2.0, 0.3), antithetic=True, samples=2)},
        {"prior": bl.priors.Normal(0.3, 0.1)},
        {"prior": {"0.*": bl.priors.Normal(0.3), "all": bl.priors.Normal(torch.full((3, 4), 2.0))}},
        {"sites": "all", "num_data": None},
        {"likelihood": bl.likelihoods.Gaussian("learned", initial_noise=0.7)},
        {"likelihood": bl.likelihoods.Poisson()},
        {"likelihood": bl.likelihoods.Categorical(class_dim=1, ignore_index=0)},
    ],
)
def test_everything_comes_back(options, tmp_path):
    bnn = bayesian(**options)
    bnn.step, bnn.steps_per_epoch = 12, 4
    bl.save(bnn, tmp_path)
    again = bl.load(tmp_path, model=mlp())
    assert_same(bnn, again)
    assert again.method == bnn.method
    assert again.sites == bnn.sites
    assert again.likelihood.config() == bnn.likelihood.config()
    assert repr(again.priors) == repr(bnn.priors)
    assert (again.num_data, again.num_data_given) == (bnn.num_data, bnn.num_data_given)
    assert (again.step, again.steps_per_epoch) == (12, 4)
    assert not again.training


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype, tmp_path):
    bnn = bayesian(mlp().to(dtype))
    bl.save(bnn, tmp_path)
    assert_same(bnn, bl.load(tmp_path, model=mlp().to(dtype)))
    with pytest.raises(CorruptFile, match=r"Call model.to\(torch"):
        bl.load(tmp_path, model=mlp())


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    bnn = bayesian(Tied())
    bl.save(bnn, tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["aliases"] == {"network:out.weight": "network:embed.weight"}
    again = bl.load(tmp_path, model=Tied())
    assert again.model.out.weight is again.model.embed.weight
    assert_same(bnn, again)


def test_names_that_are_patterns_mean_themselves(tmp_path):
    prior = {"aXw": bl.priors.Normal(2.0), "a": bl.priors.Normal(3.0)}
    for options in ({"sites": "a"}, {"sites": "all", "prior": prior}):
        bnn = bayesian(Awkward(), **options)
        bl.save(bnn, tmp_path)
        again = bl.load(tmp_path, model=Awkward())
        assert again.sites.names == bnn.sites.names
        assert repr(again.priors) == repr(bnn.priors)


def test_zoo_networks_need_no_architecture(tmp_path):
    for network in (bl.zoo.mlp(8, inputs=5, classes=3), bl.zoo.lenet5()):
        bl.save(network, tmp_path / "plain")
        again = bl.load(tmp_path / "plain")
        assert_same(network, again)
        assert again.zoo_config == network.zoo_config
        bnn = bayesian(network)
        bl.save(bnn, tmp_path / "bayesian")
        before = torch.get_rng_state()
        assert_same(bnn, bl.load(tmp_path / "bayesian"))
        assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_zoo_networks_of_other_precisions_need_no_architecture(dtype, tmp_path):
    network = bl.zoo.mlp(8, inputs=5, classes=3).to(dtype)
    bl.save(network, tmp_path / "plain")
    assert_same(network, bl.load(tmp_path / "plain"))
    bnn = bayesian(network)
    for each in (bnn, bayesian(bl.zoo.lenet5(), likelihood=bl.likelihoods.Gaussian("learned")).to(dtype)):
        bl.save(each, tmp_path / "bayesian")
        assert_same(each, bl.load(tmp_path / "bayesian"))


def exchanged(network):
    place = next(place for place, layer in enumerate(network) if isinstance(layer, nn.ReLU))
    network[place] = nn.Tanh()


def dropped(network):
    next(layer for layer in network if isinstance(layer, nn.Dropout)).p = 0.7


@pytest.mark.parametrize("change", [exchanged, dropped])
def test_a_zoo_network_that_was_changed_is_none_of_the_zoo(change, tmp_path):
    x = torch.rand(4, 5)
    network = bl.zoo.mlp(8, inputs=5, classes=3, dropout=0.2).eval()
    change(network)
    bl.save(network, tmp_path / "plain")
    bl.save(bayesian(network), tmp_path / "bayesian")
    bl.encode(network, tmp_path / "coded", raw=True)
    for read in (lambda: bl.load(tmp_path / "plain"), lambda: bl.load(tmp_path / "bayesian")):
        with pytest.raises(BayeslimError, match=r"load\(path, model=YourModel\(\)\)"):
            read()
    with pytest.raises(BayeslimError, match=r"decode\(path, model=YourModel\(\)\)"):
        bl.decode(tmp_path / "coded")
    bl.save(network, tmp_path / "graph", example=x)
    torch.testing.assert_close(bl.load(tmp_path / "graph")(x), network(x))
    torch.testing.assert_close(bl.load(tmp_path / "plain", model=network)(x), network(x))


def test_plain_networks(tmp_path):
    model = mlp()
    bl.save(model, tmp_path)
    given = mlp()
    before = copy.deepcopy(given.state_dict())
    again = bl.load(tmp_path, model=given)
    assert_same(model, again)
    assert type(again) is nn.Sequential
    assert all(torch.equal(before[k], v) for k, v in given.state_dict().items())
    with pytest.raises(BayeslimError, match=r"weights of a Sequential were saved, not its code.*model=YourModel"):
        bl.load(tmp_path)


def test_after_local_noise_and_training_the_folder_is_the_same_kind(tmp_path):
    bnn = bayesian(nn.Linear(5, 3))
    bnn.loss((X, torch.arange(6) % 3)).backward()
    bl.save(bnn, tmp_path)
    assert json.loads((tmp_path / INDEX).read_text())["config"]["architecture"]["class"] == "Linear"
    assert_same(bnn, bl.load(tmp_path, model=nn.Linear(5, 3)))


def test_posteriors_kept_by_a_method_come_back(tmp_path):
    bnn = bayesian()
    mean = {"0.weight": torch.randn(4, 5)}
    bnn.state["posterior"] = Diagonal(mean, {"0.weight": torch.rand(4, 5)})
    bl.save(bnn, tmp_path)
    again = bl.load(tmp_path, model=mlp()).state["posterior"]
    torch.testing.assert_close(again.mean, mean)
    torch.testing.assert_close(again.std, bnn.state["posterior"].std)


def test_posteriors_come_back_in_order(tmp_path):
    bnn = bayesian()
    mean = {f"w{k}": torch.randn(2) for k in torch.randperm(12).tolist()}
    bnn.state["another"] = Diagonal(mean, {name: torch.rand(2) for name in sorted(mean)})
    bl.save(bnn, tmp_path)
    again = bl.load(tmp_path, model=mlp()).state["another"]
    assert list(again.mean) == list(mean)
    draws = [p.sample(generator=torch.Generator().manual_seed(2)) for p in (bnn.state["another"], again)]
    torch.testing.assert_close(*draws)


def test_plans_come_back(tmp_path):
    pruned = bl.prune(bayesian(), bl.Budget(sparsity=0.5))
    bl.save(pruned, tmp_path)
    assert bl.load(tmp_path, model=mlp()).plan_ == pruned.plan_


def test_masks_come_back(tmp_path):
    bnn = bayesian()
    bnn.masks = {"0.weight": torch.rand(4, 5) > 0.5}
    bnn.keep_zeros()
    bl.save(bnn, tmp_path)
    again = bl.load(tmp_path, model=mlp())
    assert torch.equal(again.masks["0.weight"], bnn.masks["0.weight"])
    assert (again.model[0].weight[~again.masks["0.weight"]] == 0).all()


class Wider(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


def half_frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "model",
    [Wider, Tied, frozen, half_frozen, lambda: nn.Linear(5, 3), lambda: mlp().double(), lambda: nn.Sequential()],
)
def test_another_architecture_is_refused_and_not_changed(model, tmp_path):
    bl.save(bayesian(), tmp_path)
    given = model()
    before = copy.deepcopy(given.state_dict())
    with pytest.raises(CorruptFile):
        bl.load(tmp_path, model=given)
    assert given.state_dict().keys() == before.keys()
    assert all(torch.equal(before[k], v) for k, v in given.state_dict().items())


def test_what_does_not_fit_is_named(tmp_path):
    bl.save(bayesian(), tmp_path)
    with pytest.raises(CorruptFile, match="does not fit Linear: the file lacks weight, bias"):
        bl.load(tmp_path, model=nn.Linear(3, 3))


@pytest.mark.parametrize("given", [object(), nn.Linear, "model"])
def test_what_is_no_network_is_refused(given, tmp_path):
    bl.save(bayesian(), tmp_path)
    with pytest.raises(TypeError, match="plain torch"):
        bl.load(tmp_path, model=given)
    with pytest.raises(TypeError, match="save takes a Bayesian"):
        bl.save(given, tmp_path)
    with pytest.raises(TypeError, match="plain torch"):
        bl.load(tmp_path, model=bayesian())


def deep(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def edit(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["config"])
    (folder / INDEX).write_text(json.dumps(sealed(index)))


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.clear(),
        lambda c: c.pop("method"),
        lambda c: c.pop("likelihood"),
        lambda c: c.pop("posteriors"),
        lambda c: c.update(architecture=None),
        lambda c: c.update(architecture=[]),
        lambda c: c["method"].update({"$type": "method:sorcery"}),
        lambda c: c["method"].update({"$type": "likelihood:categorical"}),
        lambda c: c.update(method=c["likelihood"]),
        lambda c: c.update(likelihood=c["method"]),
        lambda c: c.update(method=None),
        lambda c: c["method"]["fields"].update({"$dict": [["samples", -3]]}),
        lambda c: c["method"]["fields"].update({"$dict": [["samples"]]}),
        lambda c: c["method"]["fields"].update({"$dict": [[["a"], 1]]}),
        lambda c: c["method"]["fields"].update({"$dict": 7}),
        lambda c: c.update(method=deep(400)),
        lambda c: c.update(priors=deep(400)),
        lambda c: c.update(priors=3),
        lambda c: c.update(priors={"$dict": []}),
        lambda c: c.update(priors={"$dict": [["0.weight", 1.0], ["3.weight", 1.0]]}),
        lambda c: c.update(sites="all"),
        lambda c: c.update(sites=[]),
        lambda c: c.update(sites=["nowhere.weight"]),
        lambda c: c.update(sites=["0.weight"]),
        lambda c: c.update(sites=[3]),
        lambda c: c.update(sites=None),
        lambda c: c.update(sites=["(a+)+$"] * 3),
        lambda c: c.update(num_data=-4),
        lambda c: c.update(num_data="many"),
        lambda c: c.update(step="many"),
        lambda c: c.update(step=-1),
        lambda c: c.update(step=float("inf")),
        lambda c: c.update(steps_per_epoch="many"),
        lambda c: c.update(posteriors=[1]),
        lambda c: c.update(posteriors={"p": None}),
        lambda c: c.update(posteriors={"p": {"kind": "sorcery", "config": {"$dict": []}}}),
        lambda c: c.update(posteriors={"p": {"kind": ["diagonal"], "config": {"$dict": []}}}),
        lambda c: c.update(posteriors={"p": {"kind": "diagonal"}}),
        lambda c: c.update(posteriors={"p": {"kind": "dense", "config": {"$dict": []}}}),
        lambda c: c.update(posteriors={"p": {"kind": "diagonal", "config": {"$dict": []}, "tensors": ["mean:w"]}}),
        lambda c: c.update(posteriors={"p": {"kind": "diagonal", "config": {"$dict": []}, "tensors": 3}}),
        lambda c: c.update(plan="{}"),
        lambda c: c.update(plan=[]),
    ],
)
def test_hostile_settings(change, tmp_path):
    bl.save(bayesian(), tmp_path)
    edit(tmp_path, change)
    given = mlp()
    names = list(given.state_dict())
    with pytest.raises(CorruptFile):
        bl.load(tmp_path, model=given)
    assert list(given.state_dict()) == names


@pytest.mark.parametrize(
    "zoo",
    [
        {"name": "mlp", "hidden": 10**12, "inputs": 5, "classes": 3},
        {"name": "mlp", "hidden": 8, "inputs": 5, "classes": 3, "depth": 10**9},
        {"name": "mlp", "hidden": 8, "inputs": 5, "classes": 3, "depth": 300},
        {"name": "mlp", "hidden": -8, "inputs": 5, "classes": 3},
        {"name": "mlp", "hidden": "8"},
        {"name": "mlp", "hidden": 9, "inputs": 5, "classes": 3},
        {"name": "mlp", "secret": 1},
        {"name": "../mlp"},
        {"name": ["mlp"]},
        {"name": "create"},
        {},
        [],
        "mlp",
        7,
    ],
)
def test_hostile_architectures(zoo, tmp_path):
    bl.save(bl.zoo.mlp(8, inputs=5, classes=3), tmp_path)
    edit(tmp_path, lambda c: c["architecture"].update(zoo=zoo))
    with pytest.raises(CorruptFile):
        bl.load(tmp_path)


def test_state_that_is_no_tensor_is_refused(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    with pytest.raises(BayeslimError, match="is a dict, not a tensor"):
        bl.save(Extra(5, 3), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_saving_over_an_older_network_replaces_it(tmp_path):
    bl.save(mlp(), tmp_path)
    bnn = bayesian()
    bl.save(bnn, tmp_path)
    assert_same(bnn, bl.load(tmp_path, model=mlp()))
    assert len(list(tmp_path.iterdir())) == 2
