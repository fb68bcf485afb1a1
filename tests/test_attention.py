"""Attention of short sequences as two products: the same as torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bayeslim as bl
from bayeslim import attention as module
from bayeslim import twins
from bayeslim.attention import attended
from bayeslim.graphs import Attention
from oracles import checked_ensemble


def heads(examples, count, positions, size, dtype=torch.float32):
    return torch.randn(examples, positions, count, size, dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize(
    ("examples", "count", "positions", "others", "quicker"),
    [(20, 4, 7, 7, True), (20, 4, 7, 11, True), (3, 4, 7, 7, False), (20, 4, 40, 7, False), (20, 4, 7, 40, False)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_ways_give_the_same(examples, count, positions, others, quicker, dtype, monkeypatch):
    monkeypatch.setattr(module, "IS_ARM", False)
    query, key, value = (
        heads(examples, count, positions, 8, dtype),
        *(heads(examples, count, others, size, dtype) for size in (8, 5)),
    )
    assert module._is_quicker(query, key, value) == quicker
    torch.testing.assert_close(attended(query, key, value), F.scaled_dot_product_attention(query, key, value))


def test_other_tensors_are_for_torch(monkeypatch):
    monkeypatch.setattr(module, "IS_ARM", False)
    query = heads(20, 4, 7, 8)
    for others in ((query[0], query[0], query[0]), (query, query[:1], query[:1]), (query.half(),) * 3):
        assert not module._is_quicker(*others)
    monkeypatch.setattr(module, "IS_ARM", True)
    assert not module._is_quicker(query, query, query)


class Attentive(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layer, self.options = nn.Linear(4, 12), options

    def forward(self, x):
        q, k, v = self.layer(x).unsqueeze(1).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, **self.options).squeeze(1).mean(1)


def test_particles_say_what_each_says_alone(monkeypatch):
    monkeypatch.setattr(module, "IS_ARM", False)
    torch.manual_seed(0)
    for model, shape, found in (
        (bl.zoo.transformer(width=16, heads=2, hidden=8), (40, 1, 28, 28), 2),
        (Attentive(), (80, 5, 4), 1),
        (Attentive(is_causal=True), (80, 5, 4), 0),
        (Attentive(scale=2.0), (80, 5, 4), 0),
    ):
        bnn, check = checked_ensemble(model, torch.randn(shape))
        check()
        check()
        kept = twins._kept[bnn.posterior_].modules[0]
        assert sum(isinstance(part, Attention) for part in kept.modules()) == found
