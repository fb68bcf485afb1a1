"""Names, calls and configuration files: what they mean, and what is refused."""

from __future__ import annotations

import os
import sys
import tomllib

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors.torch import save_file
from torch import nn

import bayeslim as bl
from bayeslim.app.cli import sources
from bayeslim.app.cli.calls import BadSetting, parse
from bayeslim.app.cli.config import Settings, budget

MODULE = """
import torch
from torch import nn
import bayeslim as bl

def build(width=4):
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))

ready = build()
number = 3

def loaders():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return bl.data.Loader(x[:30], y[:30], 10), bl.data.Loader(x[30:], y[30:], 10, shuffle=False)

def named():
    train, val = loaders()
    return {"train": train, "val": val, "test": val}

def without_test():
    x, nothing = torch.randn(40, 3), torch.empty(0)
    scale = bl.data.Scale(torch.zeros(1), torch.ones(1))
    return bl.data.Dataset("own", x, x[:, :1], nothing, nothing, target_scale=scale)

def broken():
    raise RuntimeError("inside the user's own code")
"""


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    (tmp_path / "users_nets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("users_nets", None)


literals = st.one_of(
    st.integers(), st.booleans(), st.none(), st.text(max_size=8), st.floats(allow_nan=False, allow_infinity=False)
)


names = st.from_regex(r"[a-z]{1,5}", fullmatch=True)


@given(st.lists(literals, max_size=3), st.dictionaries(names, literals, max_size=3))
def test_calls_are_read_back_as_they_were_written(args, kwargs):
    kwargs = {f"a_{key}": value for key, value in kwargs.items()}
    text = ", ".join([*(repr(arg) for arg in args), *(f"{key}={value!r}" for key, value in kwargs.items())])
    call = parse(f"package.module:factory({text})", "model")
    assert (call.module, call.name) == ("package.module", "factory")
    assert (call.args, call.kwargs) == (tuple(args), kwargs)


@pytest.mark.parametrize(
    "text",
    ["", "a b", "f(", "f(x)", "f(1", "f()()", "__import__('os').system('x')", "f(open('x'))", ":f", "a::b", "f(1) + 1",
     "f(**{})", "f(*[1])"],
)  # fmt: skip
def test_what_is_no_plain_call_is_refused_and_nothing_is_evaluated(text):
    with pytest.raises(BadSetting, match=r"cannot be read"):
        parse(text, "model")


def test_networks_come_from_the_zoo_or_from_the_users_own_code(users_module):
    assert sources.model_by_name("mlp(hidden=5, inputs=4)").zoo_config["hidden"] == 5
    assert sources.model_by_name("users_nets:build(width=7)")[0].out_features == 7
    assert isinstance(sources.model_by_name("users_nets:ready"), nn.Module)
    one, other = (sources.model_by_name("users_nets:build", seed=3)[0].weight for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lenet6", 'Closest: "lenet5".*package.module:factory'),
        ("mlp(size=3)", "unexpected keyword argument 'size'"),
        ("nowhere_nets:build", "No module named 'nowhere_nets'.*Start the command in the folder"),
        ("users_nets:bild", 'Closest: "build"'),
        ("users_nets:number", "must give a torch.nn.Module. Got int"),
    ],
)
def test_networks_that_are_not_there_are_refused(users_module, text, message):
    with pytest.raises(BadSetting, match=message):
        sources.model_by_name(text)


def test_errors_of_the_users_own_code_stay_theirs(users_module):
    with pytest.raises(RuntimeError, match="user's own code"):
        sources.model_by_name("users_nets:broken")


