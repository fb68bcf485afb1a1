"""Compacted networks are exact at other sizes than the example's, or refuse them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from networks import Cells, GroupedAttention
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.compact import compaction, units
from bayeslim.errors import UnsupportedModel

TOLERANCE = 1e-4


def exact_or_refused(network: nn.Module, slim: nn.Module, *inputs) -> str:
    """The smaller network gives the network's outputs, or says that it was traced on other inputs."""
    with torch.no_grad():
        expected = network(*inputs)
        try:
            found = slim(*inputs)
        except AssertionError:
            with pytest.raises(AssertionError, match="make it again with an example"):
                slim(*inputs)
            return "refused"
    assert found.shape == expected.shape
    assert float((found - expected).abs().max() / expected.abs().max()) < TOLERANCE
    return "exact"


def cut(layer: nn.Module, *units: int) -> None:
    """Zero the rows of units but for their biases, so that each leaves a constant."""
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim > 1:
                parameter[list(units)] = 0


def kill(network: nn.Module, layer: str, *units: int) -> None:
    """Zero the rows of units with their biases."""
    with torch.no_grad():
        for parameter in network.get_submodule(layer).parameters():
            parameter[list(units)] = 0


# networks that can only be compacted as graphs


class CellLoop(nn.Module):
    """An LSTMCell in a loop over time, with the width of its state written into the code."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 6)
        outputs = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            outputs.append(self.head(h))
        return torch.stack(outputs, 1)


class HardCodedWidth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu().view(-1, x.shape[1], 8)
        return self.b(hidden.sum(1) / x.shape[1])


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)
        self.places = nn.Parameter(torch.randn(1, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu().view(-1, x.shape[1], 8)
        return self.b(hidden + self.places[:, : x.shape[1]]).relu().cumsum(1)


def lstm_cut() -> CellLoop:
    network = CellLoop().eval()
    with torch.no_grad():
        for gate in range(4):
            for parameter in network.cell.parameters():
                parameter[gate * 6 + 1] = 0
    return network


def test_an_lstm_cell_in_a_loop_takes_the_number_of_steps_it_was_traced_on():
    torch.manual_seed(0)
    network = lstm_cut()
    result = compaction(network, None, torch.randn(2, 4, 3))
    assert (result.kind, len(result.removed)) == ("graph", 1)
    assert exact_or_refused(network, result.network, torch.randn(5, 4, 3)) == "exact"
    assert exact_or_refused(network, result.network, torch.randn(2, 9, 3)) == "refused"


def test_a_mean_over_time_in_a_network_with_a_hard_coded_width():
    torch.manual_seed(0)
    network = HardCodedWidth().eval()
    kill(network, "a", 1, 5)
    result = compaction(network, None, torch.randn(2, 4, 3))
    assert result.kind == "graph"
    assert exact_or_refused(network, result.network, torch.randn(3, 9, 3)) == "exact"


def test_one_token_is_not_broadcast_to_nine():
    torch.manual_seed(0)
    network = Positions().eval()
    kill(network, "a", 1)
    with torch.no_grad():
        network.places[:, :, 1] = 0
    result = compaction(network, None, torch.randn(2, 1, 3))
    assert result.kind == "graph"
    exact_or_refused(network, result.network, torch.randn(2, 9, 3))
    longer = compaction(network, None, torch.randn(2, 5, 3)).network
    assert exact_or_refused(network, longer, torch.randn(2, 9, 3)) == "exact"
    exact_or_refused(network, longer, torch.randn(2, 1, 3))


def test_as_many_tokens_as_positions():
    """`torch.export` excludes that length, though the operations are the same."""
    torch.manual_seed(0)
    network = Positions().eval()
    kill(network, "a", 1)
    with torch.no_grad():
        network.places[:, :, 1] = 0
    result = compaction(network, None, torch.randn(2, 5, 3))
    assert result.kind == "graph"
    for size in ((2, 16), (1, 16), (3, 15), (1, 1)):
        assert exact_or_refused(network, result.network, torch.randn(*size, 3)) == "exact"
    with pytest.raises(AssertionError, match="<= 16"):
        result.network(torch.randn(2, 17, 3))


def test_a_branch_at_as_many_tokens_as_positions_is_refused():
    class Full(Positions):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2 if x.shape[1] == 16 else super().forward(x)

    torch.manual_seed(0)
    network = Full().eval()
    kill(network, "a", 1)
    with torch.no_grad():
        network.places[:, :, 1] = 0
    slim = compaction(network, None, torch.randn(2, 5, 3)).network
    assert exact_or_refused(network, slim, torch.randn(2, 15, 3)) == "exact"
    assert exact_or_refused(network, slim, torch.randn(2, 16, 3)) == "refused"


def test_dropped_inputs_leave_the_other_sizes_free():
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu().sum(1) / x.shape[1])

    torch.manual_seed(0)
    network = Mean().eval()
    with torch.no_grad():
        network.a.weight[:, [0, 3]] = 0
    result = compaction(network, None, torch.randn(2, 4, 6), drop_inputs=True)
    assert result.kind == "graph"
    assert exact_or_refused(network, result.network, torch.randn(2, 11, 6)) == "exact"


# networks whose forward reads every size from its inputs, or loops over time


class Patches(nn.Module):
    """Patches of two steps, written as einops writes them: b c (t 2) -> b t (2 c), and back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.within, self.out = nn.Linear(6, 10), nn.Linear(10, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        b, c, steps = x.shape
        x = x.reshape(b, c, steps // 2, 2).permute(0, 2, 3, 1).reshape(b, steps // 2, 2 * c)
        x = self.out(self.within(self.embed(x).relu()).relu())
        return x.reshape(b, steps // 2, 2, c).permute(0, 3, 1, 2).reshape(b, c, steps)


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, 2, proj_size=4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


FREE = {
    "patches": (Patches, (2, 3, 8), [(3, 3, 12), (1, 3, 8), (2, 3, 2)]),
    "grouped attention": (partial(GroupedAttention, 16, 4, shared=2), (2, 5, 16), [(3, 8, 16), (1, 5, 16), (2, 1, 16)]),
    "lstm with projections": (Projected, (2, 4, 3), [(3, 9, 3), (1, 4, 3), (2, 1, 3)]),
    "gru cells": (Cells, (2, 3, 5), [(4, 3, 5), (1, 3, 5), (2, 7, 5), (2, 1, 5)]),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", list(FREE))
def test_other_batches_and_lengths(name):
    torch.manual_seed(0)
    kind, shape, others = FREE[name]
    network, x = kind().eval(), torch.randn(shape)
    found = units(network, x)
    cut = [place for places in found.by_layer().values() for place in places[: len(places) // 2]]
    result = compaction(network, found.masks(cut), x, units=found)
    assert len(result.removed) == len(cut) > 0
    with torch.no_grad():
        for parameter, mask in found.masks(cut).items():
            network.get_parameter(parameter).mul_(mask)
    for size in (shape, *others):
        is_other_length = name == "gru cells" and size[1] != shape[1]
        assert exact_or_refused(network, result.network, torch.randn(size)) == (
            "refused" if is_other_length else "exact"
        )


# networks that are read from a folder


def saved(network: nn.Module, example, path, model: nn.Module | None = None) -> nn.Module:
    bl.save(network, path, example=example)
    return bl.load(path, model=model)


def test_a_folder_without_its_class_refuses_other_lengths(tmp_path):
    torch.manual_seed(0)
    network = lstm_cut()
    found = saved(network, torch.randn(2, 4, 3), tmp_path)
    assert exact_or_refused(network, found, torch.randn(3, 4, 3)) == "exact"
    assert exact_or_refused(network, found, torch.randn(2, 9, 3)) == "refused"


def test_a_folder_without_its_class_refuses_the_other_branch(tmp_path):
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).sum(1) if x.shape[1] > 8 else self.a(x).tanh().mean(1)

    torch.manual_seed(0)
    network = Branch().eval()
    found = saved(network, torch.randn(2, 5, 3), tmp_path)
    assert exact_or_refused(network, found, torch.randn(2, 8, 3)) == "exact"
    assert exact_or_refused(network, found, torch.randn(2, 9, 3)) == "refused"


def test_a_folder_without_its_class_takes_larger_bags(tmp_path):
    torch.manual_seed(0)
    network = nn.EmbeddingBag(20, 4, mode="sum").eval()
    found = saved(network, (torch.randint(20, (6,)), torch.tensor([0, 2, 4])), tmp_path)
    exact_or_refused(network, found, torch.randint(20, (15,)), torch.tensor([0, 7, 9]))


@pytest.mark.parametrize("number", [2.5, 3])
def test_a_folder_without_its_class_refuses_another_number(tmp_path, number):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x: Tensor, factor: float) -> Tensor:
            return self.a(x) * factor

    torch.manual_seed(0)
    network, x = Scaled().eval(), torch.randn(2, 3)
    found = saved(network, (x, number), tmp_path)
    assert exact_or_refused(network, found, x, number) == "exact"
    exact_or_refused(network, found, x, number + 4)


def test_a_folder_of_a_graph_is_not_read_into_its_class(tmp_path):
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(nn.functional.channel_shuffle(self.a(x).relu(), 2))

    torch.manual_seed(0)
    network, x = Shuffled().eval(), torch.randn(2, 3, 5, 5)
    masks = units(network, x).masks([1])
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter *= masks[name]
    slim = bl.compact(network, x)
    assert isinstance(slim, torch.fx.GraphModule)
    bl.save(slim, tmp_path)
    assert exact_or_refused(network, bl.load(tmp_path), torch.randn(2, 3, 7, 7)) == "exact"
    with pytest.raises(UnsupportedModel, match="Load it without model="):
        bl.load(tmp_path, model=Shuffled())


# constants that are folded into a bias


class Pooled(nn.Module):
    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(features, 8), nn.Linear(8, 2)

    def pool(self, hidden: Tensor) -> Tensor:
        return hidden.sum(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.pool(self.a(x).relu()))


def with_constant(network: nn.Module, layer: nn.Module) -> nn.Module:
    """A network of which two units of a layer are constant at one."""
    cut(layer, 1, 2)
    with torch.no_grad():
        layer.bias[[1, 2]] = 1.0
    return network.eval()


def test_a_sum_over_as_many_steps_as_features():
    torch.manual_seed(0)
    network = Pooled()
    with_constant(network, network.a)
    slim = compaction(network, None, torch.randn(2, 4, 4)).network
    for steps in (1, 4, 7, 9):
        assert exact_or_refused(network, slim, torch.randn(2, steps, 4)) == "exact"


def test_a_mean_over_time_is_folded():
    torch.manual_seed(0)

    class Mean(Pooled):
        def pool(self, hidden: Tensor) -> Tensor:
            return hidden.mean(1)

    network = Mean()
    with_constant(network, network.a)
    result = compaction(network, None, torch.randn(2, 4, 4))
    assert len(result.removed) == 2
    assert exact_or_refused(network, result.network, torch.randn(2, 9, 4)) == "exact"


def test_an_image_with_as_many_channels_as_rows():
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 1), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu().sum((2, 3)))

    torch.manual_seed(0)
    network = Summed()
    with_constant(network, network.a)
    slim = compaction(network, None, torch.randn(2, 3, 3, 3)).network
    for size in ((3, 3), (5, 3), (3, 7), (6, 9)):
        assert exact_or_refused(network, slim, torch.randn(2, 3, *size)) == "exact"


def test_windows_of_twenty_steps():
    class Windows(Pooled):
        def pool(self, hidden: Tensor) -> Tensor:
            return hidden.unfold(1, 20, 20).sum((1, 3)) / 5

    torch.manual_seed(0)
    network = Windows()
    with_constant(network, network.a)
    slim = compaction(network, None, torch.randn(2, 100, 4)).network
    for steps in (20, 100, 60, 105, 240):
        assert exact_or_refused(network, slim, torch.randn(2, steps, 4)) == "exact"


def test_the_first_hundred_steps():
    class First(Pooled):
        def pool(self, hidden: Tensor) -> Tensor:
            return hidden[:, :100].sum(1)

    torch.manual_seed(0)
    network = First()
    with_constant(network, network.a)
    slim = compaction(network, None, torch.randn(2, 300, 4)).network
    for steps in (300, 100, 40, 500):
        assert exact_or_refused(network, slim, torch.randn(2, steps, 4)) == "exact"


@pytest.mark.parametrize("factor", [2.0, 3])
def test_a_factor_that_is_an_argument(factor):
    class Factor(Pooled):
        def forward(self, x: Tensor, factor: float) -> Tensor:
            return self.b(self.a(x).relu() * factor)

    torch.manual_seed(0)
    network = Factor()
    with_constant(network, network.a)
    x = torch.randn(2, 4)
    slim = compaction(network, None, (x, factor)).network
    for other in (factor, factor + 3, 0.5):
        exact_or_refused(network, slim, x, other)


def test_a_division_by_a_number_from_the_data():
    class Longest(Pooled):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.b(self.a(x).relu() / lengths.max().item())

    torch.manual_seed(0)
    network = Longest()
    with_constant(network, network.a)
    x = torch.randn(2, 5, 4)
    slim = compaction(network, None, (x, torch.tensor([3.0, 5.0]))).network
    for lengths in ([3.0, 5.0], [2.0, 2.0], [1.0, 9.0]):
        assert exact_or_refused(network, slim, x, torch.tensor(lengths)) == "exact"


def test_an_argument_that_the_example_leaves_out():
    class Masked(Pooled):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            hidden = self.a(x).relu()
            return self.b(hidden if mask is None else hidden * mask[..., None])

    torch.manual_seed(0)
    network = Masked()
    with_constant(network, network.a)
    kill(network, "a", 5)
    with torch.no_grad():
        network.b.weight[:, 5] = 0
    x, mask = torch.randn(3, 6, 4), torch.tensor([1.0, 1, 1, 0, 0, 0]).expand(3, 6)
    result = compaction(network, None, x)
    assert len(result.removed) == 1
    assert "does not give mask" in result.why
    assert exact_or_refused(network, result.network, x, mask) == "exact"
    chosen = compaction(network, None, {"x": x, "mask": None})
    assert exact_or_refused(network, chosen.network, x, mask) == "exact"
    given = compaction(network, None, (x, mask))
    assert exact_or_refused(network, given.network, x, mask) == "exact"


@pytest.mark.parametrize("bound", [9, 100])
def test_another_branch_far_beyond_the_example(bound):
    """A unit that is zero, and one that is one, before the bound are neither beyond it."""

    class Far(Pooled):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            return self.b(hidden.relu() if x.shape[1] < bound else hidden.sigmoid())

    torch.manual_seed(0)
    network = Far()
    with_constant(network, network.a)
    with torch.no_grad():
        network.a.bias[2] = -1.0
    slim = compaction(network, None, torch.randn(2, 5, 4)).network
    for steps in (5, bound - 1, bound, 2 * bound):
        exact_or_refused(network, slim, torch.randn(2, steps, 4))


def test_a_table_of_positions_bounds_the_length():
    """Beyond the table the network fails by itself, so constants are folded."""

    class Table(Pooled):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.randn(40, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x + self.places[: x.shape[1]]).relu())

    torch.manual_seed(0)
    network = Table()
    with_constant(network, network.a)
    result = compaction(network, None, torch.randn(2, 5, 4))
    assert len(result.removed) == 2
    for steps in (5, 1, 40):
        assert exact_or_refused(network, result.network, torch.randn(2, steps, 4)) == "exact"
