"""The paths of a network are found from symbolic sizes, and compaction is exact or refused on each."""

from __future__ import annotations

import pytest
import torch
from test_sizes import exact_or_refused, kill, with_constant
from torch import Tensor, nn

from bayeslim.compact import compaction
from bayeslim.compact.guards import Size, insert_guards_, parsed, sizes_of
from bayeslim.compact.paths import path_at, paths_beyond


class Positions(nn.Module):
    """A network whose first two units of a layer can be made constant."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.places = nn.Parameter(torch.randn(40, 4))


class Chunks(Positions):
    """Sequences beyond the table of positions are cut into windows of twenty."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 40:
            return self.b(self.a(x.view(x.shape[0], -1, 20, 4)).sigmoid().sum(2))
        return self.b(self.a(x + self.places[: x.shape[1]]).relu())


class OneStep(Positions):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu()
        return self.b(hidden.sigmoid() if x.shape[1] == 1 else hidden)


class OtherFeatures(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x[..., :4]).sigmoid() if x.shape[-1] == 8 else self.a(x).relu())


class OtherNumber(Positions):
    """The same operations with another number in long sequences."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu() * (2 if x.shape[1] > 9 else 1))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (Chunks, [(5, 4), (1, 4), (40, 4), (60, 4), (100, 4)]),  # 41 to 59 steps fail
        (OneStep, [(5, 4), (1, 4)]),
        (OtherFeatures, [(5, 4), (5, 8)]),  # any other number of features fails
        (OtherNumber, [(5, 4), (9, 4), (10, 4)]),
    ],
)
def test_constants_are_not_folded_if_another_path_has_others(kind, sizes):
    torch.manual_seed(0)
    network = kind()
    with_constant(network, network.a)
    result = compaction(network, None, torch.randn(2, 5, 4))
    assert not result.removed
    for size in sizes:
        assert exact_or_refused(network, result.network, torch.randn(2, *size)) == "exact"


class Averages(Positions):
    """Long sequences read the units of a layer without its weights."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).sigmoid()
        return hidden.mean(-1, keepdim=True) if x.shape[1] > 8 else self.b(hidden)


class AveragesOfOneStep(Averages):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).sigmoid()
        return hidden.mean(-1, keepdim=True) if x.shape[1] == 1 and x.shape[0] > 10 else self.b(hidden)


@pytest.mark.parametrize(
    ("kind", "exact", "refused"),
    [(Averages, [(2, 8), (3, 1)], (2, 9)), (AveragesOfOneStep, [(2, 5), (11, 5)], (11, 1))],
)
def test_units_that_only_another_path_reads_are_refused_there(kind, exact, refused):
    torch.manual_seed(0)
    network = kind().eval()
    with torch.no_grad():
        network.b.weight[:, [1, 5]] = 0
    result = compaction(network, None, torch.randn(2, 5, 4))
    assert (result.kind, len(result.removed)) == ("graph", 2)
    assert "branches otherwise" in result.why
    for size in exact:
        assert exact_or_refused(network, result.network, torch.randn(*size, 4)) == "exact"
    assert exact_or_refused(network, result.network, torch.randn(*refused, 4)) == "refused"


class SigmoidOfOneStep(Positions):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu()
        return self.b(hidden.sigmoid() if x.shape[1] == 1 and x.shape[0] > 10 else hidden)


def test_constants_that_change_at_one_step_of_many_rows_are_not_folded():
    torch.manual_seed(0)
    network = SigmoidOfOneStep()
    with_constant(network, network.a)
    result = compaction(network, None, torch.randn(2, 5, 4))
    for size in ((2, 5), (2, 1), (11, 5), (11, 1)):
        assert exact_or_refused(network, result.network, torch.randn(*size, 4)) == "exact"


class OneRow(Positions):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu().view(-1, x.shape[1], 8)
        return self.b(hidden * 2 if x.shape[0] == 1 else hidden)


class OneStepOfManyRows(Positions):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu().view(-1, x.shape[1], 8)
        return self.b(hidden * 2 if x.shape[1] == 1 and x.shape[0] > 10 else hidden)


@pytest.mark.parametrize(
    ("kind", "exact", "refused"),
    [(OneRow, [(2, 1), (11, 1)], [(1, 1), (1, 5)]), (OneStepOfManyRows, [(1, 5), (11, 5)], [(11, 1)])],
)
def test_graphs_refuse_a_size_of_one_that_takes_another_path(kind, exact, refused):
    torch.manual_seed(0)
    network = kind().eval()
    kill(network, "a", 1, 5)
    result = compaction(network, None, torch.randn(2, 5, 4))
    assert (result.kind, len(result.removed)) == ("graph", 2)
    for size in exact:
        assert exact_or_refused(network, result.network, torch.randn(*size, 4)) == "exact"
    for size in refused:
        assert exact_or_refused(network, result.network, torch.randn(*size, 4)) == "refused"


class Gap(Positions):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] <= 40:
            return self.b(self.a(x + self.places[: x.shape[1]]).relu())
        if x.shape[1] < 60:
            raise RuntimeError("too long, and too short for another path")
        return self.b(self.a(x))


def test_paths_cover_every_size():
    torch.manual_seed(0)
    network, x = Gap().eval(), torch.randn(2, 5, 4)
    usual = path_at(network, x)
    assert usual is not None
    paths = [usual, *(path for _, path in paths_beyond(network, [usual.guards], x))]
    for steps in (1, 2, 40, 41, 59, 60, 61, 400):
        for features in (1, 3, 4, 8):
            inputs = torch.randn(3, steps, features)
            taken = [path for path in paths if all(guard.holds(sizes_of([inputs])) for guard in path.guards)]
            assert taken, (steps, features)
            fails = False
            try:
                network(inputs)
            except RuntimeError:
                fails = True
            assert {path.fails for path in taken} == {fails}, (steps, features)


def test_a_branch_on_values_is_no_known_path():
    class Data(Positions):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > 0 else self.a(-x)

    assert path_at(Data().eval(), torch.randn(2, 5, 4)) is None


def test_a_graph_refuses_a_remainder_by_zero():
    graph = torch.fx.symbolic_trace(nn.Identity())
    insert_guards_(graph, [parsed("rows % (steps // 2) == 0", {"rows": Size(0, 0), "steps": Size(0, 1)})])
    assert graph(torch.zeros(4, 5)).shape == (4, 5)
    for shape in ((3, 5), (4, 1)):
        with pytest.raises(AssertionError, match="make it again with an example"):
            graph(torch.zeros(shape))
