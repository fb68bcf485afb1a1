"""After a cut: statistics of batch norms measured anew, and biases that bring mean outputs back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bayeslim as bl
from bayeslim.errors import BayeslimError


def normed(norm: bool = True):
    """A small convolutional network, trained a little, with its posterior and data."""
    torch.manual_seed(0)
    middle = nn.BatchNorm2d(12) if norm else nn.Identity()
    network = nn.Sequential(
        nn.Conv2d(2, 12, 3), middle, nn.ReLU(), nn.Conv2d(12, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3)
    )
    x = torch.randn(120, 2, 8, 8) + 1.0
    y = (x.mean((1, 2, 3)) * 6).long().clamp(0, 2)
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
    loader = [(x[:60], y[:60]), (x[60:], y[60:])]
    bnn = bl.bayesianize(network.eval(), bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    bnn.fit(loader, progress=False)
    return bnn, loader


BUDGET = bl.Budget(sparsity=0.8)


def test_statistics_are_those_of_the_cut_network():
    bnn, loader = normed()
    before = bnn.mean_network()[1].running_mean.clone()
    pruned = bl.prune(bnn, BUDGET, refresh=loader, progress=False)
    network = pruned.mean_network().eval()
    with torch.no_grad():
        outputs = [network[0](x) for x, _ in loader]
    mean = torch.stack([o.mean((0, 2, 3)) for o in outputs]).mean(0)
    variance = torch.stack([o.var((0, 2, 3)) for o in outputs]).mean(0)
    torch.testing.assert_close(network[1].running_mean, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(network[1].running_var, variance, rtol=1e-4, atol=1e-5)
    assert torch.equal(bnn.mean_network()[1].running_mean, before)  # the network before is not touched
    kept = bl.prune(bnn, BUDGET, refresh=loader, batch_norms="keep", progress=False)
    assert torch.equal(kept.mean_network()[1].running_mean, before)
    assert torch.equal(bl.prune(bnn, BUDGET).mean_network()[1].running_mean, before)  # without data
    with pytest.raises(ValueError, match="batch_norms"):
        bl.prune(bnn, BUDGET, refresh=loader, batch_norms="fresh")


def test_measured_statistics_help_on_digits():
    data = bl.data.load("digits")
    x, y = data.train_x.view(-1, 1, 8, 8)[:300], data.train_y[:300]
    torch.manual_seed(0)
    parts = [(1, 12), (12, 12), (12, 12)]
    layers = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()) for a, b in parts]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 10))
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(8):
        for rows in torch.randperm(len(x)).split(60):
            optimizer.zero_grad()
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
    loader = list(zip(x.split(100), y.split(100), strict=True))
    bnn = bl.bayesianize(network.eval(), bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    bnn.fit(loader, progress=False)
    test_x, test_y = data.test_x.view(-1, 1, 8, 8), data.test_y

    def error(batch_norms: str) -> float:
        options = {"steps": 2, "refresh": loader, "batch_norms": batch_norms, "progress": False}
        pruned = bl.prune(bnn, bl.Budget(sparsity=0.8), **options).mean_network().eval()
        with torch.no_grad():
            return 100 * float((pruned(test_x).argmax(-1) != test_y).double().mean())

    assert error("measure") < error("keep") - 1


def test_biases_bring_mean_outputs_back():
    bnn, loader = normed(norm=False)
    dense = bnn.mean_network().eval()
    plan = bl.plan(bnn, BUDGET, criterion="magnitude")
    whole = [(torch.cat([x for x, _ in loader]), torch.cat([y for _, y in loader]))]
    plain = bl.prune(bnn, plan, refresh=whole, progress=False).mean_network().eval()
    corrected = bl.prune(bnn, plan, refresh=whole, bias_correction=True, progress=False).mean_network().eval()
    with torch.no_grad():
        x = whole[0][0]
        wanted, without, found = (net(x).mean(0) for net in (dense, plain, corrected))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert (without - wanted).abs().max() > 10 * (found - wanted).abs().max()
    for name, mask in plan.masks.items():
        assert not bool(corrected.get_parameter(name)[~mask].any())
    with pytest.raises(ValueError, match="refresh"):
        bl.prune(bnn, plan, bias_correction=True)


class Twice(nn.Module):
    """A layer that runs twice, or as often as the first input of a batch says, between two that run once."""

    def __init__(self, first_says: bool = False):
        super().__init__()
        self.i, self.h, self.o = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.first_says = first_says

    def forward(self, x):
        y = self.i(x).relu()
        for _ in range(1 + int(x[0, 0] > 0) if self.first_says else 2):
            y = self.h(y).relu()
        return self.o(y)


@pytest.mark.parametrize("first_says", [False, True])
def test_a_layer_that_runs_more_than_once_keeps_its_bias(first_says):
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    x[0, 0], x[32, 0] = -1, 1
    rows = [(x, torch.randn(64, 1))] if not first_says else [(x[:32], x[:32, :1]), (x[32:], x[32:, :1])]
    bnn = bl.bayesianize(Twice(first_says), bl.Laplace("diag"), likelihood=bl.likelihoods.Gaussian(0.1))
    bnn.fit(rows, progress=False)

    def pruned(bias_correction, protect=()):
        budget = bl.Budget(sparsity=0.6, protect=protect)
        return bl.prune(bnn, budget, refresh=rows, bias_correction=bias_correction, progress=False).mean_network()

    for protect in ((), ("i", "o")):
        assert torch.equal(pruned(True, protect).h.bias, pruned(False, protect).h.bias)
    with torch.no_grad():
        off = [float((net(x) - bnn.mean_network()(x)).mean()) for net in (pruned(False), pruned(True))]
    assert first_says or abs(off[1]) < 1e-5 < abs(off[0])


class Words(nn.Module):
    """A classifier of words that leaves the mask to the loss."""

    def __init__(self):
        super().__init__()
        self.table, self.i, self.o = nn.Embedding(7, 4), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, input_ids, attention_mask):
        return self.o(self.i(self.table(input_ids)).relu())


def test_biases_do_not_make_up_for_padding():
    torch.manual_seed(0)
    network, ids = Words(), torch.randint(7, (5, 6))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids % 3}
    pads = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    padded = {key: F.pad(value, (0, 9), value=pads[key]) for key, value in batch.items()}
    silent = {key: torch.full_like(value, pads[key]) for key, value in batch.items()}
    found = []
    for data in ([batch], [padded, silent]):
        bnn = bl.bayesianize(network, bl.Laplace(), likelihood=bl.likelihoods.Categorical())
        bnn.fit(data, progress=False)
        budget = bl.Budget(sparsity=0.6)
        found.append(bl.prune(bnn, budget, refresh=data, bias_correction=True, progress=False).mean_network().i.bias)
    torch.testing.assert_close(*found)


def test_validation_data_that_are_no_numbers_are_refused():
    bnn, loader = normed()
    nothing = [(torch.full_like(x, torch.nan), y) for x, y in loader]
    with pytest.raises(BayeslimError, match="NaN"):
        bl.prune(bnn, bl.Budget(max_error_increase=5), validate=nothing)


def test_a_search_judges_the_network_that_it_returns():
    """Cuts that are tried out have their batch norms measured, as the final one has."""
    bnn, loader = normed()
    budget = bl.Budget(max_error_increase=3.0)
    found, kept = (
        bl.prune(bnn, budget, validate=loader, refresh=loader, batch_norms=norms, progress=False)
        for norms in ("measure", "keep")
    )

    def wrong(network):
        with torch.no_grad():
            return 100 * sum(float((network(x).argmax(-1) != y).sum()) for x, y in loader) / 120

    assert wrong(found.mean_network().eval()) <= wrong(bnn.mean_network().eval()) + 3.0 + 1e-6
    assert found.plan_.sparsity > 0
    assert not torch.equal(found.mean_network()[1].running_mean, kept.mean_network()[1].running_mean)


def test_a_last_batch_of_one_row_is_left_out():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x, y = torch.randn(33, 6), torch.randint(0, 3, (33,))
    bnn = bl.bayesianize(network, bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    loader = list(zip(x.split(16), y.split(16), strict=True))
    bnn.fit(loader, progress=False)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5), refresh=loader, progress=False)
    assert int(pruned.model[1].num_batches_tracked) == 2
