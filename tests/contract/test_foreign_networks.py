"""Conversion works on networks of other packages, and is never silently without effect."""

from __future__ import annotations

import copy

import pytest
import torch
from foreign_networks import CASES, Case, Encoder, First, SelfAttention, check_recomputed_gradients
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.errors import UnsupportedModel
from bayeslim.families import DiagonalGaussian
from bayeslim.types import call

STD = 1e-3
ESTIMATORS = ("local", "shared", "flipout")


def double(inputs):
    if isinstance(inputs, dict):
        return {k: double(v) for k, v in inputs.items()}
    if type(inputs) is tuple:
        return tuple(double(v) for v in inputs)
    return inputs.double() if getattr(inputs, "is_floating_point", lambda: False)() or _is_packed(inputs) else inputs


def _is_packed(inputs) -> bool:
    return isinstance(inputs, nn.utils.rnn.PackedSequence)


def converted(case: Case, estimator: str, std: float = STD) -> tuple[nn.Module, bl.Bayesian, object]:
    plain, inputs = case.build().double(), double(case.inputs())
    method = bl.Variational(estimator=estimator, family=DiagonalGaussian(initial_std=std))
    likelihood = bl.likelihoods.Gaussian(noise=1.0)
    return plain, bl.bayesianize(plain, method, likelihood=likelihood, sites=case.sites, num_data=10), inputs


def linearised_variance(plain: nn.Module, inputs, names: tuple[str, ...]) -> Tensor:
    """Σᵢ (∂f/∂wᵢ)² σ² of every output, by one backward pass an output."""
    start = {name: plain.get_parameter(name).detach() for name in names}
    plain = copy.deepcopy(plain)

    def outputs(*values: Tensor) -> Tensor:
        return call(plain, inputs, dict(zip(names, values, strict=True)))

    parts = torch.autograd.functional.jacobian(outputs, tuple(start.values()))
    shape = outputs(*start.values()).shape
    return sum(part.reshape(*shape, -1).square().sum(-1) for part in parts) * STD**2


def draws_of(bnn: bl.Bayesian, inputs, n: int) -> Tensor:
    with torch.no_grad():
        return torch.stack([bnn(inputs) for _ in range(n)])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", CASES)
def test_every_site_learns_its_spread_from_the_data(name, estimator):
    _, bnn, inputs = converted(CASES[name], estimator, std=0.1)
    targets = torch.randn_like(bnn(inputs))
    batch = (inputs, targets)
    loss = bnn.loss(batch, kl_weight=0.0)
    loss.backward()
    assert torch.isfinite(loss)
    for site in bnn.sites.names:
        gradient = bnn.model.get_parameter(site + DiagonalGaussian.suffix).grad
        assert gradient is not None, site
        assert torch.isfinite(gradient).all(), site
        assert gradient.abs().sum() > 0, site


def _exact() -> list[tuple[str, str]]:
    """Every network with local noise where that is exact, and with one of the other estimators in turn."""
    pairs = []
    for place, (name, case) in enumerate(CASES.items()):
        other = "flipout" if place % 2 == 0 and case.flipout_exact else "shared"
        pairs += [(name, "local")] * case.local_exact + [(name, other)] * (place % 3 == 0 or not case.local_exact)
    return pairs


@pytest.mark.parametrize(("name", "estimator"), _exact())
def test_spread_of_draws_is_that_of_whole_weight_samples(name, estimator):
    plain, bnn, inputs = converted(CASES[name], estimator)
    expected = linearised_variance(plain, inputs, bnn.sites.names)
    draws = draws_of(bnn, inputs, 240)
    variance = draws.var(0)
    assert variance.sum().item() == pytest.approx(expected.sum().item(), rel=0.3)
    # The mean of the draws is the mean network: off by at most the spread of an average.
    error = (draws.mean(0) - call(plain, inputs)).abs()
    assert (error <= 5 * (expected / 240).sqrt() + 30 * STD**2).all()


def test_local_variance_of_a_single_layer_is_exact_element_by_element():
    plain, bnn, inputs = converted(CASES["reflect"], "local")
    expected = linearised_variance(plain, inputs, bnn.sites.names)
    ratio = draws_of(bnn, inputs, 4000).var(0) / expected
    assert (ratio - 1).abs().max() < 6 * (2 / 4000) ** 0.5


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_tied_bias_is_random_wherever_it_is_used(estimator):
    _, bnn, inputs = converted(CASES["tied-bias"], estimator, std=0.5)
    draws = draws_of(bnn, 0 * inputs, 50)  # only the bias is left
    assert draws.std(0).min() > 0.1
    torch.testing.assert_close(draws[..., :3], draws[..., 3:])


SEQUENCE_LAYERS = {
    "rnn": lambda: First(nn.RNN(3, 4, batch_first=True)),
    "lstm": lambda: First(nn.LSTM(3, 4, batch_first=True)),
    "gru": lambda: First(nn.GRU(3, 4, batch_first=True)),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("layer", SEQUENCE_LAYERS)
def test_recurrent_weights_are_drawn_once_a_sequence(layer, estimator):
    model = SEQUENCE_LAYERS[layer]().double()
    gate = {"lstm": slice(4, 8), "gru": slice(4, 8)}.get(layer, slice(0, 0))
    with torch.no_grad():
        model.inner.weight_hh_l0.zero_()
        model.inner.bias_ih_l0[gate] = -1e3  # no memory: every step sees the input alone
    method = bl.Variational(estimator=estimator, family=DiagonalGaussian(initial_std=0.5))
    bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Gaussian(), sites=".*weight_ih_l0")
    draws = draws_of(bnn, torch.ones(2, 6, 3).double(), 20)
    torch.testing.assert_close(draws, draws[:, :1, :1].expand_as(draws))
    assert draws.std(0).min() > 1e-3


