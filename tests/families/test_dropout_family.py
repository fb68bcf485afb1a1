"""Multiplicative noise: against binary dropout, the exact ELBO of a line, and the ends of the range of α."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import integrate, optimize, special
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import bayeslim as bl
from bayeslim import likelihoods, priors
from bayeslim.families import DropoutGaussian, SparseGaussian
from bayeslim.io.registry import registered
from bayeslim.posteriors import Diagonal

PRIORS = {
    "log-uniform": priors.LogUniform(),
    "approximate": priors.LogUniform("approximate"),
    "polynomial": priors.LogUniform("polynomial"),
    "relevance": priors.RelevanceDetermination(),
}
of_alpha_alone = pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
X, Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2


def network(family: DropoutGaussian, model: nn.Module | None = None, **options) -> bl.Bayesian:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) if model is None else model
    estimator = options.pop("estimator", "auto")
    options = {"likelihood": likelihoods.Categorical(), "prior": priors.LogUniform(), "num_data": 12} | options
    return bl.bayesianize(model, bl.Variational(family, estimator=estimator), **options)


def log_alpha(bnn: bl.Bayesian, name: str) -> torch.Tensor:
    q = bnn.posterior_
    return (q.variance[name] / q.mean[name].square()).log()


@pytest.mark.parametrize("family", [DropoutGaussian(0.2), DropoutGaussian(alpha=0.25), DropoutGaussian(rate=0.2)])
def test_the_spread_is_a_share_of_the_size(family):
    """α = p/(1 − p) is the ratio of the variances, with p the probability of a drop."""
    q = network(family, sites="all").posterior_
    assert isinstance(q, Diagonal)
    for name in q.names:
        torch.testing.assert_close(q.std[name], 0.5 * q.mean[name].abs())
        torch.testing.assert_close(q.variance[name], 0.25 * q.mean[name].square())


def test_half_is_dropped_unless_said_otherwise():
    q = network(DropoutGaussian()).posterior_
    torch.testing.assert_close(q.std["0.weight"], q.mean["0.weight"].abs())


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("estimator", ["local", "shared", "flipout"])
def test_moments_are_those_of_binary_dropout_of_the_same_rate(rate, estimator):
    """Pre-activations behind inputs that are dropped and scaled up, as `nn.Dropout` does, and those with this noise."""
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 3).double(), torch.randn(1, 5).double()
    bnn = network(DropoutGaussian(rate, learn=False), layer, estimator=estimator)
    with torch.no_grad():
        # local noise is independent for every example
        draws = bnn(x.expand(20_000, 5)) if estimator == "local" else torch.cat([bnn(x) for _ in range(1500)])
        dropped = F.linear(F.dropout(x.expand(20_000, 5), rate), layer.weight, layer.bias)
    for moment in (torch.mean, torch.var):
        wanted = moment(dropped, 0)
        scale = dropped.var(0).sqrt() if moment is torch.mean else dropped.var(0)
        assert ((moment(draws, 0) - wanted).abs() < 0.15 * scale).all()


LAYERS = {
    "linear": (nn.Linear(3, 4), "weight", (4, 1)),
    "bias": (nn.Linear(3, 4), "bias", (4,)),
    "convolution": (nn.Conv2d(2, 6, 3), "weight", (6, 1, 1, 1)),
    "transposed": (nn.ConvTranspose2d(2, 6, 3), "weight", (1, 6, 1, 1)),
    "bias of transposed": (nn.ConvTranspose2d(2, 6, 3), "bias", (6,)),
    "embedding": (nn.Embedding(7, 2), "weight", (7, 1)),
    "recurrent": (nn.LSTM(2, 3), "weight_ih_l0", (12, 1)),
}


@pytest.mark.parametrize(("layer", "leaf", "units"), LAYERS.values(), ids=LAYERS.keys())
def test_every_weight_unit_or_layer_has_its_own(layer, leaf, units):
    weight = layer.get_parameter(leaf)
    shapes = {"weight": weight.shape, "unit": units, "layer": (1,) * weight.ndim}
    for per, shape in shapes.items():
        bnn = network(DropoutGaussian(0.3, per=per), copy.deepcopy(layer), sites="all")
        own = bnn.model.get_parameter(f"{leaf}_log_alpha")
        assert own.shape == shape
        own.data.copy_(torch.randn(shape))
        wanted = own.detach().expand(weight.shape)
        torch.testing.assert_close(log_alpha(bnn, leaf), wanted, rtol=1e-4, atol=1e-4)


@of_alpha_alone
@pytest.mark.parametrize("per", ["weight", "unit", "layer"])
def test_the_divergence_is_a_sum_over_weights_whatever_they_share(prior, per):
    bnn = network(DropoutGaussian(0.3, per=per), prior=prior)
    bnn.loss((X, Y))
    alpha = torch.full((20,), 0.3 / 0.7, dtype=torch.float64)
    assert bnn.terms.kl.item() == pytest.approx(prior.kl(torch.ones_like(alpha), alpha.sqrt()).item(), rel=1e-5)


@of_alpha_alone
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_divergence_knows_nothing_of_the_weights(prior, scale):
    """It depends on α alone: its gradient in μ is zero, up to the rounding of its two parts, of size 1/|μ|."""
    bnn = network(DropoutGaussian(0.3), prior=prior)
    for name in bnn.sites.names:
        bnn.model.get_parameter(name).data.mul_(scale)
    for name in bnn.sites.names:
        weight, own = bnn.model.get_parameter(name), bnn.model.get_parameter(f"{name}_log_alpha")
        _, _, kl = prior.weights([weight], [bnn.method.family.log_std(bnn.model, name)], [False])
        by_weight, by_log_alpha = torch.autograd.grad(kl, [weight, own])
        assert (by_weight * weight).abs().max() < 1e-5
        assert by_log_alpha.max() < -0.1


def test_fixed_noise_adds_nothing_to_train_and_stays():
    """Gaussian dropout: with the prior of α alone, its loss is the data's and a constant."""
    bnn = network(DropoutGaussian(0.3, learn=False))
    assert [name for name, _ in bnn.model.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {"0.weight_log_alpha", "2.weight_log_alpha"} < set(bnn.state_dict())
    gradients = []
    for kl_weight in (0.0, 1.0):
        torch.manual_seed(1)
        gradients.append(torch.autograd.grad(bnn.loss((X, Y), kl_weight=kl_weight), list(bnn.model.parameters())))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    before = bnn.posterior_
    bnn.fit([(X, Y)], epochs=5, lr=1e-2)
    assert not torch.equal(bnn.posterior_.mean["0.weight"], before.mean["0.weight"])
    torch.testing.assert_close(log_alpha(bnn, "0.weight"), torch.full((4, 3), math.log(3 / 7)))
    assert set(bnn.mean_network().state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def exact_kl(a: float) -> float:
    return 2 * integrate.quad(special.dawsn, 0, math.exp(-a / 2) / 2**0.5)[0]


@pytest.mark.parametrize(("signal", "largest"), [(1.0, None), (0.5, None), (0.08, 1.0)])
def test_training_finds_the_optimum_of_a_line(signal, largest):
    """y = w x with known noise: the ELBO is exact in μ and α, and a slow search finds its maximum."""
    torch.manual_seed(0)
    x = torch.randn(100, 1).double()
    y = signal * x + 0.5 * torch.randn(100, 1).double()
    power, product = x.square().sum().item() / 0.25, (x * y).sum().item() / 0.25

    def minus_elbo(values: np.ndarray) -> float:
        mean, a = values[0], min(values[1], math.log(largest) if largest else 30.0)
        return 0.5 * power * mean**2 * (1 + math.exp(a)) - product * mean + exact_kl(a)

    starts = ([product / power, -1.0], [product / power, -5.0])
    best = min((optimize.minimize(minus_elbo, s, method="Nelder-Mead") for s in starts), key=lambda found: found.fun)
    bnn = network(
        DropoutGaussian(0.01, largest=largest),
        nn.Linear(1, 1, bias=False).double(),
        likelihood=likelihoods.Gaussian(0.5),
        num_data=100,
    )
    bnn.model.weight.data.fill_(best.x[0] * 1.2)
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.05)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, 250)
    for _ in range(250):
        optimizer.zero_grad()
        bnn.loss((x, y)).backward()
        optimizer.step()
        decay.step()
    mean, a = bnn.posterior_.mean["weight"].item(), log_alpha(bnn, "weight").item()
    assert minus_elbo(np.array([mean, a])) == pytest.approx(best.fun, abs=0.05)
    assert a == pytest.approx(min(best.x[1], math.log(largest) if largest else 30.0), abs=0.3)
    if largest is not None:
        assert a == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("start", [0.0, 0.5, 1e-9])
