"""On real data, without retraining: ten cuts with refreshed curvature beat one, moved survivors beat plain zeros."""

import pytest
import torch
import torch.nn.functional as F

import bayeslim as bl
from bayeslim.prune import Plan
from bayeslim.prune.search import validation_error


@pytest.fixture(scope="module")
def digits():
    data = bl.data.load("digits")
    return [(data.train_x, data.train_y)], [(data.test_x, data.test_y)]


def trained(digits, seed, hidden=32):
    ((x, y),) = digits[0]
    torch.manual_seed(seed)
    net = bl.zoo.mlp(hidden, inputs=64)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3, weight_decay=1e-4)
    for _ in range(25):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    bnn = bl.bayesianize(net, bl.Laplace(curvature="exact"), likelihood=bl.likelihoods.Categorical(), num_data=len(x))
    bnn.fit(digits[0], progress=False)
    return bnn


@pytest.fixture(scope="module")
def networks(digits):
    return [trained(digits, seed) for seed in range(2)]


def error(bnn, digits):
    return validation_error(bnn, digits[1])[0]


def zeroed(bnn, plan: Plan, digits):
    """The test error of a network with weights set to zero and nothing else."""
    network = bnn.mean_network()
    with torch.no_grad():
        for name, mask in plan.masks.items():
            network.get_parameter(name).mul_(mask)
    ((x, y),) = digits[1]
    return 100 * bl.metrics.error(network(x).softmax(-1), y)


def mean(values):
    return sum(values) / len(values)


def test_ten_cuts_beat_one_and_one_beats_magnitude(digits, networks):
    budget = bl.Budget(sparsity=0.85, empty_layers="keep best")
    rows = []
    for bnn in networks:
        naive = zeroed(bnn, bl.plan(bnn, budget, criterion="magnitude"), digits)
        one = error(bl.prune(bnn, budget), digits)
        ten = error(bl.prune(bnn, budget, steps=10, refresh=digits[0]), digits)
        rows.append((error(bnn, digits), ten, one, naive))
    dense, ten, one, naive = (mean(column) for column in zip(*rows, strict=True))
    assert dense < 6
    assert ten < dense + 6
    assert ten < one - 3
    assert one < naive - 10


def test_units_go_without_retraining(digits, networks):
    x = digits[0][0][0][:2]
    budget = bl.Budget(sparsity=0.6, empty_layers="keep best")
    rows = []
    for bnn in networks:
        pruned = bl.prune(bnn, budget, steps=4, refresh=digits[0], granularity="unit", example=x)
        naive = zeroed(bnn, bl.plan(bnn, budget, granularity="unit", criterion="magnitude", example=x), digits)
        rows.append((error(bnn, digits), error(pruned, digits), naive))
        slim = bl.compact(pruned, x)
        left, total = (sum(p.numel() for p in net.parameters()) for net in (slim, bnn.mean_network()))
        assert left < 0.42 * total
        assert 100 * bl.metrics.error(slim(digits[1][0][0]).softmax(-1), digits[1][0][1]) == pytest.approx(rows[-1][1])
    dense, ours, naive = (mean(column) for column in zip(*rows, strict=True))
    assert ours < dense + 4
    assert ours < naive - 10
