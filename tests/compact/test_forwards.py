"""Forwards of every kind are traced, cut and compacted, and the units that must stay say why."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import bayeslim as bl
from bayeslim.compact import compaction, units
from bayeslim.errors import UnsupportedModel


def halved(network: nn.Module, example, *, at_least: int = 1):
    """Cut every other unit of a network; its compaction must be exact and remove what was cut."""
    network = network.eval()
    found = units(network, example)
    cut = [place for places in found.by_layer().values() for place in places[::2][: max(len(places) - 1, 0)]]
    result = compaction(network, found.masks(cut), example, units=found)
    assert len(result.removed) >= max(len(cut), at_least)
    assert result.difference < 1e-5
    return result


class Regions(nn.Module):
    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.a, self.b, self.c, self.dtype = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2), dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.a(x).relu()
        if self.dtype is None:
            hidden = self.b(hidden).relu()
        else:
            with torch.autocast("cpu", dtype=self.dtype):
                hidden = self.b(hidden).relu()
        return self.c(hidden.float())


def test_no_grad_inside_a_forward():
    assert halved(Regions(None), torch.randn(2, 4)).kind == "modules"


def test_autocast_inside_a_forward():
    network = Regions(torch.bfloat16).eval()
    example = torch.randn(2, 4)
    found = units(network, example)
    assert {unit.layer for unit in found.units} == {"a", "b"}
    masks = found.masks([0, 3, 9])
    slim = compaction(network, masks, example, units=found).network
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter *= masks[name]
    torch.testing.assert_close(slim(example), network(example), atol=0.02, rtol=0.02)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("layers", [1, 2])
def test_an_lstm_with_projections(layers):
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(3, 6)
            self.lstm = nn.LSTM(6, 8, layers, proj_size=4, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(self.embed(x).relu())[0])

    slim = halved(Projected(), torch.randn(2, 5, 3), at_least=9).network
    assert (slim.lstm.input_size, slim.lstm.hidden_size, slim.lstm.proj_size) == (3, 4, 2)


def test_a_forward_of_any_number_of_arguments():
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, *args: Tensor) -> Tensor:
            return self.b(self.a(sum(args)).relu())

    halved(Summed(), (torch.randn(2, 4), torch.randn(2, 4)), at_least=4)


def test_cross_attention_with_a_learned_query():
    class Perceiver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Parameter(torch.randn(5, 8))
            self.embed = nn.Linear(3, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.inner, self.head = nn.Linear(8, 16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.embed(x)
            query = self.query.unsqueeze(0).expand(x.shape[0], -1, -1)
            return self.head(self.inner(self.attention(query, hidden, hidden)[0]).relu()).mean(1)

    result = halved(Perceiver(), torch.randn(2, 7, 3), at_least=8)
    assert any("in_proj_weight" in frozen.parameter for frozen in result.units.frozen)


class Packed(nn.Module):
    """A recurrent network over sequences of several lengths."""

    def __init__(self, recurrent: type[nn.RNNBase], reads: str) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(3, 6), nn.LayerNorm(3)
        self.recurrent = recurrent(6, 8, 2, batch_first=True, bidirectional=True)
        self.head, self.reads = nn.Linear(16, 2), reads

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.embed(self.norm(x)).relu()
        packed = pack_padded_sequence(hidden, lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, state = self.recurrent(packed)
        if self.reads == "state":
            state = state[0] if isinstance(state, tuple) else state
            return self.head(torch.cat([state[-2], state[-1]], 1))
        total = x.shape[1] if self.reads == "as long as given" else None
        return self.head(pad_packed_sequence(outputs, batch_first=True, total_length=total)[0])


@pytest.mark.parametrize(
    ("recurrent", "reads"), [(nn.LSTM, "as long as given"), (nn.GRU, "as long as the longest"), (nn.LSTM, "state")]
)
def test_packed_sequences(recurrent, reads):
    torch.manual_seed(0)
    network = Packed(recurrent, reads).eval()
    example = (torch.randn(3, 5, 3), torch.tensor([5, 3, 2]))
    result = halved(network, example, at_least=7)
    assert result.kind == "modules"
    assert (result.network.recurrent.input_size, result.network.recurrent.hidden_size) == (3, 4)
    assert {frozen.parameter for frozen in result.units.frozen} >= {"head.weight"}
    names = [unit.layer for unit in result.units.units]
    masks = result.units.masks([at for at, name in enumerate(names) if at in result.removed])
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter *= masks[name]
    for x, lengths in ((torch.randn(4, 9, 3), [1, 9, 4, 4]), (torch.randn(1, 5, 3), [3])):
        torch.testing.assert_close(result.network(x, torch.tensor(lengths)), network(x, torch.tensor(lengths)))


def test_packed_sequences_are_stored_and_padding_is_not_folded(tmp_path):
    """A unit that is always one is zero in the padding, which the example does not have."""
    torch.manual_seed(0)

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(self.embed(x).relu(), lengths, batch_first=True, enforce_sorted=False)
            return self.head(pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])[0])

    network = Linear().eval()
    with torch.no_grad():
        network.embed.weight[2], network.embed.bias[2] = 0, 1.0
        network.embed.weight[4], network.embed.bias[4] = 0, -1.0
    example = (torch.randn(2, 4, 3), torch.tensor([4, 4]))
    result = compaction(network, None, example)
    assert len(result.removed) == 1
    bl.save(result.network, tmp_path, example=example)
    given = torch.randn(3, 6, 3), torch.tensor([2, 6, 1])
    for found in (result.network, bl.load(tmp_path)):
        torch.testing.assert_close(found(*given), network(*given))
    with pytest.raises(UnsupportedModel, match="no packed sequences"):
        bl.export(result.network, tmp_path / "slim.onnx", example=example)


def test_an_encoder_and_decoder():
    network = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    result = halved(network, (torch.randn(2, 6, 8), torch.randn(2, 4, 8)), at_least=16)
    layers = {unit.layer for unit in result.units.units}
    assert {"encoder.layers.0.linear1", "decoder.layers.0.linear1"} <= layers


def test_weights_that_a_parametrisation_computes():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 6)), nn.ReLU(), nn.Linear(6, 2)
    )
    found = units(network.eval(), torch.randn(2, 4))
    assert found.frozen
    halved(network, torch.randn(2, 4), at_least=0)


def test_a_graph_convolution(tmp_path):
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 8), nn.Linear(8, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            hidden = self.a(x).relu()
            hidden = torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]])
            return self.c(self.b(hidden).relu())

    example = (torch.randn(5, 3), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]))
    result = halved(Convolution(), example, at_least=7)
    bl.save(bl.compact(result.network, example), tmp_path)  # two rows are not enough for the edges
    found = bl.load(tmp_path)
    nodes, edges = torch.randn(7, 3), torch.tensor([[6, 0, 4], [5, 6, 6]])
    torch.testing.assert_close(found(nodes, edges), result.network(nodes, edges))


class Experts(nn.Module):
    """The sign of its first feature chooses the expert that reads a row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(3, 8), nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden, mixed = self.a(x).relu(), x.new_zeros(x.shape[0], self.head.in_features)
        for number, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0) == number).nonzero().squeeze(-1)
            mixed = mixed.index_add(0, rows, expert(hidden[rows]))
        return self.head(mixed.relu())


