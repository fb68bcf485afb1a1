"""Result objects read well and refuse nonsense."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

from bayeslim import likelihoods
from bayeslim.results import Evidence, Fit


def test_prediction_of_classes():
    prediction = likelihoods.Categorical().predict(torch.randn(5, 7, 3))
    assert len(prediction) == 7
    assert torch.equal(prediction.classes, prediction.mean.argmax(-1))
    shown = repr(prediction)
    for part in ("classes", "7 examples", "5 samples", "nats", "aleatoric", "epistemic"):
        assert part in shown
    with pytest.raises(dataclasses.FrozenInstanceError):
        prediction.mean = torch.zeros(())


def test_prediction_of_binary_targets():
    prediction = likelihoods.Bernoulli().predict(torch.tensor([[2.0, -2.0], [1.0, -3.0]]))
    assert prediction.classes.tolist() == [1, 0]


def test_prediction_of_values_has_no_classes():
    prediction = likelihoods.Gaussian(0.5).predict(torch.randn(5, 7, 1))
    with pytest.raises(AttributeError, match="no classes"):
        _ = prediction.classes
    assert "variance" in repr(prediction)


@pytest.mark.parametrize(
    ("likelihood", "entropy"),
    [
        (likelihoods.Categorical(), lambda p: torch.distributions.Categorical(probs=p.mean).entropy()),
        (likelihoods.Bernoulli(), lambda p: torch.distributions.Bernoulli(probs=p.mean).entropy()),
        (likelihoods.Poisson(), lambda p: torch.distributions.Normal(p.mean, p.variance.sqrt()).entropy()),
        (likelihoods.Gaussian(0.5), lambda p: torch.distributions.Normal(p.mean, p.variance.sqrt()).entropy()),
    ],
)
def test_what_a_prediction_makes_of_its_parts(likelihood, entropy):
    outputs = torch.randn(5, 7, 3)
    prediction = likelihood.predict(outputs)
    torch.testing.assert_close(prediction.entropy, entropy(prediction))
    if prediction.probs is None:
        torch.testing.assert_close(prediction.variance, prediction.aleatoric + prediction.epistemic)
    else:
        probs = outputs.softmax(-1) if prediction.kind == "classes" else outputs.sigmoid()
        torch.testing.assert_close(prediction.variance, probs.var(0, correction=0))
        torch.testing.assert_close(prediction.entropy, prediction.aleatoric + prediction.epistemic)


@pytest.mark.parametrize("examples", [7, 5_000])
def test_few_and_many_values_have_the_same_moments(examples):
    outputs = torch.randn(4, examples, 1) + 100
    prediction = likelihoods.Gaussian(0.5).predict(outputs)
    torch.testing.assert_close(prediction.mean, outputs.mean(0))
    torch.testing.assert_close(prediction.epistemic, outputs.double().var(0, correction=0).float())
    torch.testing.assert_close(prediction.aleatoric, torch.full((examples, 1), 0.25))


LIKELIHOODS = [
    likelihoods.Categorical(),
    likelihoods.Bernoulli(),
    likelihoods.Poisson(),
    likelihoods.Gaussian("learned"),
    likelihoods.Gaussian("heteroscedastic"),
]
PARTS = ("aleatoric", "epistemic", "variance")


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=repr)
def test_uncertainty_is_that_of_when_it_was_predicted(likelihood):
    """Whatever is learned, or written over the mean, before it is read."""
    likelihood, outputs = copy.deepcopy(likelihood), torch.randn(5, 7, 4)
    with torch.no_grad():
        read, unread = likelihood.predict(outputs), likelihood.predict(outputs)
        expected = [getattr(read, name).clone() for name in PARTS]
        for parameter in likelihood.parameters():
            parameter.add_(1)
        unread.mean.mul_(3)
        for name, value in zip(PARTS, expected, strict=True):
            torch.testing.assert_close(getattr(unread, name), value)


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=repr)
def test_a_prediction_that_was_not_read_can_be_copied_and_stored(likelihood):
    outputs = torch.randn(5, 7, 4)
    with torch.no_grad():
        prediction, expected = likelihood.predict(outputs), likelihood.predict(outputs)
    for other in (copy.deepcopy(prediction), pickle.loads(pickle.dumps(prediction))):
        for name in ("mean", "samples", *PARTS):
            assert torch.equal(getattr(other, name), getattr(expected, name))


def test_a_prediction_goes_to_another_device():
    prediction = likelihoods.Categorical().predict(torch.randn(5, 7, 3))
    moved = prediction.to("meta")
    assert moved.kind == "classes"
    for name in ("mean", "variance", "samples", "probs", "entropy", "aleatoric", "epistemic"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(moved, name).shape == getattr(prediction, name).shape
    values = likelihoods.Gaussian(0.5).predict(torch.randn(5, 7, 1)).to("meta")
    assert values.probs is None
    assert values.variance.device.type == "meta"


def test_evidence_shows_its_sense():
    bound = Evidence(-12.5, "elbo", is_bound=True, std_error=0.25, num_data=5)
    assert repr(bound) == "Evidence: log p(D) ≥ -12.5 ± 0.25 nats (elbo, -2.5 per example)"
    assert "≈" in repr(Evidence(-12.5, "laplace", is_bound=False))
    assert "±" not in repr(Evidence(-12.5, "laplace", is_bound=False))


def test_fit_shows_its_end():
    assert repr(Fit()) == "Fit: no training"
    assert repr(Fit(seconds=0.32)) == "Fit: no training, measured in 0.3 s"
    fit = Fit([{"epoch": 1, "nll": 0.5}, {"epoch": 2, "nll": 0.25}], best_epoch=2, stopped="early stopping", seconds=3)
    for part in ("2 epochs", "early stopping", "best epoch 2", "nll 0.25"):
        assert part in repr(fit)
