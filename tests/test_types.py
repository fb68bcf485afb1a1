"""Batches, inputs and outputs of every accepted shape, and clear errors for the rest."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from bayeslim.errors import ShapeMismatch, UnsupportedModel
from bayeslim.types import TARGET_KEYS, arguments, as_tensor, batch_size, call, device_of, split_batch, to_device

X, X2, Y = torch.randn(4, 3), torch.randn(4, 3), torch.arange(4)


@pytest.mark.parametrize("kind", [tuple, list])
def test_split_sequences(kind):
    assert split_batch(kind((X, Y))) == (X, Y)
    inputs, targets = split_batch(kind((X, X2, Y)))
    assert inputs == (X, X2)
    assert targets is Y
    inputs, _ = split_batch(kind(((X, X2), Y)))
    assert inputs == (X, X2)


@pytest.mark.parametrize("key", TARGET_KEYS)
@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_split_mappings(kind, key):
    inputs, targets = split_batch(kind({"pixels": X, key: Y}))
    assert inputs == {"pixels": X}
    assert targets is Y


@pytest.mark.parametrize("bad", [X, (X,), [], None, 3])
def test_split_refuses_what_has_no_targets(bad):
    with pytest.raises(ShapeMismatch, match="inputs, targets"):
        split_batch(bad)
    with pytest.raises(ShapeMismatch, match="pixels"):
        split_batch({"pixels": X})


class Add(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, a, b=None):
        return self.scale * (a if b is None else a + b)


def test_call_takes_tensors_tuples_and_dicts():
    model = Add()
    assert torch.equal(call(model, X), X)
    assert torch.equal(call(model, (X, X2)), X + X2)
    assert torch.equal(call(model, [X, X2]), X + X2)
    assert torch.equal(call(model, {"a": X, "b": X2}), X + X2)
    assert torch.equal(call(model, {"a": X}, {"scale": torch.tensor(3.0)}), 3 * X)
    assert float(model.scale.detach()) == 1


def test_call_passes_packed_sequences_whole():
    packed = pack_sequence([torch.randn(3, 2), torch.randn(2, 2)])
    assert arguments(packed) == ((packed,), {})
    assert batch_size(packed) == 2
    assert batch_size((packed, X)) == 2


def test_call_keeps_tied_weights_tied():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    weight = torch.randn(3, 3)
    assert torch.allclose(call(model, X, {"0.weight": weight}), X @ weight.T @ weight.T)


def test_as_tensor_finds_logits():
    model = nn.Identity()
    assert as_tensor(X, model) is X
    assert as_tensor({"logits": X, "loss": Y}, model) is X
    assert as_tensor(SimpleNamespace(logits=X), model) is X
    for bad in ((X, X2), {"hidden": X}, None):
        with pytest.raises(UnsupportedModel, match="must return a tensor"):
            as_tensor(bad, model)


def test_to_device_reaches_everything():
    packed = pack_sequence([torch.randn(3, 2), torch.randn(2, 2)])
    moved = to_device({"a": X, "b": (X2, [Y]), "n": 3, "p": packed}, "meta")
    assert moved["a"].is_meta
    assert moved["b"][0].is_meta
    assert moved["b"][1][0].is_meta
    assert moved["n"] == 3
    assert moved["p"].data.is_meta
    assert type(moved["p"]) is type(packed)
    assert to_device(X, None) is X


def test_batch_size():
    assert batch_size(X) == 4
    assert batch_size((3, X)) == 4
    assert batch_size({"scale": torch.tensor(1.0), "x": X}) == 4
    with pytest.raises(ShapeMismatch, match="batch dimension"):
        batch_size({"scale": torch.tensor(1.0)})


def test_device_of():
    assert device_of(nn.Linear(2, 2, device="meta")).type == "meta"
    assert device_of(nn.ReLU()).type == "cpu"
