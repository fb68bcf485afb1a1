"""Closed gates go, exactly: plans, zeros that stay, and networks that are really smaller."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import bayeslim as bl
from bayeslim import families, gates, likelihoods
from bayeslim.posteriors import Gated


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


X = torch.randn(30, 5, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(12, 1, 6, 6, generator=torch.Generator().manual_seed(1))
SEQUENCES = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(1))
LONG = torch.randn(8, 5, 8, generator=torch.Generator().manual_seed(1))
FAMILIES = [families.DiagonalGaussian(), families.SparseGaussian(), families.Point()]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def gated(model: nn.Module, x: Tensor, family=None, gate=None, epochs: int = 2) -> bl.Bayesian:
    torch.manual_seed(0)
    method = bl.Variational(family or families.Point(), gates=gate or gates.NormalJeffreys())
    bnn = bl.bayesianize(model, method, likelihood=likelihoods.Categorical(), num_data=len(x))
    bnn.fit(batches(x), epochs=epochs, lr=1e-3)
    return bnn


def batches(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x, torch.arange(len(x)) % 3)]


def close(bnn: bl.Bayesian, **numbers: list[int]) -> None:
    """Close gates by hand, by place with underscores for dots: a scale that is all noise."""
    known = {place.name.replace(".", "_"): place for place in bnn.state["places"]}
    with torch.no_grad():
        for name, which in numbers.items():
            bnn.model.get_parameter(known[name.lstrip("_")].parameter("mean"))[which] = 0.0


def pruned_by_gates(bnn: bl.Bayesian) -> bl.Bayesian:
    return bl.prune(bnn, bl.plan(bnn, bl.Budget(threshold=-15), criterion="log_alpha"))


def check_small(slim: nn.Module, pruned: bl.Bayesian, x: Tensor) -> None:
    torch.testing.assert_close(slim.eval()(x), pruned.eval()(x), rtol=1e-4, atol=1e-5)


@every_family
def test_hidden_units_and_inputs_of_an_mlp(family):
    bnn = gated(mlp(), X, family)
    close(bnn, _0_inputs=[1, 3], _2_inputs=[0, 2, 5], _4_inputs=[4])
    pruned = pruned_by_gates(bnn)
    assert isinstance(pruned.posterior_, Gated)
    torch.testing.assert_close(pruned.eval()(X), bnn.eval()(X))
    slim = bl.compact(pruned, X)
    assert [slim[0].out_features, slim[2].out_features] == [5, 5]
    check_small(slim, pruned, X)
    reading_less = bl.compact(pruned, X, drop_inputs=True)
    assert sum(p.numel() for p in reading_less.parameters()) == 3 * 5 + 5 + 5 * 5 + 5 + 5 * 3 + 3
    check_small(reading_less, pruned, X)


@pytest.mark.parametrize("family", FAMILIES[1:], ids=lambda family: family.name)
def test_filters_with_and_without_a_norm(family):
    bnn = gated(convolutional(), IMAGES, family)
    close(bnn, _1_outputs=[0, 3], _3_outputs=[1, 2])
    pruned = pruned_by_gates(bnn)
    assert set(pruned.masks) - {"7.weight"} == {"3.weight", "3.bias", "1.weight", "1.bias"}
    torch.testing.assert_close(pruned.eval()(IMAGES), bnn.eval()(IMAGES))
    slim = bl.compact(pruned, IMAGES)
    assert [slim[0].out_channels, slim[3].in_channels, slim[3].out_channels, slim[7].in_features] == [2, 2, 4, 16]
    check_small(slim, pruned, IMAGES)


def test_closed_norms_alone_are_something_to_cut():
    bnn = gated(convolutional(), IMAGES)
    budget = bl.Budget(threshold=-3)
    with pytest.raises(ValueError, match="No score is below"):
        bl.plan(bnn, budget, criterion="log_alpha")
    close(bnn, _1_outputs=[1])
    plan = bl.plan(bnn, budget, criterion="log_alpha")
    assert {name for name, mask in plan.masks.items() if not mask.all()} == {"1.weight", "1.bias"}
    pruned = bl.prune(bnn, plan)
    assert bl.compact(pruned, IMAGES)[0].out_channels == 3
    with pytest.raises(ValueError, match="No score is below"):
        bl.plan(pruned, budget, criterion="log_alpha")


def test_recurrent_units():
    bnn = gated(Recurrent(), SEQUENCES)
    close(bnn, lstm_hidden_l0=[1, 4, 5], head_inputs=[0, 1, 4])
    pruned = pruned_by_gates(bnn)
    slim = bl.compact(pruned, SEQUENCES)
    assert slim.lstm.hidden_size == 4  # those that neither the next step nor the head reads are gone
    check_small(slim, pruned, SEQUENCES)


def test_a_preactivation_that_is_constant_stays_so():
    bnn = gated(Recurrent(), SEQUENCES)
    close(bnn, lstm_preactivations_l0=[2, 7])
    pruned = pruned_by_gates(bnn)
    mean = pruned.posterior_.mean
    assert not mean["lstm.weight_ih_l0"][[2, 7]].any()
    assert not mean["lstm.weight_hh_l0"][[2, 7]].any()
    pruned.fit(batches(SEQUENCES), epochs=2)
    assert not pruned.posterior_.sample()["lstm.weight_ih_l0"][[2, 7]].any()
    assert pruned.model.lstm.bias_ih_l0[[2, 7]].all()


def test_heads():
    bnn = gated(Attentive(), LONG)
    close(bnn, attention_heads=[1, 2])
    pruned = pruned_by_gates(bnn)
    assert not pruned.model.attention.out_proj.weight[:, 2:6].any()
    slim = bl.compact(pruned, LONG)
    assert sum(p.numel() for p in slim.parameters()) < sum(p.numel() for p in Attentive().parameters())
    check_small(slim, pruned, LONG)


@every_family
def test_training_on_keeps_the_zeros_and_leaves_dead_gates_out(family):
    bnn = gated(mlp(), X, family)
    close(bnn, _2_inputs=[0, 2, 5])
    pruned = pruned_by_gates(bnn)
    own = {n: p for n, p in pruned.model.named_parameters() if n.startswith("2.inputs_gate")}
    before = {name: p.detach().clone() for name, p in own.items()}
    pruned.fit(batches(X), epochs=3, lr=1e-2)
    for name, mask in pruned.masks.items():
        assert not pruned.model.get_parameter(name)[~mask].any()
        assert not pruned.posterior_.variance[name][~mask].any()
        assert not pruned.posterior_.sample(3)[name][:, ~mask].any()
    for name, p in own.items():
        assert torch.equal(p[[0, 2, 5]], before[name][[0, 2, 5]]), name
        assert not torch.equal(p, before[name])
    # what is known of gates without weights is found again after loading
    assert pruned.posterior_.scales[1].cut.tolist() == [True, False, True, False, False, True, False, False]


def test_the_kl_is_that_of_the_gates_that_are_left():
    bnn = gated(mlp(), X)
    close(bnn, _2_inputs=[0, 2, 5])
    pruned = pruned_by_gates(bnn)
    pruned.loss(batches(X)[0])
    gate, kl = gates.NormalJeffreys(), 0.0
    for place in bnn.state["places"]:
        own = {n: pruned.model.get_parameter(place.parameter(n)) for n in ("mean", "log_std")}
        left = [i for i in range(place.count) if place.name != "2.inputs" or i not in (0, 2, 5)]
        kl += gate.kl({n: p[left] for n, p in own.items()})
    for name, prior in pruned.priors.items():
        weight = pruned.model.get_parameter(name)
        kl -= prior.log_prob(weight[pruned.masks.get(name, torch.ones_like(weight).bool())]).sum()
    assert pruned.terms.kl.item() == pytest.approx(kl.item(), rel=1e-5)


def test_a_pruned_network_is_saved_with_its_gates(tmp_path):
    bnn = gated(convolutional(), IMAGES, families.SparseGaussian())
    close(bnn, _1_outputs=[0, 3], _3_outputs=[1, 2])
    pruned = pruned_by_gates(bnn)
    bl.save(pruned, tmp_path / "pruned")
    again = bl.load(tmp_path / "pruned", model=convolutional())
    for one in (pruned, again):
        one.eval()
    assert torch.equal(pruned(IMAGES), again(IMAGES))
    for a, b in zip(pruned.posterior_.scales, again.posterior_.scales, strict=True):
        assert a.place == b.place
        assert torch.equal(a.cut, b.cut)
    losses = []
    for one in (pruned.train(), again.train()):
        torch.manual_seed(0)
        losses.append(one.loss(batches(IMAGES)[0]).item())
    assert losses[0] == losses[1]
    draws = [one.posterior_.sample(2, generator=torch.Generator().manual_seed(0)) for one in (pruned, again)]
    assert all(torch.equal(draws[0][name], draws[1][name]) for name in draws[0])


@pytest.mark.parametrize("criterion", ["magnitude", "snr", "curvature", "density", "log_alpha", "sign_stability"])
def test_weights_behind_closed_gates_go_first(criterion):
    bnn = gated(mlp(), X, families.DiagonalGaussian())
    close(bnn, _0_inputs=[1, 3], _2_inputs=[0, 2, 5], _4_inputs=[4])
    closed = 2 * 8 + 3 * 6 + 3
    plan = bl.plan(bnn, bl.Budget(sparsity=closed / (40 + 48 + 18)), criterion=criterion)
    assert not plan.masks["0.weight"][:, [1, 3]].any()
    assert not plan.masks["2.weight"][:, [0, 2, 5]].any()
    assert not plan.masks["4.weight"][:, 4].any()
    assert plan.cut == closed


CRITERIA = ["auto", "gates", "magnitude", "snr", "curvature", "density", "mass"]


@pytest.mark.parametrize(("criterion", "family"), list(zip(CRITERIA, itertools.cycle(FAMILIES), strict=False)))
def test_plans_by_unit(criterion, family):
    bnn = gated(mlp(), X, family)
    close(bnn, _2_inputs=[0, 2, 5])
    plan = bl.plan(bnn, bl.Budget(sparsity=0.3), granularity="unit", criterion=criterion, example=X)
    pruned = bl.prune(bnn, plan)
    slim = bl.compact(pruned, X)
    assert slim[0].out_features + slim[2].out_features < 14
    check_small(slim, pruned, X)


def test_units_are_ranked_by_their_gates():
    bnn = gated(mlp(), X)
    with torch.no_grad():
        bnn.model[2].inputs_gate_log_std[:] = torch.tensor([-3.0, 0.0, -3.0, -1.0, -3.0, -3.0, -3.0, -3.0])
    plan = bl.plan(bnn, bl.Budget(threshold=2.1), criterion="gates", granularity="unit", example=X)
    assert (~plan.masks["2.weight"]).all(0).nonzero()[:, 0].tolist() == [1, 3]
    assert (~plan.masks["0.weight"]).all(1).nonzero()[:, 0].tolist() == [1, 3]
    by_weight = bl.plan(bnn, bl.Budget(threshold=2.1), criterion="gates")
    assert (~by_weight.masks["2.weight"]).all(0).nonzero()[:, 0].tolist() == [1, 3]
    assert by_weight.masks["0.weight"].all()
    assert bl.plan(bnn, bl.Budget(sparsity=0.1), granularity="unit", example=X).criterion == "gates"
    plain = bl.bayesianize(mlp(), bl.Variational(), likelihood=likelihoods.Categorical())
    with pytest.raises(TypeError, match="has none"):
        bl.plan(plain, bl.Budget(sparsity=0.5), criterion="gates")


def test_filters_heads_and_recurrent_units_are_ranked_by_their_gates():
    for model, x, closed in (
        (convolutional(), IMAGES, {"_1_outputs": [0, 3], "_3_outputs": [1, 2]}),
        (Recurrent(), SEQUENCES, {"lstm_hidden_l0": [1, 4, 5], "head_inputs": [0, 1, 4]}),
        (Attentive(), LONG, {"attention_heads": [1, 2]}),
    ):
        bnn = gated(model, x)
        close(bnn, **closed)
        plan = bl.plan(bnn, bl.Budget(threshold=0.0), criterion="gates", granularity="unit", example=x)
        pruned = bl.prune(bnn, plan)
        torch.testing.assert_close(pruned.eval()(x), bnn.eval()(x), rtol=1e-4, atol=1e-5)
        small = sum(p.numel() for p in bl.compact(pruned, x).parameters())
        assert small < sum(p.numel() for p in model.parameters())


def test_what_is_measured_on_data_and_in_steps():
    bnn = gated(mlp(), X, families.DiagonalGaussian(), epochs=20)
    close(bnn, _2_inputs=[0, 2])
    pruned = bl.prune(bnn, bl.Budget(max_error_increase=50.0), validate=batches(X))
    assert not pruned.masks["2.weight"][:, [0, 2]].any()
    before = copy.deepcopy(bnn.state_dict())
    stepwise = bl.prune(bnn, bl.Budget(sparsity=0.6), refresh=batches(X), steps=2, fine_tune={"epochs": 1})
    assert stepwise.plan_ is not None
    assert all(torch.equal(before[name], value) for name, value in bnn.state_dict().items())


@pytest.mark.parametrize(("kind", "family"), list(zip(["convolutional", "mlp", "recurrent"], FAMILIES, strict=True)))
def test_smaller_and_still_bayesian(kind, family):
    model, x, closed = {
        "mlp": (mlp(), X, {"_0_inputs": [1], "_2_inputs": [0, 2, 5], "_4_inputs": [4]}),
        "convolutional": (convolutional(), IMAGES, {"_1_outputs": [0, 3], "_3_outputs": [1, 2]}),
        "recurrent": (Recurrent(), SEQUENCES, {"lstm_hidden_l0": [1, 4, 5], "head_inputs": [0, 1, 4]}),
    }[kind]
    bnn = gated(model, x, family)
    with torch.no_grad():
        for place in bnn.state["places"]:
            bnn.model.get_parameter(place.parameter("mean")).uniform_(0.5, 1.5)
    close(bnn, **closed)
    pruned = bl.prune(bnn, bl.plan(bnn, bl.Budget(threshold=0.0), granularity="unit", criterion="gates", example=x))
    small = bl.compact(pruned, x, bayesian=True)
    assert sum(p.numel() for p in small.model.parameters()) < sum(p.numel() for p in pruned.model.parameters())
    assert isinstance(small.posterior_, Gated)
    torch.testing.assert_close(small.eval()(x), pruned.eval()(x), rtol=1e-4, atol=1e-5)
    spreads = []
    for one in (small, pruned):
        draws = bl.predict(one, x, samples=150, generator=torch.Generator().manual_seed(0)).samples
        spreads.append(draws.std(0).mean())
    torch.testing.assert_close(*spreads, rtol=0.2, atol=1e-4)
    small.fit(batches(x), epochs=2)
    assert all(torch.isfinite(p).all() for p in small.model.parameters())


def test_biases_that_took_in_constants_stay_right_behind_their_gates():
    bnn = gated(
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(64, 3)), IMAGES
    )
    with torch.no_grad():
        bnn.model[2].outputs_gate_mean[:] = torch.tensor([0.5, 1.5, 1.0, 2.0])
    masks = {"0.weight": torch.ones(3, 1, 3, 3, dtype=torch.bool)}
    masks["0.weight"][1] = False  # its bias stays, and the unit is a constant
    pruned = bl.prune(bnn, bl.Plan(masks))
    small = bl.compact(pruned, IMAGES, bayesian=True)
    assert small.model[0].out_channels == 2
    torch.testing.assert_close(small.eval()(IMAGES), pruned.eval()(IMAGES), rtol=1e-4, atol=1e-5)
