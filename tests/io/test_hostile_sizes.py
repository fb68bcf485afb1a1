"""Small files that claim large things: refused before anything is allocated."""

from __future__ import annotations

import base64
import json
import time
import tracemalloc
import zlib

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.errors import CorruptFile, NotPositiveDefinite, ShapeMismatch
from bayeslim.io import storage
from bayeslim.io.storage import INDEX, read_folder, sealed, write_folder
from bayeslim.posteriors.factor import Factor
from bayeslim.prune import plan_json

CATEGORICAL = bl.likelihoods.Categorical()
MANY = 300_000_000
X, Y = torch.randn(20, 6), torch.randint(0, 3, (20,))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.fixture
def bounded():
    """Fail if Python allocates more than 50 MB, or the test takes more than some seconds."""
    tracemalloc.start()
    started = time.monotonic()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6
    assert time.monotonic() - started < 20


def edit(folder, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["config"])
    (folder / INDEX).write_text(json.dumps(sealed(index)))


def replaced(value, key, number):
    """Replace every number under a key, however deep."""
    if isinstance(value, list):
        if len(value) == 2 and value[0] == key:
            return [key, number]
        return [replaced(v, key, number) for v in value]
    return {k: replaced(v, key, number) for k, v in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"prior": bl.priors.SoftSharing(4)}, "components"),
        ({"method": bl.Variational(bl.families.MixtureOfGaussians(2))}, "components"),
        ({"method": bl.Variational(bl.families.LowRankGaussian(2))}, "rank"),
    ],
    ids=["prior", "mixture", "low rank"],
)
@pytest.mark.usefixtures("bounded")
def test_a_number_of_parts_is_bounded_by_the_file(tmp_path, options, key):
    options = {"method": bl.Variational()} | options
    bnn = bl.bayesianize(network(), options.pop("method"), likelihood=CATEGORICAL, **options)
    bl.save(bnn, tmp_path)
    bl.load(tmp_path, model=network())

    def change(config):
        for part in ("priors", "method"):
            config[part] = replaced(config[part], key, MANY)
        for tensor in ("means", "stds", "logits"):
            config["priors"] = replaced(config["priors"], tensor, None)

    edit(tmp_path, change)
    with pytest.raises(CorruptFile):
        bl.load(tmp_path, model=network())


def test_soft_sharing_has_as_many_components_as_a_codebook():
    with pytest.raises(ValueError, match=r"65,536 at most. Got 65537"):
        bl.priors.SoftSharing(65_537)
    assert len(bl.priors.SoftSharing(65_536).centres) == 65_536