def test_at_the_limit_a_gradient_leads_back_or_nowhere(start):
    """The sign of the whole gradient decides, of data and divergence together."""
    bnn = network(DropoutGaussian(largest=1.0), nn.Linear(3, 2))
    own = bnn.model.weight_log_alpha
    own.data.fill_(start)
    for direction in (1.0, -1.0):
        wanted = direction * torch.rand(2, 3)
        std = bnn.method.family.std(bnn.model, "weight")
        torch.testing.assert_close(std, bnn.model.weight.abs())
        # a share of the gradient each way; what counts is the sum
        log_std = bnn.method.family.log_std(bnn.model, "weight")
        (found,) = torch.autograd.grad((3 * wanted * log_std).sum() - (wanted * log_std).sum(), [own])
        torch.testing.assert_close(found, wanted if direction > 0 else torch.zeros(2, 3))
    own.data.fill_(-0.5)
    log_std = bnn.method.family.log_std(bnn.model, "weight")
    (found,) = torch.autograd.grad(log_std.sum(), [own])
    torch.testing.assert_close(found, torch.full((2, 3), 0.5))


def test_what_starts_at_the_limit_leaves_it_when_the_data_ask():
    torch.manual_seed(0)
    x = torch.randn(200, 1)
    y = 2 * x + 0.1 * torch.randn(200, 1)
    family = DropoutGaussian(largest=1.0)
    bnn = network(family, nn.Linear(1, 1, bias=False), likelihood=likelihoods.Gaussian(0.1), num_data=200)
    bnn.model.weight.data.fill_(2.0)
    bnn.fit([(x, y)], epochs=100, lr=0.05)
    assert log_alpha(bnn, "weight").item() < -2