def test_attention_output_projection_is_random_though_its_module_never_runs():
    model = SelfAttention().double()
    for estimator in ESTIMATORS:
        method = bl.Variational(estimator=estimator, family=DiagonalGaussian(initial_std=0.5))
        bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Gaussian(), sites="attention.out_proj.weight")
        assert draws_of(bnn, torch.randn(2, 3, 8).double(), 20).std(0).min() > 1e-3


def test_a_transformer_has_noise_at_its_linear_layers_in_every_mode():
    model, x = Encoder(), torch.randn(2, 4, 8)
    likelihood = bl.likelihoods.Gaussian()
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=likelihood, sites=".*linear.*weight", num_data=2)
    bnn.loss((x, torch.randn_like(model(x))))
    assert bnn.state["noisy"] == ["encoder.layers.0.linear1", "encoder.layers.0.linear2"]
    spread = bl.predict(bnn, x, samples=20, how="local").samples.std(0)
    assert spread.min() > 1e-4


def test_only_frozen_parameters_stay_out():
    bnn = bl.bayesianize(CASES["frozen-body"].build(), bl.Variational(), likelihood=bl.likelihoods.Gaussian())
    assert bnn.sites.names == ("2.weight",)
    assert not bnn.model[0].weight.requires_grad
    assert hasattr(bnn.model[2], "weight_log_std")
    assert not hasattr(bnn.model[0], "weight_log_std")


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["mlp-all", "conv-deep", "lstm", "attention", "embedding"])
def test_half_precision_networks_train(name, dtype, estimator):
    case = CASES[name]
    inputs = case.inputs()
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    method = bl.Variational(estimator=estimator)
    model = case.build().to(dtype)
    bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Gaussian(1.0), sites=case.sites, num_data=10)
    optimizer = bnn.optimizer(1e-2)
    before = copy.deepcopy(bnn.state_dict())
    loss = bnn.loss((inputs, torch.randn_like(bnn(inputs))))
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
    after = bnn.state_dict()
    assert all(torch.isfinite(value).all() for value in after.values())
    for site in bnn.sites.names:
        assert after[site].dtype == dtype
        assert not torch.equal(before[site + DiagonalGaussian.suffix], after[site + DiagonalGaussian.suffix])


def test_a_deviation_too_small_for_half_precision_still_makes_noise():
    std = 1e-4  # its square is below the least positive half-precision number
    model = nn.Linear(16, 8, bias=False).half()
    with torch.no_grad():
        model.weight.zero_()
    method = bl.Variational(estimator="local", family=DiagonalGaussian(initial_std=std))
    bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Gaussian(1.0), num_data=1)
    x = torch.ones(4000, 16).half()
    outputs = bnn(x)
    assert outputs.float().std().item() == pytest.approx(4 * std, rel=0.05)
    bnn.loss((x, torch.full((4000, 8), 10.0).half()), kl_weight=0.0).backward()
    assert bnn.model.weight_log_std.grad.abs().min() > 0


@pytest.mark.parametrize("options", [{"sparse": True}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}], ids=str)
def test_embeddings_with_options(options):
    model = nn.Sequential(nn.Embedding(5, 3, **options), nn.Linear(3, 2))
    likelihood = bl.likelihoods.Gaussian(1.0)
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=likelihood, sites="weights", num_data=3)
    optimizer = bnn.optimizer(1e-2)
    bnn.loss((torch.tensor([0, 1, 2]), torch.randn(3, 2)), kl_weight=0.0).backward()
    assert bnn.model[0].weight_log_std.grad.to_dense()[:3].abs().min() > 0
    optimizer.step()
    assert torch.isfinite(bnn.model[0].weight).all()
    default = bl.bayesianize(model, bl.Variational(), likelihood=likelihood, num_data=3)
    optimizer = default.optimizer(1e-2)
    default.loss((torch.tensor([0, 1, 2]), torch.randn(3, 2))).backward()
    optimizer.step()
    assert torch.isfinite(default.model[0].weight).all()


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_noise_at_the_layers_survives_activation_checkpointing(estimator, monkeypatch):
    method = bl.Variational(estimator=estimator, family=DiagonalGaussian(initial_std=0.3))
    check_recomputed_gradients(method, monkeypatch)


@pytest.mark.parametrize(
    "lazy", [lambda: nn.Sequential(nn.LazyLinear(3)), lambda: nn.LazyConv2d(3, 3)], ids=["linear", "conv"]
)
def test_lazy_modules_are_refused_with_advice(lazy):
    with pytest.raises(UnsupportedModel, match="Call the model once on a batch"):
        bl.bayesianize(lazy(), bl.Variational(), likelihood=bl.likelihoods.Gaussian())
