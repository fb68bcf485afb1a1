"""Cuts in steps, with the curvature measured anew, on every architecture of the zoo; weak and strong priors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import bayeslim as bl

INPUTS = {
    "lenet5": lambda: torch.randn(12, 1, 16, 16),
    "lenet_300_100": lambda: torch.randn(48, 32),
    "mlp": lambda: torch.randn(48, 12),
    "lstm": lambda: torch.randn(24, 6, 8),
    "transformer": lambda: torch.randn(24, 6, 8),
    "resnet18": lambda: torch.randn(8, 3, 8, 8),
    "vgg": lambda: torch.randn(6, 3, 32, 32),
}
ARGUMENTS = {
    "lenet5": {"image_size": 16},
    "lenet_300_100": {"inputs": 32},
    "mlp": {"hidden": 16, "inputs": 12},
    "lstm": {"features": 8, "hidden": 12},
    "transformer": {"features": 8, "length": 6, "width": 16, "heads": 2, "depth": 2, "hidden": 24},
    "resnet18": {"width": 1},
    "vgg": {"width": 0.0625},
}


def fitted(name: str, std: float = 1.0, **laplace):
    """A network with a little training behind it, its posterior and its data."""
    torch.manual_seed(0)
    network = bl.zoo.create(name, classes=4, **ARGUMENTS[name])
    x = INPUTS[name]()
    y = torch.randint(0, 4, (len(x),))
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(100 if name == "mlp" else 5):  # far from an optimum, gradients move the loss more than the cut does
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
    loader = [(x, y)]
    bnn = bl.bayesianize(
        network.eval(), bl.Laplace(**laplace), likelihood=bl.likelihoods.Categorical(), prior=bl.priors.Normal(std)
    )
    bnn.fit(loader, progress=False)
    return bnn, loader


def loss(bnn, loader) -> float:
    ((x, y),) = loader
    with torch.no_grad():
        return float(F.cross_entropy(bnn.mean_network().eval()(x), y))


@pytest.mark.parametrize("name", bl.zoo.names())
def test_steps_with_refreshed_curvature(name):
    bnn, loader = fitted(name)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.6), steps=3, refresh=loader, progress=False)
    assert pruned.plan_.sparsity == pytest.approx(0.6, abs=0.01)
    assert math.isfinite(loss(pruned, loader))
    assert all(solve.converged for solve in pruned.plan_.solves.values())
    for part in pruned.plan_.parameters:
        if len(part.shape) > 1:
            assert part.kept >= 0.25**3 * 0.4 * part.size - 1
    zeros = bnn.mean_network().eval()
    with torch.no_grad():
        for part, mask in pruned.plan_.masks.items():
            zeros.get_parameter(part).mul_(mask)
        naive = float(F.cross_entropy(zeros(loader[0][0]), loader[0][1]))
    assert loss(pruned, loader) <= naive + 1e-3


@pytest.mark.parametrize(
    ("name", "std"),
    [("mlp", 0.03), ("transformer", 0.3), ("lstm", 1.0), ("resnet18", 10.0), ("transformer", 10.0), ("lstm", 0.03)],
)
def test_priors_from_strong_to_weak(name, std):
    bnn, loader = fitted(name, std)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5), progress=False)
    assert math.isfinite(loss(pruned, loader))
    for solve in pruned.plan_.solves.values():
        assert solve.converged
        assert solve.residual < 1e-3
    again = type(pruned.plan_).from_json(pruned.plan_.to_json())
    assert again == pruned.plan_
    assert again.solves == pruned.plan_.solves
    if pruned.plan_.solves:
        assert "residual" in repr(pruned.plan_)


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_more_inputs_than_data(scope):
    """Eight examples leave every factor rank-deficient."""
    bnn, loader = fitted("resnet18", std=10.0)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.8, scope=scope), steps=2, refresh=loader, progress=False)
    assert math.isfinite(loss(pruned, loader))
