"""scikit-learn's own checks of the estimators, and what they promise beyond them."""

from __future__ import annotations

import pickle
import pickletools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bayeslim as bl

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import parametrize_with_checks

from bayeslim.sklearn import BayesianClassifier, BayesianRegressor

QUICK: dict[str, Any] = {
    "max_epochs": 4, "hidden": 8, "depth": 1, "lr": 0.1, "batch_size": 64, "fit_options": {}, "random_state": 0
}  # fmt: skip


@parametrize_with_checks([BayesianClassifier(**QUICK), BayesianRegressor(**QUICK)])
def test_the_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


class Tiny(nn.Module):
    """A network of the user's own."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.hidden = nn.Linear(inputs, 6)
        self.out = nn.Linear(6, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(x)))


def wave(rows: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Draw a noisy wave on [-3, 3], in large units."""
    random = np.random.default_rng(0)
    x = random.uniform(-3, 3, (rows, 1))
    return x, 1000 + 50 * np.sin(x[:, 0]) + 5 * random.normal(size=rows)


@pytest.fixture(scope="module")
def regressor() -> BayesianRegressor:
    return BayesianRegressor(hidden=30, max_epochs=60, lr=0.02, random_state=0).fit(*wave())


def test_uncertainty_is_in_the_units_of_the_targets(regressor: BayesianRegressor) -> None:
    x, y = wave(400)
    mean, std = regressor.predict(x, return_std=True)
    assert regressor.score(x, y) > 0.95
    assert 3 < float(np.mean(std)) < 9  # the noise is 5
    low, high = regressor.predict_interval(x, 0.9).T
    assert 0.8 < float(np.mean((low < y) & (y < high))) < 0.99
    np.testing.assert_allclose((low + high) / 2, mean)
    parts = regressor.predict_uncertainty(x)
    np.testing.assert_allclose(np.hypot(parts["aleatoric"], parts["epistemic"]), std)
    far = regressor.predict_uncertainty([[0.0], [9.0]])["epistemic"]
    assert far[1] > 5 * far[0]
    with pytest.raises(ValueError, match="coverage must be a finite number"):
        regressor.predict_interval(x, 90)


def test_few_noisy_rows_are_not_overfitted() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(260, 8))
    y = x[:, 0] + random.normal(size=260)  # the noise is 1
    model = BayesianRegressor(max_epochs=40, random_state=0).fit(x[:60], y[:60])
    mean, std = model.predict(x[60:], return_std=True)
    assert float(np.mean((mean - y[60:]) ** 2)) < 0.9 * float(np.var(y[60:]))
    assert float(np.mean(std)) < 1.5 * float(np.std(y[60:]))


def test_several_targets_and_noise_of_every_row() -> None:
    x, y = wave()
    both = np.stack([y, -y], 1)
    model = BayesianRegressor(Tiny, bl.Variational(), noise="heteroscedastic", max_epochs=2, random_state=0)
    mean, std = model.fit(x, both).predict(x[:7], return_std=True)
    assert mean.shape == std.shape == (7, 2)
    assert model.predict_interval(x[:7]).shape == (7, 2, 2)
    assert len(set(std[:, 0])) == 7
    with pytest.raises(ValueError, match="noise must be"):
        BayesianRegressor(noise="none").fit(x, y)


@pytest.mark.parametrize(
    "method", [bl.DeepEnsemble(members=2), bl.SGHMC(samples=2), bl.MCDropout(), bl.SWAG(start=0.0, every=1)], ids=repr
)
def test_every_kind_of_method_fits_and_is_pickled(method: bl.Method) -> None:
    x, y = wave(40)
    lr = None if isinstance(method, bl.SGHMC) else 0.01
    model = BayesianRegressor(None, method, lr=lr, max_epochs=2, hidden=4, random_state=0).fit(x, y)
    again = pickle.loads(pickle.dumps(model))
    mean, std = model.predict(x, return_std=True)
    assert (std > 0).all()
    np.testing.assert_array_equal(again.predict(x), mean)


def test_a_fitted_estimator_is_pickled_with_the_architecture_of_its_fit() -> None:
    x, y = wave(40)
    model = BayesianRegressor(None, bl.MCDropout(), max_epochs=2, hidden=4, random_state=0).fit(x, y)
    own = BayesianRegressor(Tiny, max_epochs=2, random_state=0).fit(x, y)
    for fitted, changes in ((model, {"hidden": 10, "depth": 1, "method": bl.Laplace()}), (own, {"module": None})):
        expected = fitted.predict(x, return_std=True)
        fitted.set_params(**changes)
        again = pickle.loads(pickle.dumps(fitted))
        np.testing.assert_array_equal(again.predict(x, return_std=True), expected)
        assert again.get_params()[next(iter(changes))] == next(iter(changes.values()))
    assert again.fit(x, y).bnn_.model is not own.bnn_.model
    assert not isinstance(again.bnn_.model, Tiny)


