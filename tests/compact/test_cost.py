from __future__ import annotations

import pytest
import torch
from networks import prepared
from torch import nn

from bayeslim.compact import compaction, cost
from bayeslim.errors import ShapeMismatch


def test_against_counting_by_hand():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 5))
    with torch.no_grad():
        model[2].weight[1:] = 0
    found = cost(model, torch.randn(2, 3, 4, 4))
    assert found.parameters == 3 * 8 * 9 + 8 + 128 * 5 + 5
    assert found.nonzeros == found.parameters - 4 * 128
    assert found.flops == 2 * 2 * (16 * 8 * 27 + 5 * 128)
    assert found.bytes < 4 * found.parameters


def test_recurrent_layers_and_attention_count():
    lstm, time, batch = nn.LSTM(6, 8), 4, 3
    assert cost(lstm, torch.randn(time, batch, 6)).flops == 2 * time * batch * 32 * (6 + 8)
    attention = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    tokens = 2 * 5
    linear = 2 * tokens * (16 * 48 + 16 * 16 + 2 * 16 * 24)
    assert cost(attention, torch.randn(2, 5, 16)).flops == linear + 2 * 2 * (2 * 5 * 5 * 16)


def test_tied_weights_count_once():
    (model, example), _ = prepared("tied_embeddings")
    found = cost(model, example)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.bytes == 8 * found.parameters


def test_compaction_costs_less():
    (model, example), graph = prepared("vgg_bn")
    slim = compaction(model, graph.masks(range(0, len(graph.units), 2)), example, units=graph).network
    before, after = cost(model, example), cost(slim, example)
    assert after.parameters < before.parameters / 3
    assert after.flops < before.flops / 3
    assert after.bytes < before.bytes / 3


def test_an_example_of_the_wrong_shape():
    with pytest.raises(ShapeMismatch):
        cost(nn.Linear(4, 2), torch.randn(3, 5))
