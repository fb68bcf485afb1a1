"""The default number of examples in a chunk."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.predict import batches as module
from bayeslim.predict.batches import batches_of
from bayeslim.types import to_device


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x.flatten(1))


class Positioned(nn.Module):
    """Has a parameter of its own before its layers."""

    def __init__(self):
        super().__init__()
        self.positions, self.embed, self.norm = nn.Parameter(torch.zeros(100, 4)), nn.Linear(4, 64), nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(self.embed(x + self.positions))


@pytest.mark.parametrize(
    ("layers", "inputs", "sizes"),
    [
        ([nn.Linear(4, 4)], (1_500, 4), [1_500]),
        ([nn.Linear(4, 4)], (20_000, 4), [10_000, 10_000]),
        ([Written()], (2_500, 4), [2_500]),
        ([nn.Flatten(), nn.Linear(1_024, 4)], (3_000, 1, 32, 32), [1_500, 1_500]),
        ([nn.Conv2d(1, 16, 3), nn.Flatten()], (150, 1, 32, 32), [75, 75]),
        ([nn.Conv2d(1, 16, 3, stride=2), nn.Flatten()], (150, 1, 32, 32), [150]),
        ([nn.Conv2d(1, 16, 3), nn.Flatten()], (49, 1, 300, 300), [13, 13, 13, 10]),
        ([nn.Conv1d(1, 4, 4), nn.Flatten()], (20_000, 1, 4), [10_000, 10_000]),
        ([nn.Embedding(9, 64)], (2_000, 100), [286] * 6 + [284]),
        ([nn.Conv2d(1, 16, 3), nn.Flatten()], (128, 1, 32, 32), [128]),  # so little of it
        ([nn.LSTM(4, 64)], (400, 100, 4), [200, 200]),
        ([nn.Linear(4, 64), nn.LayerNorm(64)], (400, 100, 4), [200, 200]),
        ([nn.LayerNorm(64)], (400, 100, 64), [200, 200]),
        ([nn.LayerNorm(4), nn.Linear(4, 64)], (400, 100, 4), [200, 200]),
        ([Positioned()], (400, 100, 4), [200, 200]),
        ([nn.Flatten()], (1_500, 4), [1_500]),
    ],
)
def test_what_layers_give_is_kept_small_on_a_cpu(layers, inputs, sizes):
    batches = batches_of(torch.zeros(inputs), "auto", nn.Sequential(*layers))
    for _ in range(2):
        assert [len(x) for x in batches()] == sizes


def test_all_that_belongs_to_an_example_counts_and_stays_together():
    x, y = torch.arange(900.0).expand(50, 40, 900), torch.arange(50)
    for inputs in ((x, y), {"x": x, "y": y}):
        parts = list(batches_of(inputs, "auto", nn.Sequential(nn.Conv1d(40, 80, 3)))())
        assert len(parts) == 2
        tensors = [part.values() if isinstance(part, dict) else part for part in parts]
        for found, whole in zip(zip(*tensors, strict=True), (x, y), strict=True):
            assert torch.equal(torch.cat(found), whole)


@pytest.mark.parametrize(("most", "moves"), [(2**30, 2), (100, 6)])
def test_batches_of_a_loader_are_moved_once_unless_they_are_many(most, moves, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES_KEPT_ON_DEVICE", most)
    moved = []

    def counted(inputs, device):
        if inputs.device != device:
            moved.append(1)
        return to_device(inputs, device)

    monkeypatch.setattr(module, "to_device", counted)
    loader = bl.data.Loader(torch.rand(10, 4), torch.zeros(10), batch_size=5)
    batches = batches_of(loader, "auto", nn.Linear(4, 2, device="meta"))
    assert not moved or most == 2**30
    for _ in range(3):
        assert [x.device.type for x in batches()] == ["meta", "meta"]
    assert len(moved) == moves
