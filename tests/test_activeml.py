"""Bridges by the estimators: query strategies of scikit-activeml, and conformal prediction by MAPIE."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import bayeslim as bl

pytest.importorskip("skactiveml")
pytest.importorskip("mapie")

from mapie.classification import SplitConformalClassifier
from mapie.regression import SplitConformalRegressor
from skactiveml.pool import BatchBALD, GreedyBALD, QueryByCommittee, UncertaintySampling

from bayeslim.activeml import ActiveClassifier
from bayeslim.sklearn import BayesianClassifier, BayesianRegressor

QUICK: dict[str, Any] = {"max_epochs": 20, "hidden": 8, "depth": 1, "lr": 0.05, "random_state": 0}


def pool(rows: int = 60) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(rows, 2))
    return x, np.where(x[:, 0] > 0.7, "b", np.where(x[:, 0] < -0.7, "a", "c"))


@pytest.mark.filterwarnings("ignore:The 'base_estimator' could not be fitted because of 'There is no labeled data")
@pytest.mark.parametrize("strategy", [GreedyBALD, BatchBALD, QueryByCommittee])
def test_the_posterior_is_a_committee(strategy: Any) -> None:
    x, truth = pool()
    y = np.full(len(x), None, dtype=object)
    model = ActiveClassifier(BayesianClassifier(**QUICK), classes=["a", "b", "c"], missing_label=None)
    sampled = {"sample_predictions_method_name": "sample_proba", "sample_predictions_dict": {"n_samples": 20}}
    query = strategy(missing_label=None, random_state=0, **sampled)
    for _ in range(3):  # from no label at all, and through times when a class has none
        chosen = query.query(x, y, ensemble=model, batch_size=3)
        assert len(set(chosen.tolist())) == 3
        assert all(y[i] is None for i in chosen)
        y[chosen] = truth[chosen]
    assert model.fit(x, y).predict_proba(x).shape == (60, 3)


def test_bald_is_that_of_acquire() -> None:
    x, truth = pool()
    y = np.full(len(x), None, dtype=object)
    y[:20] = truth[:20]
    model = ActiveClassifier(BayesianClassifier(**QUICK), classes=["a", "b", "c"], missing_label=None).fit(x, y)
    sampled = {"sample_predictions_method_name": "sample_proba", "sample_predictions_dict": {"n_samples": 500}}
    query = GreedyBALD(missing_label=None, **sampled)
    _, theirs = query.query(x, y, ensemble=model, fit_ensemble=False, return_utilities=True)
    estimator = model.estimator_
    inputs = torch.from_numpy((x[20:] - estimator.input_mean_) / estimator.input_std_)
    ours = bl.predict(estimator.bnn_, inputs, 500, "joint", generator=torch.Generator().manual_seed(estimator.seed_))
    np.testing.assert_allclose(theirs[0, 20:], ours.epistemic.numpy(), atol=1e-6)


def test_strategies_that_need_probabilities_alone() -> None:
    x, truth = pool()
    y = np.full(len(x), None, dtype=object)
    y[:6] = truth[:6]
    model = ActiveClassifier(BayesianClassifier(**QUICK), classes=["a", "b", "c"], missing_label=None)
    assert UncertaintySampling(missing_label=None).query(x, y, clf=model)[0] >= 6


def test_mapie_makes_sets_and_intervals_of_the_estimators() -> None:
    x, y = pool(300)
    parts = BayesianClassifier(**QUICK).fit(x[:100], y[:100])
    sets = SplitConformalClassifier(parts, confidence_level=0.8).conformalize(x[100:200], y[100:200])
    _, contains = sets.predict_set(x[200:])
    truth = np.searchsorted(parts.classes_, y[200:])
    assert 0.65 < float(contains[np.arange(100), truth, 0].mean()) <= 1
    values = x[:, 0] ** 2
    model = BayesianRegressor(**QUICK).fit(x[:100], values[:100])
    made = SplitConformalRegressor(model, confidence_level=0.8).conformalize(x[100:200], values[100:200])
    _, bounds = made.predict_interval(x[200:])
    covered = (bounds[:, 0, 0] <= values[200:]) & (values[200:] <= bounds[:, 1, 0])
    assert 0.65 < float(covered.mean()) < 0.95
