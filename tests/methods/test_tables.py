"""Bags of words: tables of all networks are read at once, and say what each says alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.methods import tables
from bayeslim.methods.braid import at_once
from bayeslim.methods.tables import Table
from bayeslim.unrolled import unrolled
from oracles import checked_ensemble

WORDS = 30


class Bag(nn.Module):
    """Words to one row, and that to outputs."""

    def __init__(self, joined, *layers, **table):
        super().__init__()
        self.table, self.joined = nn.Embedding(WORDS, 8, **table), joined
        self.rest = nn.Sequential(*layers, nn.Linear(8, 3))

    def forward(self, x):
        return self.rest(self.joined(self.table(x)))


def bags(mode, **table):
    return nn.Sequential(nn.EmbeddingBag(WORDS, 8, mode=mode, **table), nn.ReLU(), nn.Linear(8, 3))


AT_ONCE = [
    lambda: Bag(lambda rows: rows.mean(1)),
    lambda: Bag(lambda rows: rows.mean(dim=-2), nn.ReLU()),
    lambda: Bag(lambda rows: torch.mean(rows, 1), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()),
    lambda: Bag(lambda rows: rows.sum(1)),
    lambda: Bag(lambda rows: torch.amax(rows, dim=1)),
    lambda: Bag(lambda rows: rows.mean(1), padding_idx=0),
    lambda: bags("mean"),
    lambda: bags("sum"),
    lambda: bags("max"),
]
ONE_BY_ONE = [
    lambda: Bag(lambda rows: rows.mean(0, keepdim=True).mean(1)),
    lambda: Bag(lambda rows: rows.mean(1, True).squeeze(1)),
    lambda: Bag(lambda rows: rows.mean(1), max_norm=1.0),
    lambda: Bag(lambda rows: rows[:, -1]),
    lambda: Bag(lambda rows: rows.logsumexp(1)),
    lambda: bags("mean", padding_idx=2),
    lambda: bags("sum", max_norm=1.0),
    lambda: nn.Sequential(nn.Embedding(WORDS, 8), nn.Flatten(), nn.Linear(40, 3)),
    lambda: nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 3)),
]


def words(examples, dtype=torch.int64):
    return torch.randint(0, WORDS, (examples, 5), generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.fixture(params=[False, True], ids=["read", "beside"])
def way(request, monkeypatch):
    """Rows are read, or joined as they are."""
    monkeypatch.setattr(tables, "READ", 0 if request.param else 2**40)
    return request.param


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("examples", [1, 3, 60])
@pytest.mark.parametrize("make", AT_ONCE)
def test_all_networks_say_what_each_says_alone(make, examples, dtype, way):
    torch.manual_seed(0)
    x = words(examples, dtype)
    bnn, check = checked_ensemble(make(), x)
    for _ in range(2):  # as found, and as kept
        check()
    assert at_once(unrolled(bnn.model, x), bnn.posterior_.values) is not None


@pytest.mark.parametrize("make", ONE_BY_ONE)
def test_what_is_none_of_these_goes_one_by_one(make, way):
    torch.manual_seed(0)
    x = words(12)
    bnn, check = checked_ensemble(make(), x)
    check()
    assert at_once(unrolled(bnn.model, x), bnn.posterior_.values) is None


@torch.no_grad()
def test_tables_that_change_in_place_are_seen(way):
    bnn, check = ensemble()
    check()
    bnn.posterior_.values["table.weight"].mul_(3.0)
    check()


def test_tables_are_copied_once(monkeypatch):
    monkeypatch.setattr(tables, "READ", 0)
    table = Table(torch.randn(3, WORDS, 4), "mean")
    table(words(2))
    first = table.beside
    table(words(9))
    assert table.beside is first is not None


def test_tables_too_large_to_be_copied_are_read(monkeypatch):
    monkeypatch.setattr(tables, "READ", 0)
    monkeypatch.setattr(tables, "COPIED", 3 * WORDS * 4 - 1)
    table = Table(torch.randn(3, WORDS, 4), "sum")
    torch.testing.assert_close(table(words(2)), table.values[:, words(2)].sum(2))
    assert table.beside is None


@pytest.mark.parametrize("few", [0, 2**14])
def test_much_of_tables_too_large_to_be_copied_is_read_one_by_one(few, monkeypatch):
    monkeypatch.setattr(tables, "COPIED", 1)
    monkeypatch.setattr(tables, "FEW", few)
    read = []
    monkeypatch.setattr(tables.Table, "__call__", lambda self, x: read.append(x) or self.values[:, x].mean(2))
    _, check = ensemble()
    check()
    assert bool(read) == (few > 0)


@pytest.mark.parametrize("wrong", [WORDS, -1])
def test_words_that_are_not_in_the_table_are_told(wrong, way):
    x = words(4)
    bnn, check = ensemble()
    check()
    x[2, 1] = wrong
    with pytest.raises((IndexError, RuntimeError), match=str(wrong)):
        bl.predict(bnn, x)


def test_some_networks_of_all(way):
    _, check = ensemble()
    check(3)
    check()


def test_hooks_are_called_for_every_network(way):
    bnn, check = ensemble()
    seen = []
    bnn.model.table.register_forward_hook(lambda module, args, rows: seen.append(rows))
    check()
    assert len(seen) >= 4


def ensemble():
    """Of bags of words, and a check of it."""
    torch.manual_seed(0)
    return checked_ensemble(Bag(lambda rows: rows.mean(1)), words(4))
