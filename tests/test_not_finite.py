"""Models and data with NaN or infinity, and models without values: errors that name them, at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.errors import BayeslimError, NotFinite, NotFitted, UnsupportedModel
from bayeslim.metrics import Regression, gaussian_nll, rmse

GAUSSIAN = bl.likelihoods.Gaussian(0.5)
X, Y = torch.randn(12, 3), torch.randn(12, 1)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("make", [bl.bayesianize, bl.bayesianize_])
def test_weights_that_are_not_finite(make, value):
    model = network()
    with torch.no_grad():
        model[2].bias[0] = value
    with pytest.raises(UnsupportedModel, match=r'"2\.bias" holds NaN or infinite values'):
        make(model, bl.Laplace(), likelihood=GAUSSIAN)


def test_a_network_is_loaded_into_any_weights(tmp_path):
    bnn = bl.bayesianize(network(), bl.Variational(), likelihood=GAUSSIAN)
    bl.save(bnn, tmp_path)
    model = network()
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    assert torch.equal(bl.load(tmp_path, model=model)(X), bnn.eval()(X))


@pytest.mark.parametrize("make", [bl.bayesianize, bl.bayesianize_])
def test_a_model_without_values(make):
    with torch.device("meta"):
        model = network()
    with pytest.raises(UnsupportedModel, match=r'"0\.weight" is on the meta device and has no values'):
        make(model, bl.Variational(), likelihood=GAUSSIAN)


def test_a_device_that_is_not_there():
    bnn = bl.bayesianize(network(), bl.Variational(), likelihood=GAUSSIAN)
    for move in (lambda: bnn.to("meta"), lambda: bnn.to_empty(device="meta")):
        with pytest.raises(ValueError, match="is the meta device, where tensors have no values"):
            move()
    with pytest.raises(ValueError, match=r'shall move to is not available here: .* Use "cpu"'):
        bnn.to("cuda:77")
    assert bnn(X).shape == Y.shape


def test_a_network_that_lost_its_values(tmp_path):
    networks = [bl.bayesianize(network(), bl.Variational(), likelihood=GAUSSIAN) for _ in range(2)]
    lost = networks[1]
    lost.model.to("meta")
    with pytest.raises(UnsupportedModel, match=r'"0\.weight.*" of network 1 is on the meta device'):
        bl.fit_together(networks, [(X, Y)], epochs=1)
    for use in (lambda: lost.fit([(X, Y)]), lambda: bl.predict(lost, X), lambda: bl.save(lost, tmp_path / "lost")):
        with pytest.raises(UnsupportedModel, match="is on the meta device and has no values"):
            use()
    assert not (tmp_path / "lost").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_its_plain_one():
    model = network()
    bnn = bl.bayesianize(torch.compile(model), bl.Variational(), likelihood=GAUSSIAN)
    assert bnn.sites.names == ("0.weight", "2.weight")
    bnn.fit([(X, Y)], epochs=1, seed=0)
    assert bl.predict(bnn, X).mean.shape == (12, 1)
    in_place = bl.bayesianize_(torch.compile(model), bl.Laplace(), likelihood=GAUSSIAN)
    assert in_place.model is model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_part_of_a_model_is_refused():
    model = network()
    model[0] = torch.compile(model[0])
    with pytest.raises(UnsupportedModel, match=r'"0" is compiled: .*compile afterwards'):
        bl.bayesianize(model, bl.Variational(), likelihood=GAUSSIAN)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["mean", "variance", "targets"])
def test_regression_scores(place, value):
    batch = {"mean": torch.zeros(5), "variance": torch.ones(5), "targets": torch.zeros(5)}
    batch[place][3] = value
    words = {"mean": "Predicted means", "variance": "Predicted variances", "targets": "Targets"}[place]
    scores = Regression()
    with pytest.raises(ValueError, match=f"{words} must be finite numbers. Got NaN or infinity in 1 of 5"):
        scores.update(**batch)
    with pytest.raises(ValueError, match=words):
        gaussian_nll(**batch)
    if place != "variance":
        with pytest.raises(ValueError, match=words):
            rmse(batch["mean"], batch["targets"])
    scores.update(torch.zeros(2), torch.ones(2), torch.ones(2))
    assert scores.compute().count == 2


@pytest.mark.parametrize("method", [bl.Variational(), bl.Laplace(), bl.Laplace(structure="diag")], ids=repr)
@pytest.mark.parametrize("place", ["inputs", "targets"])
def test_evidence_of_data_that_are_not_finite(method, place):
    bnn = bl.bayesianize(network(), method, likelihood=GAUSSIAN)
    bnn.fit([(X, Y)], **({"epochs": 1} if isinstance(method, bl.Variational) else {}))
    assert math.isfinite(bl.log_evidence(bnn, [(X, Y)], samples=2).value)
    x, y = X.clone(), Y.clone()
    (x if place == "inputs" else y)[2] = math.nan
    with pytest.raises(BayeslimError, match=f"The {place} of batch 1 hold NaN or infinite values"):
        bl.log_evidence(bnn, [(X, Y), (x, y)], samples=2)


def test_evidence_of_weights_that_are_not_finite():
    bnn = bl.bayesianize(network(), bl.Variational(), likelihood=GAUSSIAN, num_data=12)
    with torch.no_grad():
        bnn.model[0].bias.fill_(math.nan)
    with pytest.raises(BayeslimError, match="The evidence is nan, though the data are finite"):
        bl.log_evidence(bnn, [(X, Y)], samples=2)


def test_a_number_of_parameters_is_whole():
    with pytest.raises(ValueError, match=r"parameters is a number of parameters, a whole number. Got 2\.5"):
        bl.Budget(parameters=2.5)
    assert bl.Budget(parameters=100).value == 100
    assert bl.Budget(parameters=1e5).value == 100_000
    with pytest.raises(ValueError, match="finite"):
        bl.Budget(parameters=math.inf)


METHODS = [bl.Variational(), bl.Laplace(), bl.Laplace("diag"), bl.DeepEnsemble(2), bl.SGLD(samples=2), bl.SWA()]


def fitted(method: bl.Method) -> bl.Bayesian:
    bnn = bl.bayesianize(network(), method, likelihood=GAUSSIAN)
    bnn.fit(bl.data.Loader(X, Y, 6), progress=False, **({} if method.name == "laplace" else {"epochs": 2}))
    return bnn


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_predictions_of_inputs_that_are_not_finite(method, value):
    bnn, x = fitted(method), X.clone()
    x[7, 1] = x[9, 0] = value
    for inputs in (x, [(x[:5], None), (x[5:], None)]):
        source = inputs if isinstance(inputs, torch.Tensor) else iter(inputs)
        with pytest.raises(NotFinite, match=r"inputs of (1|2) examples .* example 7\."):
            bl.predict(bnn, source)
    found = bl.predict(bnn, x, allow_nonfinite=True).mean
    assert found[:7].isfinite().all()


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_predictions_of_weights_that_are_not_finite(method):
    bnn = fitted(method)
    with torch.no_grad():
        bnn.model[0].weight.fill_(math.nan)
        for values in getattr(bnn.posterior_, "values", {}).values():
            values.fill_(math.nan)
    # the posterior of Laplace belongs to the weights that it was measured at, and says so
    with pytest.raises((NotFinite, NotFitted), match=r"Look for NaN|has changed since"):
        bl.predict(bnn, X)


def test_a_search_for_a_cut_on_validation_data_that_are_not_finite():
    torch.manual_seed(0)
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    bnn = bl.bayesianize(network, bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    bnn.fit([(x, y)], progress=False)
    validate = [(torch.full_like(x, math.nan), y)]
    with pytest.raises(NotFinite, match="inputs of 20 examples hold NaN"):
        bl.prune(bnn, bl.Budget(max_error_increase=5), validate=validate, example=x)