def test_options_of_the_fit_take_precedence() -> None:
    x, y = wave(40)
    options = {"epochs": 3, "progress": True, "lr": 1e-3, "seed": 4}
    model = BayesianRegressor(max_epochs=2, hidden=4, fit_options=options, random_state=0).fit(x, y)
    assert len(model.loss_curve_) == 3


@pytest.mark.parametrize("rows", [33, 65, 40])
def test_a_batch_norm_never_trains_on_a_single_row(rows: int) -> None:
    x, y = wave(rows)

    def normed(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))

    model = BayesianRegressor(normed, max_epochs=2, batch_size=32, random_state=0).fit(x, y)
    assert np.isfinite(model.predict(x)).all()
    assert model.bnn_.num_data == rows


def test_pipelines_grids_and_clones() -> None:
    x, y = wave(60)
    pipeline = make_pipeline(PolynomialFeatures(2), BayesianRegressor(max_epochs=2, hidden=4, random_state=0))
    grid = GridSearchCV(pipeline, {"bayesianregressor__depth": [0, 1]}, cv=2, scoring="neg_mean_squared_error")
    grid.fit(x, y)
    assert grid.best_params_["bayesianregressor__depth"] in (0, 1)
    _, std = pipeline.fit(x, y).predict(x, return_std=True)
    assert (std > 0).all()
    copied = clone(BayesianClassifier(Tiny, bl.Laplace("diag"), prior=bl.priors.Normal(2.0)))
    assert copied.method == bl.Laplace("diag")
    assert not hasattr(copied, "bnn_")


def test_the_labels_are_the_users_own() -> None:
    x = np.random.default_rng(0).normal(size=(80, 2))
    y = np.where(x[:, 0] > 0, "up", "down")
    model = BayesianClassifier(max_epochs=20, hidden=8, random_state=0).fit(x, y)
    assert model.score(x, y) > 0.9
    assert set(model.predict(x)) == {"up", "down"}
    parts = model.predict_uncertainty(x)
    np.testing.assert_allclose(parts["aleatoric"] + parts["epistemic"], parts["total"], atol=1e-6)
    draws = model.sample_proba(x[:5], 400)
    assert draws.shape == (400, 5, 2)
    np.testing.assert_allclose(draws.mean(0), model.predict_proba(x[:5]), atol=0.05)
    np.testing.assert_array_equal(draws, model.sample_proba(x[:5], 400))


def globals_of(data: bytes) -> set[str]:
    """List the modules and names that a pickle imports."""
    words: list[str] = []
    found = set()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STACK_GLOBAL":
            found.add(f"{words[-2]}.{words[-1]}")
        elif isinstance(argument, str):
            words.append(argument)
    return found


def test_a_pickle_holds_arrays_bytes_and_public_classes(regressor: BayesianRegressor) -> None:
    x, _ = wave()
    data = pickle.dumps(regressor)
    ours = {name for name in globals_of(data) if name.startswith("bayeslim")}
    assert ours == {"bayeslim.sklearn.estimators.BayesianRegressor"}
    assert not {name for name in globals_of(data) if name.startswith("torch")}
    again = pickle.loads(data)
    np.testing.assert_array_equal(again.predict(x, return_std=True), regressor.predict(x, return_std=True))
    assert isinstance(again.bnn_, bl.Bayesian)


def test_a_stored_network_writes_in_its_own_folder_only(regressor: BayesianRegressor) -> None:
    state = regressor.__getstate__()
    state["bnn_"] = {"../evil.json": b""}
    with pytest.raises(bl.errors.CorruptFile, match="another folder"):
        BayesianRegressor().__setstate__(state)


@pytest.mark.parametrize("module", [lambda inputs, outputs: None, nn.Linear(1, 1), "mlp"])
def test_a_factory_must_build_a_network(module: Any) -> None:
    with pytest.raises(TypeError, match="module must be a function"):
        BayesianRegressor(module).fit(*wave(10))


def test_a_factory_must_build_an_output_for_each_class() -> None:
    model = BayesianClassifier(lambda inputs, outputs: nn.Linear(inputs, 5))
    with pytest.raises(bl.errors.ShapeMismatch, match=r"each of the 2 classes\. Got outputs of shape \(1, 5\)"):
        model.fit(np.eye(4), [0, 1, 0, 1])


def test_batches_need_a_size() -> None:
    with pytest.raises(ValueError, match="batch_size must be a whole number"):
        BayesianRegressor(batch_size=0).fit(*wave(10))
