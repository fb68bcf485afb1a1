"""Result objects read well and refuse nonsense."""

from __future__ import annotations

import dataclasses

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


def test_evidence_shows_its_sense():
    bound = Evidence(-12.5, "elbo", is_bound=True, std_error=0.25, num_data=5)
    assert repr(bound) == "Evidence: log p(D) ≥ -12.5 ± 0.25 nats (elbo, -2.5 per example)"
    assert "≈" in repr(Evidence(-12.5, "laplace", is_bound=False))
    assert "±" not in repr(Evidence(-12.5, "laplace", is_bound=False))


def test_fit_shows_its_end():
    assert repr(Fit()) == "Fit: no epochs"
    fit = Fit([{"epoch": 1, "nll": 0.5}, {"epoch": 2, "nll": 0.25}], best_epoch=2, stopped="early stopping", seconds=3)
    for part in ("2 epochs", "early stopping", "best epoch 2", "nll 0.25"):
        assert part in repr(fit)