def test_data_come_by_name_or_from_the_users_own_code(users_module):
    digits = sources.data_by_name("digits", 64, 0.2, 0)
    assert len(digits.train.dataset) + len(digits.val.dataset) == 1297
    assert len(digits.test.dataset) == 500
    assert digits.example.shape[1:] == (1, 8, 8)
    own = sources.data_by_name("users_nets:loaders", 64, 0.2, 0)
    assert own.test is None
    assert sources.data_by_name("users_nets:named", 64, 0.2, 0).test is not None
    with pytest.raises(BadSetting, match="must give loaders"):
        sources.data_by_name("users_nets:build", 64, 0.2, 0)
    with pytest.raises(BadSetting, match='Closest: "digits"'):
        sources.data_by_name("digit", 64, 0.2, 0)


def test_data_to_measure_on_are_the_test_part_or_else_held_out(users_module):
    part, loader = sources.held_out_by_name("digits", 0.2, 0).held_out
    assert (part, len(loader.dataset)) == ("test", 500)
    own = sources.held_out_by_name("users_nets:without_test", 0.25, 0)
    part, loader = own.held_out
    assert (part, len(loader.dataset)) == ("validation", 10)
    assert own.target_scale is not None
    assert sources.held_out_by_name("users_nets:loaders", 0.25, 0).held_out[0] == "validation"
    assert sources.held_out_by_name("users_nets:named", 0.25, 0).held_out[0] == "test"


def test_methods_likelihoods_and_priors_by_name():
    assert sources.method_by_name("laplace(structure='diag')") == bl.Laplace(structure="diag")
    assert sources.prior_by_name("normal(0.2)") == bl.priors.Normal(0.2)
    assert isinstance(sources.likelihood_by_name("categorical"), bl.likelihoods.Categorical)
    recipe = sources.recipe_by_name("sparse-vd(prior=log_uniform('approximate'))", epochs=7)
    assert recipe == bl.recipes.sparse_vd(7, bl.priors.LogUniform("approximate"))
    with pytest.raises(BadSetting, match=r"There are: .*laplace"):
        sources.method_by_name("magic")


class RunsCode:
    """An object whose unpickling runs a command."""

    def __reduce__(self):
        return os.system, ("echo ran > pwned",)


def test_weights_come_from_state_dicts_of_torch_which_run_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = bl.zoo.create("mlp", hidden=4, inputs=3, classes=2)
    name = "mlp(hidden=4, inputs=3, classes=2)"
    torch.save(model.state_dict(), "weights.pt")
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, "checkpoint.pth")
    for file in ("weights.pt", "checkpoint.pth"):
        assert torch.equal(sources.model_by_name(name, tmp_path / file, seed=5).fc1.weight, model.fc1.weight)
    torch.save(model, "model.pt")
    torch.save({"x": RunsCode()}, "hostile.pt")
    (tmp_path / "text.pt").write_text("not weights")
    for file in ("model.pt", "hostile.pt", "text.pt"):
        with pytest.raises(BadSetting, match="cannot be read as plain weights"):
            sources.model_by_name(name, tmp_path / file)
    assert not (tmp_path / "pwned").exists()
    torch.save([1, 2], "list.pt")
    with pytest.raises(BadSetting, match="must hold a state dict"):
        sources.model_by_name(name, tmp_path / "list.pt")


def test_weights_come_from_safetensors_or_a_saved_network(tmp_path):
    model = bl.zoo.create("mlp", hidden=4, inputs=3, classes=2)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    bl.save(model, tmp_path / "folder")
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=bl.likelihoods.Categorical())
    bl.save(bnn, tmp_path / "bayesian")
    name = "mlp(hidden=4, inputs=3, classes=2)"
    for place in ("weights.safetensors", "folder", "bayesian"):
        read = sources.model_by_name(name, tmp_path / place, seed=5)
        assert torch.equal(read.fc1.weight, model.fc1.weight)
    with pytest.raises(BadSetting, match="does not exist"):
        sources.model_by_name(name, tmp_path / "nowhere")
    with pytest.raises(bl.errors.CorruptFile, match="does not fit"):
        sources.model_by_name("mlp(hidden=9, inputs=3, classes=2)", tmp_path / "weights.safetensors")


