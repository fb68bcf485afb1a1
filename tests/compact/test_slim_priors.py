"""Priors of slim networks: settings of single weights are cut with them, those of a mixture stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.app.data import Loader
from bayeslim.compact.restricted import NotRestrictable
from bayeslim.priors import Prior
from bayeslim.prune import Plan

GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(48, 6, generator=GENERATOR)
LABELS = torch.randint(0, 3, (48,), generator=GENERATOR)
STAY = [0, 2, 3]
"""The hidden units that are left, of four."""


def fitted(prior, epochs=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=48, prior=prior)
    if epochs:
        bnn.fit(Loader(ROWS, LABELS, batch_size=24), epochs=epochs, lr=0.01, seed=0)
    return bnn.eval()


def slim_of(bnn):
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in bnn.mean_network().named_parameters()}
    masks["0.weight"][1] = masks["0.bias"][1] = masks["2.weight"][:, 1] = False
    slim = bl.compact(bl.prune(bnn, Plan(masks)), ROWS[:3], bayesian=True)
    assert slim.model[2].weight.shape == (3, 3)
    return slim


@pytest.mark.parametrize("components", [4, 5, 16])  # means as many as the units that are left, as there were, and more
@pytest.mark.parametrize("learn", [True, False])
def test_a_mixture_that_weights_share_stays_whole(components, learn):
    bnn = fitted(bl.priors.SoftSharing(components=components, learn=learn), epochs=2)
    slim = slim_of(bnn)
    for name in slim.priors:
        for setting in ("means", "stds", "logits"):
            now, before = (network.priors[name].setting(setting) for network in (slim, bnn))
            torch.testing.assert_close(now, before)
    if learn:
        assert slim.priors.given["0.weight"] is slim.priors.given["2.weight"]
    slim.fit(Loader(ROWS, LABELS, batch_size=24), epochs=1, lr=0.01)
    coded = bl.quantise(slim.eval(), codebook="prior")
    levels = coded.grids["2.weight"].values
    assert len(levels) <= components
    assert torch.isin(coded.network[2].weight, levels).all()


class Bumps(Prior):
    """Weights gather at shared centres, each row with a width of its own."""

    name = "bumps"

    def __init__(self, centres, widths):
        self.centres, self.widths = centres, widths

    def log_prob(self, weight):
        off = (weight.unsqueeze(-1) - self.centres) / self.widths.unsqueeze(-1)
        return (-0.5 * off.square()).logsumexp(-1) - self.widths.log()

    def config(self):
        return {"centres": self.centres, "widths": self.widths}

    def at(self, mask):
        return type(self)(self.centres, self.widths.expand(mask.shape)[mask])

    def check_fits(self, name, parameter):
        bl.priors.Normal(self.widths).check_fits(name, parameter)


class Unsaid(Bumps):
    """Does not say which settings belong to single weights."""

    name = "unsaid"

    def at(self, mask):
        return self


def test_a_prior_says_itself_which_settings_belong_to_weights():
    centres, widths = torch.linspace(-1, 1, 4), torch.linspace(0.5, 1.5, 4)  # of one shape, but not of one kind
    slim = slim_of(fitted({"0.weight": Bumps(centres, widths[:, None]), "all": bl.priors.Normal(1.0)}))
    assert torch.equal(slim.priors["0.weight"].centres, centres)
    assert torch.equal(slim.priors["0.weight"].widths, widths[STAY, None])
    slim.fit(Loader(ROWS, LABELS, batch_size=24), epochs=1, lr=0.01)
    slim = slim_of(fitted({"2.weight": Bumps(centres, widths), "all": bl.priors.Normal(1.0)}))
    assert torch.equal(slim.priors["2.weight"].centres, centres)
    assert torch.equal(slim.priors["2.weight"].widths, widths[STAY])


def test_settings_that_nobody_can_cut_are_refused():
    prior = {"0.weight": Unsaid(torch.linspace(-1, 1, 4), torch.ones(4, 1)), "all": bl.priors.Normal(1.0)}
    bnn = fitted(prior, epochs=0)
    before = copy.deepcopy(bnn.state_dict())
    with pytest.raises(NotRestrictable, match=r'Unsaid prior of "0.weight" cannot be cut with it: .* `at` picks from'):
        slim_of(bnn)
    assert all(torch.equal(value, before[name]) for name, value in bnn.state_dict().items())
