"""Peak memory, counted by hand."""

from __future__ import annotations

import torch
from torch import nn

from bayeslim.export.memory import peak_bytes


def test_two_activations_are_alive_at_a_time():
    network = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Flatten(), nn.Linear(200, 300), nn.ReLU())
    weights = 4 * (100 * 200 + 200 + 200 * 300 + 300)
    assert peak_bytes(network, torch.randn(50, 100)) == weights + 50 * 4 * (300 + 300)


def test_views_work_in_place_and_tied_weights_take_nothing():
    network = nn.Sequential(nn.Linear(10, 10), nn.ReLU(inplace=True), nn.Unflatten(1, (2, 5)), nn.Flatten())
    network.append(network[0])
    assert peak_bytes(network, torch.randn(4, 10)) == 4 * 110 + 4 * 4 * 20


def test_a_residual_keeps_its_input():
    class Residual(nn.Module):
        def forward(self, x):
            y = x * 2
            return y + (y * 3) * 4

    # y, y · 3 and (y · 3) · 4 at once, then the sum beside y and the product
    assert peak_bytes(Residual(), torch.zeros(8)) == 3 * 32
