"""Compaction in detail: what folds, what stays, what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import LeNet5, prepared
from torch import nn

from bayeslim.compact import CompactionFailed, compact_network, compaction, units
from bayeslim.compact.proof import Proof, Reference
from bayeslim.errors import ShapeMismatch, UnsupportedModel
from bayeslim.export import export


def cut_rows(*parts: tuple[nn.Module, list[int]]) -> None:
    """Cut all weights, but no bias, that produce some channels."""
    with torch.no_grad():
        for layer, rows in parts:
            layer.weight[rows] = 0


def mlp(activation: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), activation or nn.Sigmoid(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def test_a_constant_goes_through_its_activation_into_the_next_bias():
    model = mlp()
    cut_rows((model[0], [0, 3, 5]))
    slim = compact_network(model, None, X)
    assert slim[0].weight.shape == (5, 4)
    constant = torch.sigmoid(model[0].bias[[0, 3, 5]])
    torch.testing.assert_close(slim[2].bias, model[2].bias + model[2].weight[:, [0, 3, 5]] @ constant)
    torch.testing.assert_close(slim(X), model(X))


def test_cuts_cascade_to_a_fixed_point():
    model = mlp()
    with torch.no_grad():
        model[4].weight[:, 2:] = 0  # only two of the last hidden units are read
        model[2].weight[:2, 3:] = 0  # and these read only three of the first
    slim = compact_network(model, None, X)
    assert [tuple(layer.weight.shape) for layer in slim[::2]] == [(3, 4), (2, 3), (2, 2)]


def test_weights_cut_without_a_dead_unit_stay_as_zeros():
    model = mlp()
    masks = {"2.weight": torch.eye(6, 8, dtype=torch.bool) | (torch.rand(6, 8) < 0.3)}
    masks["2.weight"][0] = True
    result = compaction(model, masks, X)
    assert result.removed == ()
    assert torch.equal(result.network[2].weight != 0, masks["2.weight"])


def conv(padding: int, **kwargs) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, padding=padding, **kwargs),
        nn.Flatten(),
        nn.LazyLinear(2),
    ).eval()


@pytest.mark.parametrize(
    ("padding", "kwargs", "left"),
    [(0, {}, 4), (1, {}, 6), (1, {"padding_mode": "circular"}, 4), (0, {"bias": False}, 6)],
    ids=["unpadded", "zero padding", "circular padding", "no bias to fold into"],
)
def test_a_norms_shift_is_folded_only_where_that_is_exact(padding, kwargs, left):
    model, x = conv(padding, **kwargs), torch.randn(2, 1, 9, 9)
    model(x)
    nn.init.ones_(model[1].bias)
    cut_rows((model[0], [1, 4]))
    slim = compact_network(model, None, x)
    assert slim[0].out_channels == left
    torch.testing.assert_close(slim(x), model(x))


def test_a_channel_at_zero_goes_even_through_zero_padding():
    model, x = conv(1), torch.randn(2, 1, 9, 9)
    model(x)
    with torch.no_grad():
        for part in (*model[1].parameters(), *model[0].parameters()):
            part[[1, 4]] = 0
    slim = compact_network(model, None, x)
    assert slim[0].out_channels == 4
    assert slim[1].num_features == 4
    assert len(slim[1].running_mean) == 4


def test_a_shared_layer_that_reads_two_constants_keeps_them():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.shared = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.shared(self.a(x).tanh()) + self.shared(self.b(x).sigmoid())

    model = Twice()
    cut_rows((model.a, [0]), (model.b, [0]))
    assert compaction(model, None, X).removed == ()


class Reduced(nn.Module):
    """Of which three hidden units are constant, and summed up over positions."""

    def __init__(self, layer, reduce):
        super().__init__()
        self.first, self.reduce, self.last = layer, reduce, nn.Linear(6, 3)
        with torch.no_grad():
            self.first.weight[:3] = 0
            self.first.bias[:3] = 1

    def forward(self, x):
        return self.last(self.reduce(self.first(x).relu()))


@pytest.mark.parametrize(
    ("build", "shape", "other", "shrinks"),
    [
        (lambda: Reduced(nn.Linear(4, 6), lambda x: x.mean(1)), (2, 5, 4), (2, 9, 4), True),
        (lambda: Reduced(nn.Linear(4, 6), lambda x: x.sum(1)), (2, 5, 4), (2, 9, 4), False),
        (
            lambda: Reduced(nn.Conv2d(1, 6, 3), lambda x: nn.functional.pad(x, (1, 1)).mean((2, 3))),
            (2, 1, 8, 8),
            (2, 1, 9, 7),
            False,
        ),
    ],
)
def test_a_constant_that_depends_on_sizes_is_not_folded(build, shape, other, shrinks):
    torch.manual_seed(0)
    network = build()
    slim = compact_network(network, None, torch.randn(shape))
    assert (slim.last.in_features == 3) == shrinks
    for size in (shape, other):
        x = torch.randn(size)
        torch.testing.assert_close(slim(x), network(x))


def test_a_bias_that_is_read_elsewhere_too_takes_no_constant():
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.last(self.first(x).sigmoid()) + self.last.bias

    model = Added()
    cut_rows((model.first, [0, 3]))
    assert compaction(model, None, X).removed == ()
    with torch.no_grad():
        model.last.weight[:, 0] = 0
    assert compaction(model, None, X).network.first.weight.shape == (5, 4)


def test_a_tensor_that_is_no_parameter_is_cut_with_its_channels():
    class Scaled(nn.Module):
        def __init__(self, inside: bool) -> None:
            super().__init__()
            self.first, self.last, self.inside = nn.Linear(4, 3), nn.Linear(3, 2), inside
            self.scale = torch.tensor([1.0, 2.0, 3.0])

        def forward(self, x):
            return self.last(self.first(x) * (torch.tensor([1.0, 2.0, 3.0]) if self.inside else self.scale))

    for inside, kind in ((False, "modules"), (True, "graph")):
        model = Scaled(inside)
        with torch.no_grad():
            model.last.weight[:, 1] = 0
        result = compaction(model, None, X)
        assert result.kind == kind
        assert result.network.get_parameter("last.weight").shape == (2, 2)
        torch.testing.assert_close(result.network(X), model(X))
        assert model.scale.tolist() == [1, 2, 3]


def test_scalars_and_state_that_changes_are_no_obstacle():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.last(self.first(x).relu())

    model = Counting()
    with torch.no_grad():
        model.last.weight[:, :2] = 0
    assert compact_network(model, None, X).first.weight.shape == (4, 4)


def test_a_stream_that_only_feeds_itself_goes():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.layer, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            x = self.up(x)
            return self.out(x + torch.tanh(self.layer(x)))

    model = Block()
    with torch.no_grad():
        model.out.weight[:, :2] = 0  # nobody else reads the first two channels,
        model.layer.weight[2:, :2] = 0  # which still read themselves and each other
    slim = compact_network(model, None, X)
    assert slim.layer.weight.shape == (4, 4)


def test_everything_cut_leaves_a_constant_network():
    model = mlp(nn.ReLU())
    masks = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in model.named_parameters() if name != "4.bias"}
    slim = compact_network(model, masks, X)
    assert [tuple(layer.weight.shape) for layer in slim[::2]] == [(1, 4), (1, 1), (2, 1)]
    torch.testing.assert_close(slim(X), model[4].bias.expand(5, 2))


def test_nothing_cut_gives_a_copy():
    model = mlp()
    result = compaction(model, {}, X)
    assert result.network is not model
    assert result.parameters[0] == result.parameters[1]
    assert torch.equal(result.network(X), model(X))


def test_a_hard_coded_size_makes_it_a_graph_that_takes_any_batch():
    model, x = LeNet5().eval(), torch.randn(1, 1, 14, 14)
    found = units(model, x)
    masks = found.masks([0, 3, 7, 20])
    result = compaction(model, masks, x, units=found)
    assert result.kind == "graph"
    assert "old sizes" in repr(result)
    more = torch.randn(7, 1, 14, 14)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p *= masks[name]
    torch.testing.assert_close(result.network(more), model(more))
    assert result.network.state_dict().keys() == model.state_dict().keys()
    result.network.train().eval()


class Sized(nn.Module):
    """Takes the size of the batch in one of several ways; with a constant beside it, it has to become a graph."""

    def __init__(self, flatten) -> None:
        super().__init__()
        self.conv, self.first, self.last, self.flatten = nn.Conv2d(1, 6, 3), nn.Linear(96, 8), nn.Linear(8, 3), flatten

    def forward(self, x):
        return self.last(torch.relu(self.first(self.flatten(torch.relu(self.conv(x))))))


@pytest.mark.parametrize(
    ("flatten", "kind"),
    [
        (lambda x: x.view(len(x), -1), "modules"),
        (lambda x: x.reshape(x.shape[0], 96), "graph"),
    ],
    ids=["len", "shape and a constant"],
)
def test_the_batch_stays_free_however_its_size_is_taken(flatten, kind):
    model, x = Sized(flatten).eval(), torch.randn(4, 1, 6, 6)
    cut_rows((model.conv, [1, 4]), (model.first, [0, 2, 3]))
    result = compaction(model, None, x)
    assert result.kind == kind
    assert result.network.get_parameter("first.weight").shape == (5, 64)
    for rows in (1, 7):
        more = torch.randn(rows, 1, 6, 6)
        torch.testing.assert_close(result.network(more), model(more))


def test_a_graph_for_one_batch_size_only_is_refused():
    model = Sized(lambda x: torch.stack([row.view(96) for row in x]))
    cut_rows((model.conv, [1]))
    with pytest.raises(CompactionFailed, match=r"rely on the old sizes, and its forward fixes the batch size"):
        compaction(model, None, torch.randn(4, 1, 6, 6))
    same = Sized(lambda x: torch.stack([row.flatten() for row in x])).eval()  # its own modules take the new sizes
    cut_rows((same.conv, [1]))
    assert compaction(same, None, torch.randn(4, 1, 6, 6)).kind == "modules"


def test_input_features_nobody_reads_are_dropped():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 2))
    read = torch.tensor([1, 2, 7, 11])
    masks = {"1.weight": torch.zeros(6, 16, dtype=torch.bool).index_fill_(1, read, True)}
    x = torch.randn(3, 1, 4, 4)
    result = compaction(model, masks, x, drop_inputs=True)
    assert result.kind == "graph"
    assert "12 features" in result.why
    assert result.network.get_parameter("1.weight").shape == (6, 4)
    with torch.no_grad():
        model[1].weight *= masks["1.weight"]
    torch.testing.assert_close(result.network(x), model(x))
    assert compaction(mlp(), {}, X, drop_inputs=True).kind == "modules"  # nothing to drop


def test_positions_of_a_flattened_map_that_nobody_reads_are_dropped(tmp_path):
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2))
    with torch.no_grad():
        model[3].weight[:, torch.tensor([0, 1, 3, 8, 9, 10, 11])] = 0  # and with its last four, the third channel
    x = torch.randn(3, 1, 4, 4)
    slim = compact_network(model, None, x, drop_inputs=True)
    assert slim.get_parameter("0.weight").shape == (2, 1, 3, 3)
    assert slim.get_parameter("3.weight").shape == (5, 5)
    torch.testing.assert_close(slim(x), model(x))
    more = torch.randn(7, 1, 4, 4)
    torch.testing.assert_close(slim(more), model(more))
    export(slim, tmp_path / "slim.onnx", example=x)


def test_channels_of_an_input_image_are_dropped():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    with torch.no_grad():
        model[0].weight[:, 1] = 0
    x = torch.randn(2, 3, 4, 4)
    slim = compact_network(model, None, x, drop_inputs=True)
    assert slim.get_parameter("0.weight").shape == (4, 2, 3, 3)
    torch.testing.assert_close(slim(x), model(x))


def test_modes_gradients_and_the_original_are_left_alone():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2)).train()
    model[1].eval()
    model[0].bias.requires_grad_(False)
    cut_rows((model[0], [1]))
    with torch.no_grad():
        model[3].weight[:, 1] = 0
    before = copy.deepcopy(model.state_dict())
    rng = torch.get_rng_state()
    slim = compact_network(model, None, X)
    assert torch.equal(rng, torch.get_rng_state())
    assert [m.training for m in slim] == [True, False, True, True]
    assert [m.training for m in model] == [True, False, True, True]
    assert not slim[0].bias.requires_grad
    assert slim[0].weight.requires_grad
    assert slim[0].weight.is_leaf
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_tied_weights_stay_tied():
    (model, example), found = prepared("tied_embeddings")
    slim = compaction(model, found.masks([0, 5, 9]), example, units=found).network
    assert slim.out.weight is slim.embed.weight
    assert slim.embed.weight.shape == (11, 13)
    assert slim.embed.embedding_dim == 13


def test_what_was_kept_is_told():
    model = mlp()
    cut_rows((model[0], [0, 3]))
    kept = compaction(model, None, X).kept
    assert kept["0.weight"][0].tolist() == [1, 2, 4, 5, 6, 7]
    assert kept["2.weight"][1].tolist() == [1, 2, 4, 5, 6, 7]
    assert "4.weight" not in kept


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"0.wieght": torch.ones(8, 4, dtype=torch.bool)}, r'no parameter of Sequential\. Closest names: "0.weight"'),
        ({"0.weight": torch.ones(4, 8, dtype=torch.bool)}, r"shape \(8, 4\).*Got torch.bool with shape \(4, 8\)"),
        ({"0.weight": torch.ones(8, 4)}, r"must be boolean.*Got torch.float32"),
    ],
)
def test_masks_that_do_not_fit(masks, message):
    with pytest.raises(ShapeMismatch, match=message):
        compaction(mlp(), masks, X)


def test_weights_that_are_not_finite():
    model = mlp()
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r'"2.weight" of Sequential holds NaN'):
        compaction(model, {}, X)


def test_an_example_of_the_wrong_shape():
    with pytest.raises(ShapeMismatch, match="does not run on the example"):
        compaction(mlp(), {}, torch.randn(3, 5))


def test_units_of_another_network():
    with pytest.raises(ShapeMismatch, match=r"another network: 0.bias, 0.weight"):
        compaction(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), {}, X, units=units(mlp(), X))


def test_a_network_that_is_random_in_eval_mode():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    with pytest.raises(UnsupportedModel, match="different outputs for the same input"):
        compaction(nn.Sequential(nn.Linear(4, 3), Noisy()), {}, X)


def test_a_network_that_takes_no_noise_is_checked_on_what_it_takes():
    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.last = nn.Embedding(5, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.last(self.words(x[:, 0].long()))

    model = Indexed()
    with torch.no_grad():
        model.last.weight[:, :2] = 0
    assert compact_network(model, None, torch.tensor([[0.0], [3.0], [4.0]])).words.weight.shape == (5, 4)


def test_a_network_without_shapes_or_an_example_without_rows():
    with pytest.raises(UnsupportedModel, match=r"lazy parameters without a shape\. Call it once"):
        compaction(nn.Sequential(nn.LazyLinear(4)), {}, X)
    with pytest.raises(ShapeMismatch, match="empty batch"):
        compaction(mlp(), {}, X[:0])


def test_a_wrong_result_is_never_returned(monkeypatch):
    monkeypatch.setattr(Reference, "compare", lambda self, network: Proof(0.5, False))
    with pytest.raises(CompactionFailed, match=r"differs from the masked one by 0\.5"):
        compaction(mlp(), {}, X)


def test_the_proof_can_fail():
    model = mlp().eval()
    reference = Reference(model, X, 1e-6)
    assert reference.compare(copy.deepcopy(model)).holds
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[4].bias[0] += 1e-4
    assert not reference.compare(other).holds
    assert reference.compare(nn.Linear(4, 3)).difference == float("inf")
    assert reference.compare(nn.Linear(5, 2)).difference == float("inf")


def test_the_rounding_of_folded_constants_is_allowed_for_and_nothing_else():
    model = mlp().eval()
    reference = Reference(model, X, 1e-6)
    largest = float(model(X).detach().abs().max())

    def moved(by):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other[4].bias[0] += by * largest
        return reference.compare(other)

    assert 1e-6 < moved(2e-6).difference < 2.8e-6
    assert not moved(2e-6).holds
    reference.allow_folded(torch.float32)
    assert moved(2e-6).holds
    assert not moved(1e-5).holds