def test_experts_that_each_read_some_rows():
    torch.manual_seed(0)
    network, x = Experts().eval(), torch.randn(12, 3).abs()
    with pytest.raises(UnsupportedModel, match=r"rows for every part of the network\.$"):
        units(network, x)
    x[7:, 0] *= -1
    result = halved(network, x, at_least=6)
    with torch.no_grad():
        for name, mask in result.units.masks(result.removed).items():
            network.get_parameter(name).mul_(mask)
    for rows in (x, x[:7], x[7:], x[:1]):  # an expert may read none
        torch.testing.assert_close(result.network(rows), network(rows))


def test_whole_groups_of_a_group_norm_go():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.conv1 = nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3, padding=1)
            self.norm2, self.conv2 = nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv2(self.norm2(self.conv1(self.norm1(x).relu())).relu())

    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    result = halved(network, torch.randn(2, 3, 8, 8), at_least=6)
    assert result.network[1].norm1.num_groups == 2
    assert result.network[1].norm1.num_channels == 4


def test_a_transformer_without_some_heads_keeps_its_classes_and_its_number_of_heads():
    """Fewer heads than the width holds are no nn.MultiheadAttention: the network becomes a graph."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 4, 16, batch_first=True)
    network = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    example = torch.randn(2, 5, 12)
    found = units(network, example)
    cut = [at for at, unit in enumerate(found.units) if unit.kind == "head" and "layers.0" in unit.layer][:1]
    cut += [at for at, unit in enumerate(found.units) if unit.kind == "neuron"][:6]
    slim = compaction(network, found.masks(cut), example, units=found).network
    assert [layer.self_attn.num_heads for layer in slim.layers] == [3, 4]
    assert [type(layer) for layer in slim.layers] == [nn.TransformerEncoderLayer] * 2
    assert "(linear1): Linear(in_features=12, out_features=10, bias=True)" in str(slim)
    assert "Module(" not in str(slim).partition("def forward")[0].replace("ModuleList(", "")
    assert set(slim.state_dict()) == set(network.state_dict())
    again = copy.deepcopy(slim)
    assert torch.equal(again(example), slim(example))
    bnn = bl.bayesianize(slim, bl.Laplace(), likelihood=bl.likelihoods.Gaussian(1.0))
    bnn.fit(bl.data.Loader(example, torch.randn(2, 5, 12), batch_size=2), progress=False)
    assert all(bool((variance < 0.999).any()) for variance in bnn.posterior_.variance.values())


class OwnFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 4, batch_first=True)
        self.feed_forward = OwnFeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.feed_forward(x)


def test_a_transformer_of_own_classes_prints_their_names():
    torch.manual_seed(0)
    network, example = nn.Sequential(OwnBlock(), OwnBlock()).eval(), torch.randn(2, 5, 12)
    found = units(network, example)
    cut = [at for at, unit in enumerate(found.units) if unit.kind == "head"][:1]
    result = compaction(network, found.masks(cut), example, units=found)
    assert result.kind == "graph"
    printed = str(result.network).partition("def forward")[0]
    assert printed.count("OwnBlock(") == printed.count("OwnFeedForward(") == 2
    assert " Module(" not in printed
    assert sorted(block.attention.num_heads for block in result.network.children()) == [3, 4]
    again = copy.deepcopy(result.network)
    assert [str(block) for block in again.children()] == [str(block) for block in result.network.children()]
    assert torch.equal(again(example), result.network(example))


def test_arguments_without_a_name_are_refused_with_the_remedy():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 8)

        def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
            return self.a(kwargs["x"])

    with pytest.raises(UnsupportedModel, match=r"names of the arguments.*task_type"):
        bl.compact(Named(), {"x": torch.randn(3, 4)})
