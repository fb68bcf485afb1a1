"""Scores of every kind of target, against the library's own metrics and torch.distributions."""

from __future__ import annotations

import math

import pytest
import torch
from report_cases import laplace
from torch import nn

import bayeslim as bl
from bayeslim import metrics
from bayeslim.app.report.scores import LEVELS, collected, predict_all, score_network, score_prediction


class Outputs(nn.Module):
    """A network that gives its inputs."""

    def forward(self, x):
        return x


def test_classes_are_scored_as_by_the_metrics_whatever_the_batches():
    logits, targets = torch.randn(50, 4), torch.randint(0, 4, (50,))
    batches = [(logits[:30], targets[:30]), (logits[30:], targets[30:])]
    found = score_network(Outputs(), bl.likelihoods.Categorical(), batches)
    probs = logits.softmax(-1)
    assert found.count == 50
    assert found.error == pytest.approx(metrics.error(probs, targets))
    assert found.nll == pytest.approx(metrics.nll(probs, targets), rel=1e-5)
    assert found.ece == pytest.approx(metrics.expected_calibration_error(probs, targets), rel=1e-5)
    assert found.error_text.endswith(" %")


def test_padding_does_not_count():
    logits, targets = torch.randn(6, 5, 4), torch.randint(0, 4, (6, 5))
    targets[:, 3:] = -100
    found = score_network(Outputs(), bl.likelihoods.Categorical(), [(logits, targets)])
    assert found.count == 18
    assert found.error == pytest.approx(metrics.error(logits.softmax(-1)[:, :3], targets[:, :3]))


def test_yes_and_no_is_scored_as_two_classes():
    logits, targets = torch.randn(40, 1), torch.randint(0, 2, (40, 1)).float()
    found = score_network(Outputs(), bl.likelihoods.Bernoulli(), [(logits, targets)])
    both = torch.cat([1 - logits.sigmoid(), logits.sigmoid()], 1)
    assert found.kind == "binary"
    assert found.nll == pytest.approx(metrics.nll(both, targets[:, 0].long()), rel=1e-5)


def test_values_have_an_error_in_their_units_and_intervals_that_hold():
    mean, noise = torch.randn(4000, 1), 0.5
    targets = mean + noise * torch.randn(4000, 1)
    found = score_network(Outputs(), bl.likelihoods.Gaussian(noise), [(mean, targets)])
    assert found.error == pytest.approx(metrics.rmse(mean, targets), rel=1e-5)
    assert found.nll == pytest.approx(metrics.gaussian_nll(mean, torch.full_like(mean, noise**2), targets), rel=1e-5)
    assert found.ece < 0.03
    overconfident = score_network(Outputs(), bl.likelihoods.Gaussian(noise / 3), [(mean, targets)])
    assert overconfident.ece > 0.2
    half = int((LEVELS == 0.5).nonzero())
    inside = (targets - mean).abs() < noise / 3 * torch.distributions.Normal(0, 1).icdf(torch.tensor(0.75))
    assert float(overconfident.calibration.accuracy[half]) == pytest.approx(float(inside.float().mean()), abs=1e-3)
    assert not found.error_text.endswith("%")


def test_counts_are_scored_under_the_mixture_of_all_draws():
    case, targets = torch.randn(30, 1), torch.randint(0, 5, (30, 1)).float()
    likelihood = bl.likelihoods.Poisson()
    draws = torch.stack([case, case + 0.5])
    found = score_prediction(likelihood.predict(draws), likelihood, [(case, targets)])
    log_prob = torch.distributions.Poisson(draws.exp()).log_prob(targets)
    assert found.nll == pytest.approx(-float((log_prob.logsumexp(0) - math.log(2)).mean()), rel=1e-5)


def test_modes_are_left_alone_and_other_parameters_can_be_used():
    network = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).train()
    batches = [(torch.randn(20, 3), torch.randint(0, 2, (20,)))]
    zeros = {"0.weight": torch.zeros(2, 3), "0.bias": torch.zeros(2)}
    found = score_network(network, bl.likelihoods.Categorical(), batches, zeros)
    assert found.nll == pytest.approx(math.log(2), rel=1e-5)
    assert network.training
    assert network[1].training


def test_a_posterior_predicts_all_batches_as_one_and_the_same_every_time():
    case = laplace()
    one, other = (predict_all(case.pruned, case.held_out, 8) for _ in range(2))
    assert len(one) == 80
    assert torch.equal(one.mean, other.mean)
    whole = bl.predict(case.pruned, torch.cat([x for x, _ in case.held_out]), how="mean")
    assert (one.classes == whole.classes).float().mean() > 0.8


def test_a_loader_without_batches_is_refused():
    with pytest.raises(bl.errors.BayeslimError, match="no batches"):
        collected([])


def test_targets_that_do_not_fit_are_refused():
    with pytest.raises(bl.errors.ShapeMismatch, match="as many entries"):
        score_network(Outputs(), bl.likelihoods.Gaussian(0.1), [(torch.zeros(4, 1), torch.zeros(5, 1))])
