"""Where gates stand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim import gates
from bayeslim.errors import NoSiteMatched, UnsupportedModel
from bayeslim.gates.placement import Part, Place, place_gates


def placed(model: nn.Module, gate_at=None) -> dict[str, Place]:
    return {place.name: place for place in place_gates(model, bl.sites(model).names, gate_at)}


def parts(place: Place) -> list[tuple[str, int]]:
    return [(part.parameter, part.dim) for part in place.parts]


def test_inputs_of_linear_and_filters_of_convolutions():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 5, 2), nn.Flatten(), nn.Linear(9, 3))
    found = placed(model)
    assert list(found) == ["0.outputs", "2.outputs", "4.inputs"]
    assert parts(found["0.outputs"]) == [("0.weight", 0), ("0.bias", 0)]
    assert parts(found["2.outputs"]) == [("2.weight", 1), ("2.bias", 0)]
    assert parts(found["4.inputs"]) == [("4.weight", 1)]
    assert [place.count for place in found.values()] == [4, 5, 9]


def test_behind_a_norm_if_one_follows():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3),
        nn.GroupNorm(2, 6), nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6, affine=False), nn.Flatten(), nn.Linear(6, 2),
    )  # fmt: skip
    found = placed(model)
    assert list(found) == ["1.outputs", "2.outputs", "6.outputs", "10.inputs"]
    assert parts(found["1.outputs"]) == [("1.weight", 0), ("1.bias", 0)]


def test_weights_that_go_with_a_gate_are_those_it_scales_and_those_on_its_other_side():
    def weights(model, gate_at=None):
        return {name: place.weights for name, place in placed(model, gate_at).items()}

    assert weights(bl.zoo.create("lenet_300_100")) == {
        "fc1.inputs": 300, "fc2.inputs": 784 + 100, "fc3.inputs": 300 + 10,
    }  # fmt: skip
    assert weights(bl.zoo.create("lenet5")) == {
        "conv1.outputs": 25 + 50 * 25, "conv2.outputs": 20 * 25 + 16 * 500,
        "fc1.inputs": 500 + 25_000 / 800, "fc2.inputs": 800 + 10,
    }  # fmt: skip
    norms = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    assert weights(norms) == {"1.outputs": 9 + 2 * 9}
    assert weights(nn.LSTM(3, 4)) == {
        "inputs_l0": 16, "hidden_l0": 16 * 7 / 4, "preactivations_l0": 7,
    }  # fmt: skip
    assert weights(nn.MultiheadAttention(8, 2)) == {"inputs": 24, "heads": (24 * 8 + 64) / 2}
    words = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3))
    assert weights(words, {"0": ("rows", "outputs")}) == {"0.rows": 4, "0.outputs": 10 + 3}


def test_the_last_layers_outputs_are_never_gated():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    assert list(placed(model)) == ["0.outputs"]
    with pytest.raises(UnsupportedModel, match="is the last layer"):
        placed(model, {"2": "outputs"})


def test_recurrent_layers():
    found = placed(nn.ModuleDict({"rnn": nn.GRU(3, 4, 2, bidirectional=True), "head": nn.Linear(8, 2)}))
    assert parts(found["rnn.inputs_l0"]) == [("rnn.weight_ih_l0", 1), ("rnn.weight_ih_l0_reverse", 1)]
    assert parts(found["rnn.hidden_l1_reverse"]) == [("rnn.weight_hh_l1_reverse", 1)]
    assert parts(found["rnn.preactivations_l0"]) == [("rnn.weight_ih_l0", 0), ("rnn.weight_hh_l0", 0)]
    assert found["rnn.preactivations_l0"].count == 12
    assert found["rnn.inputs_l1"].count == 8
    assert parts(placed(nn.LSTMCell(3, 4))["hidden"]) == [("weight_hh", 1)]


def test_attention():
    found = placed(nn.Sequential(nn.MultiheadAttention(8, 2)))
    assert parts(found["0.heads"]) == [("0.out_proj.weight", 1)]
    assert (found["0.heads"].count, found["0.heads"].width) == (2, 4)
    assert found["0.inputs"].count == 8
    values = torch.tensor([2.0, 3.0])
    spread = found["0.heads"].along(values, found["0.heads"].parts[0], 2)
    assert spread.tolist() == [[2.0] * 4 + [3.0] * 4]
    weight = torch.arange(16.0).view(2, 8)
    assert found["0.heads"].gathered(weight, found["0.heads"].parts[0]).sum(1).tolist() == [44.0, 76.0]


def test_embeddings_only_where_asked():
    model = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 2))
    assert list(placed(model)) == ["2.inputs"]
    assert parts(placed(model, {"0": "rows"})["0.rows"]) == [("0.weight", 0)]
    assert parts(placed(model, {"0": "outputs"})["0.outputs"]) == [("0.weight", 1)]


def test_tied_weights_are_scaled_once():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    assert list(placed(model)) == ["a.inputs"]


def test_frozen_and_unselected_layers_have_none():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    assert [place.name for place in place_gates(model, ["2.weight"])] == ["2.inputs"]
    assert list(placed(model)) == ["1.inputs", "2.inputs"]
    with pytest.raises(UnsupportedModel, match=r'"0\.weight" is frozen'):
        placed(model, {"0": "inputs"})


def test_what_is_asked_for_is_what_is_gated():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 5), nn.Linear(5, 2))
    assert list(placed(model, {"0": ("inputs", "outputs"), "3|4": "inputs"})) == [
        "0.inputs", "0.outputs", "3.inputs", "4.inputs",
    ]  # fmt: skip
    assert place_gates(model, (), {"3": "outputs"})[0].parts == (Part("3.weight", 0), Part("3.bias", 0))


@pytest.mark.parametrize(
    ("gate_at", "error", "words"),
    [
        ({"fc": "inputs"}, NoSiteMatched, "names no layer"),
        ({"fc[": "inputs"}, NoSiteMatched, "neither a name nor a regular expression"),
        ({"1": "inputs"}, NoSiteMatched, "a ReLU, which has no sides"),
        ({"0": "heads"}, NoSiteMatched, 'no side "heads" to gate. It has inputs, outputs'),
        ({"2": "inputs"}, UnsupportedModel, "no axis of its weight"),
        ({"3": "outputs"}, UnsupportedModel, "has no scale of its own"),
    ],
)
def test_what_does_not_exist_is_refused(gate_at, error, words):
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 1),
        nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip
    with pytest.raises(error, match=words):
        placed(model, gate_at)


def test_a_network_without_such_layers_is_refused():
    with pytest.raises(NoSiteMatched, match="Bilinear has no layer to gate"):
        placed(nn.Bilinear(2, 3, 4))


def test_parameters_stand_beside_their_layer():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    bnn = bl.bayesianize(model, bl.Variational(gates=gates.NormalJeffreys()), likelihood=bl.likelihoods.Categorical())
    assert bnn.model[0].inputs_gate_mean.shape == (4,)
    assert "1.inputs_gate_log_std" in bnn.state_dict()
    with pytest.raises(UnsupportedModel, match="already exists"):
        bl.bayesianize(bnn.model, bnn.method, likelihood=bl.likelihoods.Categorical())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gates": gates.NormalJeffreys}, "gates must be one of bayeslim.gates"),
        ({"gates": gates.NormalJeffreys(), "renyi": 0.5, "samples": 2}, "They need renyi=1"),
        ({"gates": gates.NormalJeffreys(), "family": bl.families.MixtureOfGaussians()}, "They need renyi=1 and"),
        ({"gate_at": {"0": "inputs"}}, "there are none"),
        ({"gates": gates.NormalJeffreys(), "gate_at": "0"}, "must map names of layers to sides"),
        ({"gates": gates.NormalJeffreys(), "gate_at": {"0": None}}, "must map names of layers to sides"),
        ({"family": bl.families.Point(), "renyi": 0.5, "samples": 2}, "no density"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, words):
    with pytest.raises((TypeError, ValueError), match=words):
        bl.Variational(**settings)


def test_gate_at_survives_a_file(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    method = bl.Variational(gates=gates.HardConcrete(), gate_at={"0": ["inputs", "outputs"], "1": "inputs"})
    bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Categorical())
    bl.save(bnn, tmp_path / "bnn")
    again = bl.load(tmp_path / "bnn", model=model)
    assert again.method == method
    assert again.state["places"] == bnn.state["places"]
