"""Recurrent layers without their modules: the same outputs and states."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from bayeslim import recurrent as module
from bayeslim.fused import fused

CASES = [
    {}, {"num_layers": 2}, {"bidirectional": True, "num_layers": 3}, {"batch_first": True}, {"bias": False},
    {"batch_first": True, "bidirectional": True, "bias": False, "num_layers": 2, "dropout": 0.5},
]  # fmt: skip


def compare(layer, *inputs):
    with torch.no_grad():
        expected = layer(*inputs)
        with fused(layer):
            assert "forward" in vars(layer)
            found = layer(*inputs)
    flat = [found[0], *(found[1] if isinstance(found[1], tuple) else [found[1]])]
    other = [expected[0], *(expected[1] if isinstance(expected[1], tuple) else [expected[1]])]
    for one, two in zip(flat, other, strict=True):
        torch.testing.assert_close(getattr(one, "data", one), getattr(two, "data", two), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("many", [0, 2**40])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_layers_give_the_same(kind, options, many, monkeypatch):
    monkeypatch.setattr(module, "MANY", many)
    layer = kind(3, 5, **options).eval()
    compare(layer, torch.randn(4, 6, 3))
    compare(layer.double(), torch.randn(4, 6, 3, dtype=torch.float64))


def test_other_inputs_go_to_the_module():
    layer = nn.LSTM(3, 5).eval()
    compare(layer, torch.randn(4, 3))
    compare(layer, torch.randn(4, 2, 3), (torch.randn(1, 2, 5), torch.randn(1, 2, 5)))
    compare(layer, pack_sequence([torch.randn(4, 3), torch.randn(2, 3)]))
    with pytest.raises(RuntimeError, match="Expected 3, got 4"), fused(layer):
        layer(torch.randn(4, 2, 4))


@pytest.mark.parametrize("layer", [nn.LSTM(3, 5, proj_size=2), nn.RNN(3, 5), nn.LSTM(3, 5).train(), nn.GRUCell(3, 5)])
def test_layers_that_are_not_known_are_called_as_they_are(layer):
    layer.training = layer.training and isinstance(layer, nn.LSTM) and not layer.proj_size
    with fused(layer):
        assert "forward" not in vars(layer)


def test_a_weight_that_is_no_parameter_is_read_by_the_module():
    layer = nn.LSTM(3, 5).eval()
    weight = layer.weight_hh_l0.detach()
    del layer.weight_hh_l0
    layer.weight_hh_l0 = weight
    with fused(layer):
        assert "forward" not in vars(layer)