EVERY_PRIOR = PRIORS | {"normal": priors.Normal(1.0), "laplace": priors.Laplace(1.0)}


@pytest.mark.parametrize("prior", EVERY_PRIOR.values(), ids=EVERY_PRIOR.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("estimator", ["local", "shared"])
def test_gradients_are_finite_however_small_the_weights(prior, dtype, estimator):
    bnn = network(DropoutGaussian(0.5, largest=1.0), nn.Linear(3, 8).to(dtype), prior=prior, estimator=estimator)
    sizes = torch.tensor([0.0, -0.0, 1e-45, 1e-38, -1e-30, 1e-20, -1e-10, 1.0]).to(dtype)
    bnn.model.weight.data.copy_(sizes[:, None].expand(8, 3))
    loss = bnn.loss((X.to(dtype), Y))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in bnn.parameters())
    q = bnn.posterior_
    assert not q.std["weight"][:2].any()
    assert torch.isfinite(q.std["weight"]).all()
    assert q.std["weight"][-1].min() > 0


@pytest.mark.parametrize("log_alpha", [-60.0, -20.0, 20.0, 40.0])
@of_alpha_alone
def test_gradients_are_finite_at_the_ends_of_alpha(prior, log_alpha):
    bnn = network(DropoutGaussian(0.5), nn.Linear(3, 2), prior=prior)
    bnn.model.weight_log_alpha.data.fill_(log_alpha)
    loss = bnn.loss((X, Y), kl_weight=1.0)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in bnn.parameters())