def plan_of_zeros(weights: int) -> str:
    bnn = bl.bayesianize(network(), bl.Variational(), likelihood=CATEGORICAL)
    fields = json.loads(bl.plan(bnn, bl.Budget(sparsity=0.5)).to_json())
    packed = zlib.compress(bytes(weights // 8), 9)
    fields["masks"] = {"0.weight": {"shape": [weights], "kept": base64.b64encode(packed).decode()}}
    return json.dumps(fields)


@pytest.mark.usefixtures("bounded")
def test_a_plan_is_bounded_by_its_text_or_its_network():
    text = plan_of_zeros(MANY // 8 * 8)
    assert len(text) < 1_000_000
    with pytest.raises(CorruptFile, match=r"masks of 300,000,000 weights in a text of .*from_json\(text, model="):
        bl.Plan.from_json(text)
    with pytest.raises(CorruptFile, match=r'"0.weight" has no mask of shape \[300000000\] in Sequential'):
        bl.Plan.from_json(text, model=network())


def test_a_plan_of_a_large_network_is_read_with_the_network(monkeypatch):
    bnn = bl.bayesianize(network(), bl.Variational(), likelihood=CATEGORICAL)
    plan = bl.plan(bnn, bl.Budget(sparsity=0.5))
    monkeypatch.setattr(plan_json, "MAX_WEIGHTS_OF_ANY_PLAN", 10)
    monkeypatch.setattr(plan_json, "MAX_WEIGHTS_PER_CHARACTER", 0)
    with pytest.raises(CorruptFile, match="Pass the network"):
        bl.Plan.from_json(plan.to_json())
    assert bl.Plan.from_json(plan.to_json(), model=network()) == plan


def test_a_stored_graph_has_a_bounded_number_of_steps(tmp_path):
    bl.save(nn.Linear(2, 2), tmp_path, example=torch.zeros(1, 2))

    def change(config):
        config["program"]["steps"] += [config["program"]["steps"][-1]] * 60_000

    edit(tmp_path, change)
    with pytest.raises(CorruptFile, match="far too long"):
        bl.load(tmp_path)


def fitted(structure: str) -> bl.Bayesian:
    bnn = bl.bayesianize(network(), bl.Laplace(structure=structure), likelihood=CATEGORICAL)
    bnn.fit([(X, Y)])
    return bnn


@pytest.mark.parametrize(
    ("structure", "name", "change"),
    [
        ("kron", "inputs.vectors:0.weight", lambda t: t[:, :, :-1]),
        ("kron", "inputs.vectors:0.weight", lambda t: t[0]),
        ("kron", "outputs.values:0.weight", lambda t: t[:, :-1]),
        ("kron", "outputs.values:0.weight", lambda t: -t - 1),
        ("kron", "outputs.values:0.weight", lambda t: t * float("nan")),
        ("kron", "inputs.vectors:0.weight", lambda t: t * float("nan")),
        ("kron", "mean:0.weight", lambda t: t[:-1]),
        ("kron", "mean:0.weight", lambda t: t.T),
        ("full", "precision", lambda t: t[:-1]),
        ("full", "mean:0.bias", lambda t: t[:-1]),
        ("lowrank", "factor", lambda t: t[:-1]),
        ("lowrank", "eigenvalues", lambda t: t[:-1]),
        ("diag", "rest:0.weight", lambda t: t[:-1]),
        ("diag", "mean:0.weight", lambda t: t[:-1]),
    ],
)
def test_posteriors_that_do_not_fit_are_refused_by_load(tmp_path, structure, name, change):
    bl.save(fitted(structure), tmp_path)
    kind, config, tensors = read_folder(tmp_path, ("bayesian",))
    key = f"posterior:posterior:{name}"
    assert key in tensors
    write_folder(tmp_path, kind, config, tensors | {key: change(tensors[key]).contiguous()})
    with pytest.raises(CorruptFile):
        bl.load(tmp_path, model=network())


def test_a_posterior_of_other_parameters_is_refused(tmp_path):
    bnn = fitted("diag")
    bl.save(bnn, tmp_path)
    kind, config, tensors = read_folder(tmp_path, ("bayesian",))
    renamed = {name.replace("0.weight", "9.weight"): t for name, t in tensors.items() if name.startswith("posterior:")}
    rest = {name: t for name, t in tensors.items() if not name.startswith("posterior:")}
    names = config["posteriors"]["posterior"]["tensors"]
    config["posteriors"]["posterior"]["tensors"] = [name.replace("0.weight", "9.weight") for name in names]
    write_folder(tmp_path, kind, config, rest | renamed)
    with pytest.raises(CorruptFile, match=r'posterior of "9\.weight" .* no parameter of Sequential'):
        bl.load(tmp_path, model=network())


def test_a_posterior_of_nothing_is_refused(tmp_path):
    bl.save(fitted("diag"), tmp_path)
    kind, config, tensors = read_folder(tmp_path, ("bayesian",))
    config["posteriors"]["posterior"]["tensors"] = []
    write_folder(tmp_path, kind, config, {name: t for name, t in tensors.items() if name.startswith("network:")})
    with pytest.raises(CorruptFile, match="posterior"):
        bl.load(tmp_path, model=network())


@pytest.mark.parametrize("solver", [{"tolerance": 10**12}, {"tolerance": "x"}, {"max_iterations": 1.5}])
def test_a_solver_that_means_nothing_is_refused(tmp_path, solver):
    bl.save(bl.prune(fitted("kron"), bl.Budget(sparsity=0.5)), tmp_path)
    kind, config, tensors = read_folder(tmp_path, ("bayesian",))
    config["posteriors"]["posterior"]["config"]["$dict"] = [
        [key, {"$dict": [[k, solver.get(k, v)] for k, v in value["$dict"]]} if key == "solver" else value]
        for key, value in config["posteriors"]["posterior"]["config"]["$dict"]
    ]
    write_folder(tmp_path, kind, config, tensors)
    with pytest.raises(CorruptFile, match=f"{next(iter(solver))} must be"):
        bl.load(tmp_path, model=network())


def test_factors_have_matching_shapes():
    with pytest.raises(ShapeMismatch, match=r"eigenvectors \(groups, n, n\). Got \(1, 3\) and \(1, 3, 2\)"):
        Factor(torch.ones(1, 3), torch.ones(1, 3, 2))
    with pytest.raises(NotPositiveDefinite, match="not negative"):
        Factor.restore(-torch.ones(1, 3), None)


@pytest.mark.parametrize("structure", ["kron", "full", "lowrank", "diag"])
def test_a_network_loaded_under_inference_mode_predicts_outside_of_it(tmp_path, structure):
    bnn = fitted(structure)
    bl.save(bnn, tmp_path)
    with torch.inference_mode():
        again = bl.load(tmp_path, model=network())
    assert not any(tensor.is_inference() for tensor in again.state_dict().values())
    assert torch.equal(bl.predict(again, X).mean, bl.predict(bnn, X).mean)
    again.fit([(X, Y)])


def test_an_index_is_bounded(tmp_path, monkeypatch):
    write_folder(tmp_path, "thing", {}, {"w": torch.ones(2)})
    monkeypatch.setattr(storage, "_MAX_INDEX_BYTES", 10)
    with pytest.raises(CorruptFile, match="larger than any"):
        read_folder(tmp_path, ("thing",))
