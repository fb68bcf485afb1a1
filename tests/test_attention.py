"""Attention by explicit products is torch's own attention, in the calling thread alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bayeslim.attention import ExplicitAttention


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.eye(5, dtype=torch.bool) | torch.ones(5, 5, dtype=torch.bool).tril()},
        {"attn_mask": torch.linspace(-1, 1, 25, dtype=torch.float64).view(5, 5)},
    ],
    ids=["plain", "causal", "scaled", "masked", "biased"],
)
def test_attention_is_the_same(options):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    with ExplicitAttention():
        found = F.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(query, key, value, **options))


@pytest.mark.parametrize("examples_first", [True, False])
def test_transformer_layers_are_the_same_and_differentiable_twice(examples_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=examples_first).double().eval()
    x = torch.randn(3, 3, 4, dtype=torch.float64, requires_grad=True)
    with ExplicitAttention():
        found = layer(x)
        (slope,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
        assert torch.autograd.grad(slope.sum(), x)[0].abs().sum() > 0
    torch.testing.assert_close(found, layer(x))
    attention = nn.MultiheadAttention(4, 2, batch_first=examples_first).double().eval()
    for need_weights in (True, False):
        with ExplicitAttention():
            outputs, weights = attention(x, x, x, need_weights=need_weights)
        expected, expected_weights = attention(x, x, x, need_weights=need_weights)
        torch.testing.assert_close(outputs, expected)
        assert (weights is None) == (expected_weights is None)


def test_other_threads_keep_their_attention():
    query = torch.randn(1, 1, 3, 4, requires_grad=True)

    def fused():
        return F.scaled_dot_product_attention(query, query, query).grad_fn.name()

    before = fused()
    with ThreadPoolExecutor(1) as pool, ExplicitAttention():
        assert pool.submit(fused).result() == before
        assert fused() != before
