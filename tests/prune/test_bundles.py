"""Cuts of units to uniform and rounded widths."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim import likelihoods
from bayeslim.errors import BayeslimError


def _network(widths=(24, 24, 20), outputs=3) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = [5, *widths]
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


@pytest.fixture(scope="module")
def bnn() -> bl.Bayesian:
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(1))
    found = bl.bayesianize(_network(), bl.Laplace("diag"), likelihood=likelihoods.Categorical())
    found.fit([(x, x[:, :3].argmax(1))], progress=False)
    return found


def _widths(bnn: bl.Bayesian, budget: bl.Budget, **options) -> list[int]:
    x = torch.randn(4, 5)
    pruned = bl.prune(bnn, budget, granularity="unit", example=x, progress=False, **options)
    return [m.out_features for m in bl.compact(pruned, x) if isinstance(m, nn.Linear)][:-1]


def test_uniform_cuts_leave_layers_of_one_width_alike(bnn):
    free = _widths(bnn, bl.Budget(sparsity=0.5))
    assert free[0] != free[1]  # otherwise the next line shows nothing
    uniform = _widths(bnn, bl.Budget(sparsity=0.5, uniform=True))
    assert uniform[0] == uniform[1] < 24


@pytest.mark.parametrize("steps", [1, 3])
def test_round_to_keeps_multiples(bnn, steps):
    widths = _widths(bnn, bl.Budget(sparsity=0.5, round_to=8), steps=steps)
    assert all(width % 8 == 0 or width == 20 for width in widths)
    assert min(widths) >= 8
    assert sum(widths) < 68


def test_both_cut_the_worst_units_of_every_layer(bnn):
    x = torch.randn(4, 5)
    budget = bl.Budget(sparsity=0.4, uniform=True, round_to=4)
    plan = bl.plan(bnn, budget, granularity="unit", example=x, criterion="magnitude")
    for name in ("0.weight", "2.weight"):
        stays = plan.masks[name].any(1)
        assert int(stays.sum()) % 4 == 0
    from_scores = bl.plan(bnn, bl.Budget(sparsity=0.9), granularity="unit", example=x, criterion="magnitude")
    for name in ("0.weight", "2.weight"):  # a deeper cut by the same scores keeps a part of the same units
        assert bool((plan.masks[name].any(1) | ~from_scores.masks[name].any(1)).all())


def test_an_uneven_start_is_completed(bnn):
    x = torch.randn(4, 5)
    start = bl.plan(bnn, bl.Budget(sparsity=0.2), granularity="unit", example=x)
    plan = start.tighten(bnn, bl.Budget(sparsity=0.6, uniform=True), example=x)
    first, second = (int(plan.masks[name].any(1).sum()) for name in ("0.weight", "2.weight"))
    assert first == second
    assert all(bool((start.masks[name] | ~mask).all()) for name, mask in plan.masks.items() if name in start.masks)


class _Attention(nn.Module):
    """Two layers of attention, four heads of four channels; the first adds a number for each head to its scores."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.ModuleList(nn.Linear(16, 16) for _ in range(4)) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(4, 3, 3))

    def forward(self, x):
        for layers, bias in ((self.first, self.bias), (self.second, None)):
            q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in layers[:3])
            scores = q @ k.transpose(2, 3)
            weights = (scores if bias is None else scores + bias).softmax(-1)
            x = x + layers[3]((weights @ v).transpose(1, 2).flatten(2))
        return x


def test_a_table_with_one_number_a_head_does_not_count_as_a_layer():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16)
    network = bl.bayesianize(_Attention(), bl.Variational(), likelihood=likelihoods.Categorical(class_dim=-1))
    budget = bl.Budget(sparsity=0.2, uniform=True, round_to=4)
    masks = bl.plan(network, budget, granularity="unit", example=x).masks
    assert [int(masks[f"{layers}.0.weight"].any(1).sum()) for layers in ("first", "second")] == [12, 12]


def test_options_that_do_not_fit_are_refused(bnn):
    x = torch.randn(4, 5)
    with pytest.raises(ValueError, match="round_to must be"):
        bl.Budget(sparsity=0.5, round_to=0)
    with pytest.raises(ValueError, match="threshold"):
        bl.Budget(threshold=1.0, uniform=True)
    with pytest.raises(ValueError, match='granularity="unit"'):
        bl.plan(bnn, bl.Budget(sparsity=0.5, uniform=True))
    with pytest.raises(BayeslimError, match="Lower round_to"):
        bl.plan(bnn, bl.Budget(sparsity=0.5, round_to=64), granularity="unit", example=x)