def test_a_file_means_what_the_flags_mean_and_flags_win(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('model = "lenet5"\ndata = "mnist"\nsparsity = 0.95\nfine-tune = 2\nprotect = ["fc2"]\nlr = 1\n')
    flags = {"model": "lenet5", "data": "mnist", "sparsity": 0.95, "fine_tune": 2, "protect": ["fc2"], "lr": 1}
    assert Settings.read(file, {"steps": None}) == Settings.read(None, flags)
    assert Settings.read(file, {"sparsity": 0.5}).sparsity == 0.5
    assert Settings.read(file, {}).budget == bl.Budget(sparsity=0.95, protect=("fc2",))


def test_a_recipe_may_be_a_table_and_keeps_its_own_rates_unless_others_are_given(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text(
        'model = "mlp(inputs=64, hidden=4)"\ndata = "digits"\nepochs = 1\n[recipe]\nname = "bottleneck"\nstrength = 3\n'
    )
    given = []
    monkeypatch.setattr("bayeslim.app.cli.config.compress", lambda *_, **settings: given.append(settings))
    for flags in ({}, {"lr": 0.25, "fine_tune": 2}, {"fine_tune": 2}):
        Settings.read(tmp_path / "run.toml", flags).run()
    assert given[0]["recipe"] == bl.recipes.bottleneck(strength=3, epochs=1)
    assert [settings["fit"] for settings in given] == [{}, {"lr": 0.25}, {}]
    assert [settings["fine_tune"] for settings in given] == [None, {"epochs": 2, "lr": 0.25}, {"epochs": 2}]


def test_settings_are_kept_and_read_back(tmp_path):
    flags = {
        "model": 'mlp(hidden=3, "q\\"uote")', "data": "digits", "out": str(tmp_path), "evidence": True, "lr": 0.25,
        "protect": ["a", "b\n"], "steps": 3, "baseline": False, "formats": [],
    }  # fmt: skip
    settings = Settings.read(None, flags)
    settings.keep()
    assert tomllib.loads((tmp_path / "run.toml").read_text())["evidence"] is True
    assert Settings.read(tmp_path / "run.toml", {}) == settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = ", "not valid TOML"),
        ("sparsty = 0.5", 'not a setting. Closest: "sparsity"'),
        ('sparsity = "much"', '"sparsity" must be a number'),
        ("model = 3", '"model" must be text'),
        ("steps = 2.5", '"steps" must be a whole number'),
        ("steps = true", '"steps" must be a whole number'),
        ("evidence = 1", '"evidence" must be true or false'),
        ('protect = "fc"', '"protect" must be a list of text'),
    ],
)
def test_wrong_files_are_refused(tmp_path, text, message):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(BadSetting, match=message):
        Settings.read(tmp_path / "run.toml", {"data": "mnist"} | ({} if "model" in text else {"model": "mlp"}))


def test_missing_settings_are_asked_for(tmp_path):
    with pytest.raises(BadSetting, match="needs model and data: pass --model NAME --data NAME"):
        Settings.read(None, {})
    with pytest.raises(bl.errors.BayeslimError, match="Could not read"):
        Settings.read(tmp_path / "nowhere.toml", {})


def test_a_budget_is_exactly_one_goal():
    assert budget({"bytes": 100, "scope": "layer", "keep_best": True}) == bl.Budget(
        bytes=100, scope="layer", empty_layers="keep best"
    )
    assert budget({}, needs_none=True) is None
    with pytest.raises(BadSetting, match=r"exactly one of --sparsity.*--max-error-increase.*Got none"):
        budget({"evidence": False})
    with pytest.raises(BadSetting, match="Got sparsity, flops"):
        budget({"sparsity": 0.5, "flops": 3})
    with pytest.raises(BadSetting, match="between 0 and 1"):
        budget({"sparsity": 2.0})
