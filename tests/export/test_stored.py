"""Slim networks on disk: small, safe, and back again without their class, or cut from it."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_networks import Branching, Convolutional, FixedBatch, Heads, Tied, mlp, with_zeros
from torch import fx, nn

import bayeslim as bl
from bayeslim.compact import compact_network, units
from bayeslim.compact.example import EXAMPLE
from bayeslim.errors import BayeslimError, CorruptFile, ShapeMismatch, UnsupportedModel
from bayeslim.io.storage import INDEX, sealed

IMAGES = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


def halved(network: nn.Module, example, **options) -> nn.Module:
    """The network without every other unit, marked as one that was compacted."""
    found = units(network, example)
    slim = compact_network(network, found.masks(range(0, len(found.units), 2)), example, **options)
    object.__setattr__(slim, EXAMPLE, example)
    return slim


@cache
def slim_convolutional() -> Convolutional:
    torch.manual_seed(0)
    return halved(Convolutional().eval(), IMAGES)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    bl.save(slim_convolutional(), folder / "slim")
    torch.manual_seed(0)
    bl.save(mlp(), folder / "mlp", example=ROWS)
    return folder


def size(folder) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def edit(folder, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["config"])
    (folder / INDEX).write_text(json.dumps(sealed(index)))


def test_the_file_shrinks_with_the_non_zeros(tmp_path):
    sizes = {}
    for density in (1.0, 0.3, 0.03):
        network = with_zeros(nn.Linear(500, 400), density)
        bl.save(network, tmp_path / str(density))
        sizes[density] = size(tmp_path / str(density))
        again = bl.load(tmp_path / str(density), model=nn.Linear(500, 400))
        assert torch.equal(again.weight, network.weight)
        assert torch.equal(again.bias, network.bias)
    assert sizes[0.3] < 0.37 * sizes[1.0]  # 4 bytes for 3 in 10, and a bit for each
    assert sizes[0.03] < 0.045 * sizes[1.0]  # 5 bytes for 3 in 100


def test_a_class_comes_back_as_its_graph(tmp_path):
    network = with_zeros(Convolutional(), 0.3).eval()
    bl.save(network, tmp_path, example=IMAGES)
    again = bl.load(tmp_path)
    assert isinstance(again, fx.GraphModule)
    assert not again.training
    for rows in (1, 5):
        x = torch.randn(rows, 1, 8, 8)
        torch.testing.assert_close(again(x), network(x))
    assert {name for name, _ in again.named_parameters()} == {name for name, _ in network.named_parameters()}
    named = bl.load(tmp_path, model=Convolutional())
    assert type(named) is Convolutional
    torch.testing.assert_close(named.eval()(IMAGES), network(IMAGES))
    bl.save(again, tmp_path / "twice")
    torch.testing.assert_close(bl.load(tmp_path / "twice")(IMAGES), network(IMAGES))


def test_a_compacted_class_needs_no_example_and_fits_its_original(tmp_path):
    slim = slim_convolutional()
    assert type(slim) is Convolutional
    bl.save(slim, tmp_path)
    torch.testing.assert_close(bl.load(tmp_path)(IMAGES), slim(IMAGES))
    original = Convolutional()
    before = copy.deepcopy(original.state_dict())
    again = bl.load(tmp_path, model=original)
    assert type(again) is Convolutional
    assert again.fc1.in_features == slim.fc1.in_features == slim.fc1.weight.shape[1] < original.fc1.in_features
    assert repr(again) == repr(slim)
    torch.testing.assert_close(again.eval()(IMAGES), slim(IMAGES))
    assert all(torch.equal(before[name], tensor) for name, tensor in original.state_dict().items())
    bl.save(again, tmp_path / "twice")
    assert repr(bl.load(tmp_path / "twice", model=Convolutional())) == repr(slim)


def test_numbers_of_heads_come_back(tmp_path):
    example = torch.randn(2, 3, 8)
    network = Heads().eval()
    found = units(network, example)
    heads = [place for place, unit in enumerate(found.units) if unit.kind == "head"]
    slim = compact_network(network, found.masks(heads[:2]), example)
    assert slim.heads == 2
    object.__setattr__(slim, EXAMPLE, example)
    bl.save(slim, tmp_path)
    again = bl.load(tmp_path, model=Heads())
    assert again.heads == 2
    torch.testing.assert_close(again(example), slim(example))
    torch.testing.assert_close(bl.load(tmp_path)(example), slim(example))


def test_a_compacted_graph_needs_neither_class_nor_example(tmp_path):
    network = mlp().eval()
    with torch.no_grad():
        network[0].weight[:, 2:] = 0
    slim = compact_network(network, None, ROWS, drop_inputs=True)
    assert isinstance(slim, fx.GraphModule)
    bl.save(slim, tmp_path)
    again = bl.load(tmp_path)
    torch.testing.assert_close(again(ROWS), network(ROWS))
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in slim.parameters())


def test_a_compacted_zoo_network_needs_nothing(tmp_path):
    network = bl.zoo.mlp(16, inputs=6, classes=3).eval()
    slim = halved(network, ROWS)
    bl.save(slim, tmp_path)
    assert "program" not in json.loads((tmp_path / INDEX).read_text())["config"]
    before = torch.get_rng_state()
    again = bl.load(tmp_path)
    assert torch.equal(before, torch.get_rng_state())
    assert repr(again) == repr(slim)
    torch.testing.assert_close(again(ROWS), slim(ROWS))
    assert size(tmp_path) < 4500


def test_a_bayesian_network_over_a_slim_one(tmp_path):
    slim = slim_convolutional()
    bnn = bl.bayesianize(slim, bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=10)
    bl.save(bnn, tmp_path)
    again = bl.load(tmp_path, model=Convolutional())
    torch.testing.assert_close(again(IMAGES), bnn.eval()(IMAGES))
    assert again.posterior_.num_parameters == bnn.posterior_.num_parameters


def test_tied_weights_with_zeros_are_stored_once_and_stay_tied(tmp_path):
    network = with_zeros(Tied(), 0.05)
    ids = torch.arange(6).view(2, 3)
    bl.save(network, tmp_path, example=ids)
    file = next(tmp_path.glob("*.safetensors"))
    assert not any("out.weight" in name for name in load_file(file))
    again = bl.load(tmp_path, model=Tied())
    assert again.out.weight is again.embed.weight
    torch.testing.assert_close(again(ids), network(ids))
    graph = bl.load(tmp_path)
    torch.testing.assert_close(graph(ids), network(ids))


def test_saving_leaves_the_network_alone(tmp_path):
    network = Convolutional().train()
    before = copy.deepcopy(network.state_dict())
    bl.save(network, tmp_path, example=IMAGES)
    assert network.training
    assert all(p.grad is None and p.requires_grad for p in network.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


def test_a_network_of_one_batch_size(tmp_path):
    network, x = FixedBatch().eval(), torch.randn(4, 4)
    bl.save(network, tmp_path, example=x)
    torch.testing.assert_close(bl.load(tmp_path)(x), network(x))


def test_what_cannot_be_stored_with_its_graph(tmp_path):
    with pytest.raises(UnsupportedModel, match="cannot trace Branching"):
        bl.save(Branching(), tmp_path / "new", example=torch.randn(2, 4))
    with pytest.raises(ShapeMismatch, match="does not run on the example"):
        bl.save(mlp(), tmp_path / "new", example=torch.randn(2, 7))
    assert not (tmp_path / "new").exists()
    slim = Branching()
    object.__setattr__(slim, EXAMPLE, torch.randn(2, 4))
    bl.save(slim, tmp_path / "new")
    with pytest.raises(BayeslimError, match=r"model=YourModel.*There is no graph.*cannot trace Branching"):
        bl.load(tmp_path / "new")
    torch.testing.assert_close(bl.load(tmp_path / "new", model=Branching()).out.weight, slim.out.weight)
    bnn = bl.bayesianize(mlp(), bl.Variational(), likelihood=bl.likelihoods.Categorical())
    with pytest.raises(ValueError, match="plain networks"):
        bl.save(bnn, tmp_path / "bnn", example=ROWS)


def test_another_architecture_than_the_original_is_refused(saved_once):
    tmp_path = saved_once / "slim"
    for model in (Heads(), mlp(), Convolutional().double(), nn.Sequential()):
        with pytest.raises(CorruptFile):
            bl.load(tmp_path, model=model)
    smaller = Convolutional()
    smaller.conv = nn.Conv2d(1, 2, 3)
    with pytest.raises(CorruptFile, match=r"conv\.weight"):
        bl.load(tmp_path, model=smaller)


def test_a_whole_network_is_never_cut_to_fit(tmp_path):
    bl.save(nn.Linear(5, 3), tmp_path)
    with pytest.raises(CorruptFile, match="has shape"):
        bl.load(tmp_path, model=nn.Linear(7, 4))


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(program={}),
        lambda c: c.update(program=[1]),
        lambda c: c["program"].update(steps=[{"call": "aten.from_file.default", "args": ["/etc/passwd"]}]),
        lambda c: c["program"]["steps"][0].update(tensor="network:nowhere"),
        lambda c: c.update(tied={"network:x": "network:nowhere"}),
        lambda c: c.update(tied={"network:x": 3}),
        lambda c: c.update(tied=[]),
        lambda c: c.update(architecture=None),
    ],
)
def test_hostile_folders(change, tmp_path, saved_once):
    shutil.copytree(saved_once / "mlp", tmp_path, dirs_exist_ok=True)
    edit(tmp_path, change)
    with pytest.raises(CorruptFile):
        bl.load(tmp_path)


@pytest.mark.parametrize(
    "sizes", [7, "all", [], {"fc1": 3}, {"fc1": {"in_features": "9"}}, {"fc1": {"weight": 4, "forward": 2}}, {"": {}}]
)
def test_hostile_sizes_change_nothing_but_known_numbers(sizes, tmp_path, saved_once):
    shutil.copytree(saved_once / "slim", tmp_path, dirs_exist_ok=True)
    edit(tmp_path, lambda c: c["architecture"].update(sizes=sizes))
    if not isinstance(sizes, dict):
        with pytest.raises(CorruptFile):
            bl.load(tmp_path, model=Convolutional())
        return
    again = bl.load(tmp_path, model=Convolutional())
    assert isinstance(again.fc1.in_features, int)
    assert callable(again.fc1.forward)
    assert isinstance(again.fc1.weight, nn.Parameter)


@pytest.mark.parametrize("shape", [[2**62], [2**31, 2**31], [2**40, 0, 3], [-1, 6], [10**6, 10**5]])
def test_shapes_that_a_file_cannot_hold(shape, tmp_path):
    bl.save(with_zeros(nn.Linear(300, 200), 0.02), tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    assert "network:weight::shape" in tensors
    tensors["network:weight::shape"] = torch.tensor(shape)
    save_file(tensors, file)
    index = json.loads((tmp_path / INDEX).read_text())
    index["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / INDEX).write_text(json.dumps(sealed(index)))
    with pytest.raises(CorruptFile):
        bl.load(tmp_path, model=nn.Linear(300, 200))


def test_a_zoo_network_far_larger_than_its_file_is_not_built(tmp_path):
    bl.save(halved(bl.zoo.mlp(16, inputs=6, classes=3).eval(), ROWS), tmp_path)
    for change in ({"hidden": 10_000, "inputs": 10_000}, {"hidden": 10**12}, {"hidden": 4}):
        edit(tmp_path, lambda c, change=change: c["architecture"]["zoo"].update(change))
        with pytest.raises(CorruptFile):
            bl.load(tmp_path)
