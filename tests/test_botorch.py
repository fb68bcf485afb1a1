"""The surrogate for BoTorch: the moments of `bl.predict`, exact gradients, and a function that is maximised."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayeslim as bl

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("botorch")
    from botorch.acquisition import LogExpectedImprovement, qLogExpectedImprovement, qUpperConfidenceBound
    from botorch.optim import optimize_acqf

    from bayeslim.botorch import Surrogate

pytestmark = pytest.mark.filterwarnings("ignore")  # BoTorch's advice about scales and restarts


def fitted(method: bl.Method, noise: Any = 0.1, outputs: int = 1, **options: Any) -> bl.Bayesian:
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, outputs)).double()
    bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Gaussian(noise))
    bnn.fit(bl.data.Loader(x, torch.sin(2 * x), batch_size=20), seed=0, progress=False, **{"epochs": 3, **options})
    return bnn


@pytest.mark.parametrize(
    "method", [bl.Laplace(), bl.Variational(), bl.DeepEnsemble(members=3), bl.SWAG(start=0, every=1)], ids=repr
)
def test_moments_are_those_of_predict(method: bl.Method) -> None:
    bnn = fitted(method)
    x = torch.linspace(-3, 3, 7, dtype=torch.float64)[:, None]
    posterior = Surrogate(bnn, samples=3000).posterior(x)
    wanted = bl.predict(bnn, x, 3000 if isinstance(method, bl.Variational | bl.SWAG) else None)
    spread = wanted.epistemic.sqrt()
    torch.testing.assert_close(posterior.mean, wanted.mean, atol=float(0.1 * spread.max()), rtol=0.0)
    members = len(wanted.samples)
    unbiased = members / (members - 1) if isinstance(method, bl.DeepEnsemble) else 1.0
    torch.testing.assert_close(posterior.variance, wanted.epistemic * unbiased, rtol=0.1, atol=1e-9)


def test_shapes_batches_and_draws() -> None:
    surrogate = Surrogate(fitted(bl.Variational(), "heteroscedastic", outputs=2), samples=5)
    X = torch.rand(4, 3, 2, 1, dtype=torch.float64)
    posterior = surrogate.posterior(X)
    assert posterior.mean.shape == posterior.variance.shape == (4, 3, 2, 1)
    assert posterior.rsample(torch.Size([6])).shape == (6, 4, 3, 2, 1)
    one = surrogate.posterior(X[2, 1])
    torch.testing.assert_close(one.mean, posterior.mean[2, 1])
    assert surrogate.num_outputs == 1


@pytest.mark.parametrize("method", [bl.Laplace(), bl.Variational()], ids=repr)
def test_gradients_are_exact(method: bl.Method) -> None:
    surrogate = Surrogate(fitted(method), samples=4)
    X = torch.tensor([[0.3], [-1.1]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: surrogate.posterior(x).variance, [X])
    assert all(p.grad is None for p in surrogate.bnn.parameters())


def forrester(x: Tensor) -> Tensor:
    """Compute minus the function of Forrester et al., with its maximum 6.02 at 0.757."""
    return -((6 * x - 2) ** 2) * torch.sin(12 * x - 4)


def test_a_test_function_is_maximised() -> None:
    torch.manual_seed(0)
    bounds = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    X = torch.tensor([[0.0], [0.2], [0.4], [0.6], [1.0]], dtype=torch.float64)
    Y = forrester(X)
    assert float(Y.max()) < 1
    for step in range(8):
        scales = bl.data.Scale.of(X), bl.data.Scale.of(Y)
        loader = bl.data.Loader(scales[0].standardise(X), scales[1].standardise(Y), batch_size=64)
        model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1)).double()
        method = bl.Laplace("full", subset="last-layer")
        bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Gaussian(0.05))
        bnn.fit(loader, epochs=60, lr=0.03, tune="evidence", seed=step, progress=False)
        surrogate = Surrogate(bnn, samples=32, input_scale=scales[0], target_scale=scales[1])
        chosen, _ = optimize_acqf(
            qLogExpectedImprovement(surrogate, best_f=Y.max()), bounds, q=1, num_restarts=2, raw_samples=32,
            options={"maxiter": 20},
        )  # fmt: skip
        X, Y = torch.cat([X, chosen]), torch.cat([Y, forrester(chosen)])
    assert float(Y.max()) > 5.9


def test_analytic_and_confidence_bounds_work_too() -> None:
    surrogate = Surrogate(fitted(bl.Variational()), samples=16)
    X = torch.rand(5, 1, 1, dtype=torch.float64)
    assert LogExpectedImprovement(surrogate, best_f=0.5)(X).shape == (5,)
    assert qUpperConfidenceBound(surrogate, beta=0.2)(X).shape == (5,)


class Dropping(nn.Sequential):
    """A small network with dropout."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))


def dropping(method: bl.Method) -> bl.Bayesian:
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
    bnn = bl.bayesianize(Dropping().double(), method, likelihood=bl.likelihoods.Gaussian(0.1))
    bnn.fit(bl.data.Loader(x, torch.sin(2 * x), batch_size=20), epochs=20, lr=0.01, seed=0, progress=False)
    return bnn


def test_masks_of_dropout_are_functions() -> None:
    bnn = dropping(bl.MCDropout())
    x = torch.linspace(-3, 3, 7, dtype=torch.float64)[:, None]
    posterior, wanted = Surrogate(bnn, samples=1000).posterior(x), bl.predict(bnn, x, 1000)
    spread = wanted.epistemic.sqrt()
    torch.testing.assert_close(posterior.mean, wanted.mean, atol=float(0.15 * spread.max()), rtol=0.0)
    torch.testing.assert_close(posterior.variance, wanted.epistemic, rtol=0.25, atol=1e-9)
    few = Surrogate(bnn, samples=5)
    values = few(x.reshape(7, 1, 1))
    assert values.shape == (7, 5, 1, 1)
    torch.testing.assert_close(few(x[2:5]), values[2:5, :, 0].transpose(0, 1))  # the same masks in every call
    X = x[1:3].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: few.posterior(x).variance, [X])
    few.posterior(X).variance.sum().backward()
    assert all(p.grad is None for p in bnn.parameters())


def test_noise_that_is_no_function_of_the_inputs_is_refused() -> None:
    with pytest.raises(bl.errors.UnsupportedModel, match="MCAugmentation draws its noise again"):
        Surrogate(dropping(bl.MCAugmentation(noise=0.1)))


@pytest.mark.parametrize("method", [bl.MCDropout(), bl.Variational()], ids=repr)
def test_the_network_keeps_its_mode(method: bl.Method) -> None:
    bnn = dropping(method).train()
    surrogate = Surrogate(bnn, samples=3)
    surrogate.posterior(torch.zeros(2, 1, dtype=torch.float64))
    assert all(module.training for module in bnn.modules())
    assert surrogate.bnn is bnn


def test_networks_of_classes_are_refused() -> None:
    bnn = bl.bayesianize(nn.Linear(2, 2), bl.Variational(), likelihood=bl.likelihoods.Categorical())
    with pytest.raises(bl.errors.UnsupportedModel, match="network of values"):
        Surrogate(bnn)


def test_other_numbers_of_targets_and_of_functions_are_refused() -> None:
    bnn = bl.bayesianize(nn.Linear(1, 2).double(), bl.Variational(), likelihood=bl.likelihoods.Gaussian(0.1))
    with pytest.raises(bl.errors.ShapeMismatch, match="outputs=2"):
        Surrogate(bnn, samples=3).posterior(torch.zeros(2, 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="samples must be a whole number"):
        Surrogate(bnn, samples=0)
