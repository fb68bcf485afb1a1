"""What a prediction can be asked: standard deviations, quantiles, intervals, arrays and tables."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import bayeslim as bl
from bayeslim.errors import MissingExtra
from bayeslim.likelihoods import Bernoulli, Categorical, Gaussian, Poisson

QS = (0.001, 0.05, 0.5, 0.9, 0.999)


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_std_is_the_root_of_the_variance():
    prediction = Gaussian(0.5).predict(draws(7, 4, 2))
    assert torch.equal(prediction.std, prediction.variance.sqrt())


@pytest.mark.parametrize("q", QS)
def test_quantiles_of_values_are_those_of_the_mixture(q):
    outputs = 3 * draws(6, 5, 2)
    found = Gaussian(0.4).predict(outputs).quantile(q)
    assert found.shape == (5, 2)
    for place in np.ndindex(5, 2):
        below = stats.norm.cdf(float(found[place]), outputs[:, *place].numpy(), 0.4).mean()
        assert below == pytest.approx(q, abs=1e-5)


@pytest.mark.parametrize("q", QS)
def test_quantiles_under_noise_of_each_input(q):
    outputs = draws(6, 5, 4)
    found = Gaussian("heteroscedastic").predict(outputs).quantile(q)
    means, log_variances = outputs.double().chunk(2, -1)
    assert found.shape == (5, 2)
    for place in np.ndindex(5, 2):
        std = (log_variances[:, *place] / 2).exp().numpy()
        below = stats.norm.cdf(float(found[place]), means[:, *place].numpy(), std).mean()
        assert below == pytest.approx(q, abs=1e-5)


@pytest.mark.parametrize("q", QS)
def test_quantiles_of_counts_are_those_of_the_mixture(q):
    outputs = 2 * draws(6, 8) + 1
    found = Poisson().predict(outputs).quantile(q)
    for example in range(8):
        rates = outputs[:, example].double().exp().numpy()
        assert found[example] == round(float(found[example]))
        assert stats.poisson.cdf(float(found[example]), rates).mean() >= q
        assert stats.poisson.cdf(float(found[example]) - 1, rates).mean() < q


def test_one_draw_is_its_gaussian():
    outputs = draws(1, 5)
    expected = outputs[0] + 0.3 * stats.norm.ppf(0.9)
    torch.testing.assert_close(Gaussian(0.3).predict(outputs).quantile(0.9), expected)


def test_several_quantiles_are_stacked():
    prediction = Gaussian(0.3).predict(draws(4, 5, 1))
    both = prediction.quantile([0.1, 0.8])
    assert torch.equal(both, torch.stack([prediction.quantile(0.1), prediction.quantile(0.8)]))


def test_an_interval_holds_its_share_of_targets():
    outputs = draws(9, 1)
    low, high = Gaussian(0.5).predict(outputs).interval(0.8)
    targets = Gaussian(0.5).sample(outputs.repeat(20_000, 1), torch.Generator().manual_seed(1))
    inside = ((low <= targets) & (targets <= high)).float().mean()
    assert inside == pytest.approx(0.8, abs=0.01)


def linear_regression() -> tuple[bl.Bayesian, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(30, 2)
    bnn = bl.bayesianize(nn.Linear(2, 1), bl.Laplace(structure="full"), likelihood=Gaussian(0.5))
    bnn.fit([(x, x.sum(1, keepdim=True))])
    return bnn, x


def test_a_linearised_prediction_is_gaussian():
    bnn, x = linear_regression()
    prediction = bl.predict(bnn, x)
    assert prediction.is_gaussian
    low, high = prediction.interval(0.95)
    torch.testing.assert_close(high - low, 2 * stats.norm.ppf(0.975) * prediction.std)
    torch.testing.assert_close((high + low) / 2, prediction.mean)
    assert not bl.predict(bnn, x, how="joint").is_gaussian
    assert bl.predict(bnn, x, batch_size=7).is_gaussian


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()], ids=["classes", "binary"])
def test_classes_have_no_quantiles(likelihood):
    prediction = likelihood.predict(draws(4, 5, 3))
    with pytest.raises(TypeError, match="has no quantiles: classes have no order"):
        prediction.quantile(0.5)
    with pytest.raises(TypeError, match="has no quantiles"):
        prediction.interval(0.9)


@pytest.mark.parametrize("q", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_probabilities_are_between_0_and_1(q):
    prediction = Gaussian(0.5).predict(draws(4, 5))
    with pytest.raises(ValueError, match="above 0 and below 1"):
        prediction.quantile(q)
    with pytest.raises(ValueError, match="above 0 and below 1"):
        prediction.interval(q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_arrays(dtype):
    prediction = Categorical().predict(draws(4, 5, 3).to(dtype))
    arrays = prediction.numpy()
    assert set(arrays) == {"mean", "std", "aleatoric", "epistemic", "entropy", "samples", "probs"}
    for name, array in arrays.items():
        assert isinstance(array, np.ndarray)
        np.testing.assert_array_equal(array, getattr(prediction, name).to(torch.from_numpy(array).dtype).numpy())
    arrays["mean"][:] = 0
    assert prediction.mean.any()
    assert "probs" not in Gaussian(0.5).predict(draws(4, 5)).numpy()


def test_a_table_of_values():
    prediction = Gaussian(0.5).predict(draws(4, 5, 1))
    table = prediction.to_pandas(0.8)
    assert list(table.columns) == ["mean", "std", "aleatoric", "epistemic", "lower", "upper"]
    assert table.index.name == "example"
    np.testing.assert_array_equal(table["mean"], prediction.mean[:, 0])
    np.testing.assert_array_equal(table["upper"], prediction.interval(0.8)[1][:, 0])


def test_a_table_of_several_targets_has_a_row_for_each():
    prediction = Gaussian(0.5).predict(draws(4, 5, 2))
    table = prediction.to_pandas()
    assert list(table.index.names) == ["example", "dimension_1"]
    assert table.loc[(3, 1), "mean"] == float(prediction.mean[3, 1])


def test_a_table_of_classes():
    prediction = Categorical().predict(draws(4, 5, 3))
    table = prediction.to_pandas()
    assert list(table.columns) == ["class", "prob_0", "prob_1", "prob_2", "entropy", "aleatoric", "epistemic"]
    np.testing.assert_array_equal(table["class"], prediction.classes)
    np.testing.assert_array_equal(table["prob_2"], prediction.probs[:, 2])
    yes_no = Bernoulli().predict(draws(4, 5)).to_pandas()
    np.testing.assert_allclose(yes_no["prob_0"] + yes_no["prob_1"], 1, rtol=1e-6)


def test_a_table_needs_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r"needs pandas.*bayeslim\[pandas\]"):
        Gaussian(0.5).predict(draws(4, 5)).to_pandas()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_predict_takes_arrays(dtype):
    bnn, x = linear_regression()
    x = x.to(torch.float16).float()
    expected = bl.predict(bnn, x).mean
    array = x.numpy().astype(dtype)
    assert torch.equal(bl.predict(bnn, array).mean, expected)
    assert torch.equal(bl.predict(bnn, (array,)).mean, expected)
    assert torch.equal(bl.predict(bnn, {"input": array}).mean, expected)
    assert torch.equal(bl.predict(bnn, iter([array[:9], array[9:]])).mean, expected)
    array.flags.writeable = False
    assert torch.equal(bl.predict(bnn, array[::-1]).mean, expected.flip(0))


def test_arrays_of_integers_stay_integers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=Categorical(), num_data=4)
    words = np.array([[0, 1], [4, 2]])
    expected = bl.predict(bnn, torch.from_numpy(words), generator=torch.Generator().manual_seed(0))
    found = bl.predict(bnn, words, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found.mean, expected.mean)


def test_arrays_of_objects_are_refused():
    bnn, _ = linear_regression()
    with pytest.raises(TypeError, match=r"must be arrays of numbers. Got object"):
        bl.predict(bnn, np.array([["a", None]]))