@pytest.mark.parametrize("estimator", ["local", "flipout"])
@pytest.mark.parametrize(
    "family",
    [DropoutGaussian(0.2, per="unit", largest=1.0), DropoutGaussian(0.2, learn=False), SparseGaussian(zero_above=-4.0)],
)
def test_noise_at_the_layers_survives_activation_checkpointing(family, estimator):
    """Layers that run again in the backward pass, where σ is found anew, have the gradients of those that do not."""
    layer, head = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()

    class Recomputed(nn.Module):
        def __init__(self, again: bool):
            super().__init__()
            self.layer, self.head, self.again = layer, head, again

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.layer, x, use_reentrant=False) if self.again else self.layer(x))

    gradients = []
    for again in (True, False):
        bnn = network(family, Recomputed(again), estimator=estimator)
        torch.manual_seed(1)
        bnn.loss((X.double(), Y)).backward()
        gradients.append([p.grad for p in bnn.parameters()])
    torch.testing.assert_close(*gradients)


def test_log_std_is_differentiable_twice():
    bnn = network(DropoutGaussian(0.2, largest=1.0), nn.Linear(3, 2).double())
    family, model = bnn.method.family, bnn.model

    def kl(weight: torch.Tensor, log_alpha: torch.Tensor) -> torch.Tensor:
        log_std = functional_call(model, {"weight": weight, "weight_log_alpha": log_alpha}, (family,))
        return priors.Normal(1.0).kl(weight, log_std.exp(), log_std)

    model.forward = lambda family: family.log_std(model, "weight")
    values = (model.weight.detach().requires_grad_(), torch.randn(2, 3).double().clamp(max=-0.1).requires_grad_())
    assert torch.autograd.gradcheck(kl, values)
    assert torch.autograd.gradgradcheck(kl, values)


def test_cut_weights_have_no_noise_and_no_divergence():
    bnn = network(DropoutGaussian(0.3, per="unit"))
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True], [True, False, False]])
    pruned = bl.prune(bnn, bl.Plan({"0.weight": mask}))
    pruned.loss((X, Y))
    bnn.loss((X, Y))
    one = bnn.terms.kl.item() / 20
    assert pruned.terms.kl.item() == pytest.approx(one * (8 + 6), rel=1e-5)
    pruned.fit([(X, Y)], epochs=3, lr=0.1)
    assert not pruned.posterior_.std["0.weight"][~mask].any()
    assert not pruned.posterior_.sample(3)["0.weight"][:, ~mask].any()


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("per", ["weight", "unit", "layer"])
def test_is_saved_and_loaded(learn, per, tmp_path):
    family = DropoutGaussian(alpha=0.4, per=per, learn=learn, largest=2.0)
    bnn = network(family)
    bnn.fit([(X, Y)], epochs=2, lr=0.05)
    bl.save(bnn, tmp_path / "bnn")
    again = bl.load(tmp_path / "bnn", model=bnn.mean_network())
    assert again.method.family == family
    for name, std in bnn.posterior_.std.items():
        assert torch.equal(std, again.posterior_.std[name])
    assert registered("family", "dropout") is DropoutGaussian


WRONG = [
    ({"rate": 0.5, "alpha": 1.0}, "not both"),
    ({"rate": 0.0}, "probability of a drop"),
    ({"rate": 1.0}, "probability of a drop"),
    ({"alpha": 0.0}, "alpha is a ratio of variances"),
    ({"alpha": math.inf}, "alpha must be a finite number"),
    ({"alpha": math.nan}, "alpha must be a finite number"),
    ({"largest": -1.0}, "largest is a ratio of variances"),
    ({"per": "channel"}, 'per must be "weight", "unit" or "layer"'),
    ({"rate": 0.9, "largest": 1.0}, r"α starts at 9, above largest=1"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_settings_are_checked(settings, words):
    with pytest.raises(ValueError, match=words):
        DropoutGaussian(**settings)
