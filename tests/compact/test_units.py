"""Units: what goes together, what stays and why."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import CASES, prepared
from torch import nn

from bayeslim.compact import Slice, units
from bayeslim.compact.labels import Labels, settle, varying
from bayeslim.errors import ShapeMismatch, UnsupportedModel


def test_a_channel_with_its_norm():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    found = units(model, torch.zeros(2, 1, 4, 4))
    assert [(unit.layer, unit.kind) for unit in found.units] == [("0", "channel")] * 3
    assert found.units[1].incoming == tuple(
        Slice(name, 0, (1,)) for name in ("0.weight", "0.bias", "1.weight", "1.bias")
    )
    assert found.units[1].outgoing == (Slice("4.weight", 1, (4, 5, 6, 7)),)
    masks = found.masks([1])
    assert not masks["0.weight"][1].any()
    assert not masks["4.weight"][:, 4:8].any()
    assert sum(int((~mask).sum()) for mask in masks.values()) == 9 + 1 + 2 + 8


def test_heads_take_query_key_and_value_along():
    (_, _), found = prepared("vit_fused")
    heads = [unit for unit in found.units if unit.kind == "head"]
    assert len(heads) == 4
    rows = next(part for part in heads[1].incoming if part.parameter == "blocks.0.attention.qkv.weight")
    assert rows.indices == tuple(16 * part + 4 + d for part in range(3) for d in range(4))
    assert heads[1].outgoing == (Slice("blocks.0.attention.proj.weight", 1, (4, 5, 6, 7)),)


def test_grouped_queries_go_with_their_keys():
    (_, _), found = prepared("language_gqa_glu")
    head = next(unit for unit in found.units if unit.kind == "head")
    sizes = {part.parameter.split(".")[-2]: len(part.indices) for part in head.incoming}
    assert sizes == {"q": 8, "k": 4, "v": 4}


def test_recurrent_units_are_rows_of_every_gate():
    (_, _), found = prepared("lstm_bidirectional")
    unit = next(unit for unit in found.units if unit.kind == "recurrent unit")
    assert Slice("rnn.weight_ih_l1_reverse", 0, (0, 8, 16, 24)) in unit.incoming
    assert Slice("rnn.weight_ih_l1", 1, (0, 8)) in unit.outgoing
    assert Slice("out.weight", 1, (0, 8)) in unit.outgoing


def test_tied_weights_are_produced_and_read():
    (_, _), found = prepared("tied_embeddings")
    unit = found.units[0]
    assert Slice("embed.weight", 1, (0,)) in unit.incoming
    assert Slice("embed.weight", 1, (0,)) in unit.outgoing


@pytest.mark.parametrize("name", CASES)
def test_units_do_not_overlap_and_cover_what_is_not_frozen(name):
    _, found = prepared(name)
    taken: set[tuple[str, int, int]] = set()
    for unit in found.units:
        rows = {(part.parameter, part.dim, index) for part in unit.incoming for index in part.indices}
        assert rows
        assert not rows & taken
        taken |= rows
    assert all(entry.reason for entry in found.frozen)


class Odd(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), norm, nn.Linear(6, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


class Fourier(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x).real


class SelfNormalising(nn.Module):
    def forward(self, x):
        return x / x.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (nn.LayerNorm(6), "LayerNorm"),
        (nn.GroupNorm(1, 6), "GroupNorm"),
        (nn.Softmax(-1), "only channel"),
        (Fourier(), "fft_fft is not understood"),
        (SelfNormalising(), "only channel"),
    ],
)
def test_what_mixes_channels_freezes_them_with_a_reason(norm, reason):
    found = units(Odd(norm), torch.randn(3, 4))
    assert not found.units
    assert any(entry.parameter == "first.weight" and reason in entry.reason for entry in found.frozen)
    assert reason in repr(found)


def test_a_group_norm_with_a_group_for_each_channel_is_no_obstacle():
    assert len(units(Odd(nn.GroupNorm(6, 6)), torch.randn(3, 4)).units) == 6


def test_an_example_of_the_wrong_shape():
    with pytest.raises(ShapeMismatch, match=r"Odd does not run on the example \(shapes \[\(3, 5\)\]\)"):
        units(Odd(nn.Identity()), torch.randn(3, 5))


class Branching(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


def test_a_network_that_cannot_be_traced():
    with pytest.raises(UnsupportedModel, match=r"torch.export cannot trace Sequential.*control flow"):
        units(nn.Sequential(nn.Linear(4, 4), Branching()), torch.randn(3, 4))


# the union-find forest, against following every tie by hand


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=20), st.sets(st.integers(0, 11), max_size=3)
)
def test_labels_against_sets(ties, frozen):
    labels = Labels()
    ids = labels.mint(12)
    fixed = labels.fixed("fixed", (1,))
    classes = [{i} for i in range(12)]
    for a, b in ties:
        labels.tie(ids[a : a + 1], ids[b : b + 1])
        joined = classes[a] | classes[b]
        for i in joined:
            classes[i] = joined
    for i in frozen:
        labels.tie(fixed, ids[i : i + 1])
    found = labels.find(ids).tolist()
    for a, b in itertools.combinations(range(12), 2):
        assert (found[a] == found[b]) == (b in classes[a])
    stay = {i for i in range(12) if found[i] in labels.frozen()}
    assert stay == {i for i in range(12) if classes[i] & frozen}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 100))
def test_settled_labels_are_the_same_and_know_where_they_vary(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    narrow = [size if torch.rand((), generator=generator) < 0.5 else 1 for size in shape]
    labels = torch.randint(3, narrow, generator=generator).expand(shape).contiguous()
    settled = settle(labels)
    assert torch.equal(settled, labels)
    assert varying(settled) == [d for d in range(len(shape)) if not bool((labels == labels.narrow(d, 0, 1)).all())]


def test_each_group_of_a_group_norm_is_a_unit():
    found = units(Odd(nn.GroupNorm(2, 6)), torch.randn(3, 4))
    assert [unit.incoming[0].indices for unit in found.units] == [(0, 1, 2), (3, 4, 5)]
