"""Things of other packages: each trains, predicts, is pruned, saved and loaded as the library's own do."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import bayeslim as bl
from bayeslim.errors import BayeslimError, NotFitted, UnsupportedModel
from bayeslim.gates import Gate
from bayeslim.io.registry import unregister
from bayeslim.posteriors import Posterior
from bayeslim.priors import Prior
from bayeslim.prune.criteria import Criterion, register_criterion
from bayeslim.samplers import ChainMethod, Sampler
from bayeslim.stochastic import is_noisy

torch.manual_seed(0)
X = torch.randn(48, 4)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
BATCHES = [(X[:24], Y[:24]), (X[24:], Y[24:])]


@bl.linear_in_parameters
class MaskedLinear(nn.Linear):
    """Reads its parameters in a method and a property."""

    def __init__(self, inputs, outputs, bias=True):
        super().__init__(inputs, outputs, bias)
        self.register_buffer("mask", (torch.arange(inputs * outputs).view(outputs, inputs) % 3 > 0).float())

    @property
    def masked(self):
        return self.weight * self.mask

    def product(self, x):
        return F.linear(x, self.masked, self.bias)

    def forward(self, x):
        return self.product(x)


@bl.linear_in_parameters
class Reversed(nn.Linear):
    """Leaves its parameters to `super()`."""

    def forward(self, x):
        return super().forward(x.flip(-1))


@bl.linear_in_parameters(channel_dim=1)
class Pointwise(nn.Module):
    """A convolution of one position, written without one."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs))

    def forward(self, x):
        return torch.einsum("bi...,oi->bo...", x, self.weight)


@bl.linear_in_parameters
class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@dataclass(frozen=True)
class Cauchy(Prior):
    """A density alone: its KL is estimated by draws."""

    scale: float = 1.0
    name: ClassVar[str] = "cauchy"

    def log_prob(self, weight):
        return -math.log(math.pi * self.scale) - torch.log1p((weight / self.scale).square())

    def config(self):
        return {"scale": self.scale}


class Box(Posterior):
    """Independent weights, each uniform on mean ± half_width."""

    kind: ClassVar[str] = "box"

    def __init__(self, centre, half_width):
        self.centre, self.half_width = centre, half_width

    @property
    def mean(self):
        return self.centre

    @property
    def variance(self):
        return {name: width.square() / 3 for name, width in self.half_width.items()}

    def sample(self, n=None, *, generator=None):
        def draw(name, centre):
            u = torch.rand(centre.shape if n is None else (n, *centre.shape), generator=generator)
            return centre + (2 * u - 1) * self.half_width[name]

        return {name: draw(name, centre) for name, centre in self.centre.items()}

    def log_prob(self, params):
        inside = all(bool(((params[n] - c).abs() <= self.half_width[n]).all()) for n, c in self.centre.items())
        volume = sum((2 * width[width > 0]).log().sum() for width in self.half_width.values())
        return -volume if inside else torch.tensor(-math.inf)

    def condition(self, masks):
        def cut(tensors):
            return {name: tensor * masks.get(name, 1.0) for name, tensor in tensors.items()}

        return Box(cut(self.centre), cut(self.half_width))

    def tensors(self):
        return {f"{name}:{part}": t for part in ("centre", "half_width") for name, t in getattr(self, part).items()}

    @classmethod
    def restore(cls, config, tensors):
        parts = {"centre": {}, "half_width": {}}
        for key, tensor in tensors.items():
            name, _, part = key.rpartition(":")
            parts[part][name] = tensor
        return cls(**parts)


@dataclass(frozen=True)
class Boxed(bl.Method):
    """A point estimate, and a box around it."""

    half_width: float = 0.1
    name: ClassVar[str] = "boxed"

    def fit(self, bnn, loader, **options):
        result = super().fit(bnn, loader, **options)
        centre = {name: bnn.model.get_parameter(name).detach().clone() for name in bnn.sites.names}
        box = Box(centre, {name: torch.full_like(value, self.half_width) for name, value in centre.items()})
        bnn.state["posterior"] = box.condition(bnn.masks) if bnn.masks else box
        return result

    def posterior(self, bnn):
        if "posterior" not in bnn.state:
            raise NotFitted("Call bnn.fit first.")
        return bnn.state["posterior"]


class SignedLangevin(Sampler):
    """Langevin dynamics with noise of two values, ±1."""

    def update(self, group, params, grads):
        lr, std = group["lr"], math.sqrt(2 * group["lr"] * group["temperature"] / group["num_data"])
        for param, grad in zip(params, self.with_decay(group, params, grads), strict=True):
            param.add_(grad, alpha=-lr).add_(torch.randn_like(param).sign(), alpha=std)


@dataclass(frozen=True)
class SignedSGLD(ChainMethod):
    """The method of that sampler."""

    name: ClassVar[str] = "signed-sgld"
    usual_lr: ClassVar[float] = 0.1

    def sampler(self, params, lr, burn_in_steps, **settings):
        return SignedLangevin(params, lr, **settings)


@dataclass(frozen=True)
class Shrinking(Gate):
    """Scales z ~ N(μ, σ²) with the prior N(0, 1)."""

    threshold: float = 0.1
    name: ClassVar[str] = "shrinking"
    is_proper: ClassVar[bool] = True

    def start(self, count):
        return {"mean": torch.linspace(0.0, 1.0, count), "log_std": torch.full((count,), -3.0)}

    def draw(self, own, shape):
        return own["mean"] + own["log_std"].exp() * torch.randn(*shape, *own["mean"].shape)

    def mean(self, own):
        return own["mean"]

    def variance(self, own):
        return (2 * own["log_std"]).exp()

    def kl(self, own):
        return 0.5 * (own["mean"].square() + self.variance(own) - 1 - 2 * own["log_std"]).sum()

    def score(self, own):
        return own["mean"].abs()


def middle_first(posterior, priors):
    """Score weights by their distance to the median size: a criterion for this test alone."""
    return {name: (mean.abs() - mean.abs().median()).abs() for name, mean in posterior.mean.items()}


@pytest.fixture(autouse=True, scope="module")
def registration():
    """Register as an import of another package would, and leave the registry to other tests as it was."""
    for kind, cls in (
        ("prior", Cauchy),
        ("posterior", Box),
        ("method", Boxed),
        ("method", SignedSGLD),
        ("gate", Shrinking),
    ):
        bl.register(kind)(cls)
    register_criterion(Criterion("middle_first", middle_first))
    yield
    for kind, name in (
        ("prior", "cauchy"),
        ("posterior", "box"),
        ("method", "boxed"),
        ("method", "signed-sgld"),
        ("gate", "shrinking"),
        ("criterion", "middle_first"),
    ):
        unregister(kind, name)


def network(layer=MaskedLinear):
    torch.manual_seed(1)
    return nn.Sequential(layer(4, 8), nn.ReLU(), nn.Linear(8, 3))


def bayesian(model=None, method=None, **options):
    model = network() if model is None else model
    return bl.bayesianize(model, method or bl.Variational(), likelihood=bl.likelihoods.Categorical(), **options)


def live(bnn, tmp_path, model=None, granularity="weight"):
    """Train, predict, prune, save and load; return the loaded network."""
    bnn.fit(BATCHES, epochs=2, lr=1e-2, seed=0)
    assert torch.isfinite(bl.predict(bnn, X).probs).all()
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5), granularity=granularity, example=X)
    assert pruned.plan_.sparsity == pytest.approx(0.5, abs=0.1)
    pruned.fit(BATCHES, epochs=1, lr=1e-3, seed=0)
    bl.save(pruned, tmp_path / "saved")
    again = bl.load(tmp_path / "saved", model=network() if model is None else model)
    assert type(again.method) is type(bnn.method)
    assert again.method == bnn.method
    mean = bl.predict(again, X, how="mean").probs
    assert torch.equal(mean, bl.predict(pruned, X, how="mean").probs)
    return again


def test_a_prior(tmp_path):
    again = live(bayesian(prior=Cauchy(0.5)), tmp_path)
    assert again.priors["0.weight"] == Cauchy(0.5)


def test_a_method_and_its_posterior(tmp_path):
    bnn = bayesian(method=Boxed(0.2))
    with pytest.raises(NotFitted):
        _ = bnn.posterior_
    again = live(bnn, tmp_path)
    assert type(again.posterior_) is Box
    draws = bl.predict(again, X, samples=8).samples
    assert draws.shape[0] == 8
    assert float(draws.std(0).max()) > 0
    weight = again.posterior_.sample(50)["0.weight"]
    assert not weight[:, ~again.masks["0.weight"]].any()
    assert float((weight - again.posterior_.mean["0.weight"]).abs().max()) <= 0.2


def test_a_sampler(tmp_path):
    bnn = bayesian(method=SignedSGLD(samples=2, burn_in=0.0))
    again = live(bnn, tmp_path)
    assert again.posterior_.count == 2
    assert bl.predict(again, X).samples.shape[0] == 2


def test_a_sampler_draws_from_the_posterior():
    """On a quadratic loss the chain has the variance T / N λ (1 − lr λ / 2), as Langevin dynamics has."""
    torch.manual_seed(0)
    weights = nn.Parameter(torch.zeros(2000))
    sampler = SignedLangevin([weights], lr=0.2, num_data=50)
    for _ in range(60):
        sampler.zero_grad()
        (0.5 * weights.square().sum()).backward()
        sampler.step()
    assert float(weights.detach().var()) == pytest.approx(1 / 50 / (1 - 0.1), rel=0.1)


def test_a_method_or_posterior_that_is_not_registered_cannot_be_saved(tmp_path):
    @dataclass(frozen=True)
    class Unknown(Boxed):
        pass

    bnn = bayesian(method=Unknown())
    with pytest.raises(BayeslimError, match="Unknown cannot be saved: it is not registered"):
        bl.save(bnn, tmp_path / "saved")
    bnn = bayesian(method=Boxed())
    bnn.fit(BATCHES, epochs=1)
    bnn.state["posterior"] = type("Crate", (Box,), {})(bnn.posterior_.centre, bnn.posterior_.half_width)
    with pytest.raises(BayeslimError, match=r'Crate cannot be saved: .*@bl\.register\("posterior"\)'):
        bl.save(bnn, tmp_path / "saved")


def test_a_gate(tmp_path):
    method = bl.Variational(family=bl.families.Point(), gates=Shrinking(threshold=0.3))
    again = live(bayesian(network(nn.Linear), method), tmp_path, network(nn.Linear), granularity="unit")
    assert again.method.gates == Shrinking(threshold=0.3)


def test_a_criterion(tmp_path):
    bnn = bayesian()
    bnn.fit(BATCHES, epochs=1, seed=0)
    plan = bl.plan(bnn, bl.Budget(sparsity=0.5), criterion="middle_first")
    size = bnn.posterior_.mean["0.weight"].abs()
    assert bool(plan.masks["0.weight"].flatten()[size.flatten().argmax()])
    assert plan.criterion == "middle_first"
    assert plan.tighten(bnn, bl.Budget(sparsity=0.8)).criterion == "middle_first"
    pruned = bl.prune(bnn, plan)
    bl.save(pruned, tmp_path / "saved")
    assert bl.load(tmp_path / "saved", model=network()).plan_.criterion == "middle_first"


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_a_layer(estimator, tmp_path):
    bnn = bayesian(method=bl.Variational(estimator=estimator))
    again = live(bnn, tmp_path)
    assert is_noisy(bnn.model[0])
    assert bnn.model[0].plain is MaskedLinear
    assert type(bnn.mean_network()[0]) is MaskedLinear
    again.train()(X)


@pytest.mark.parametrize(("layer", "estimator"), [(MaskedLinear, "local"), (Pointwise, "flipout"), (Reversed, "local")])
def test_noise_of_a_layer_has_the_variance_of_its_outputs(layer, estimator):
    model = layer(3, 2)
    bnn = bayesian(model, bl.Variational(estimator=estimator, family=bl.families.DiagonalGaussian(0.5)), num_data=2)
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0]])
    torch.manual_seed(0)
    many, calls = (4000, 1) if estimator == "local" else (1, 4000)  # local noise is drawn for every example
    draws = torch.cat([bnn.train()(x.repeat(many, 1)).view(many, 2, 2) for _ in range(calls)])
    assert is_noisy(bnn.model)
    slopes = torch.autograd.functional.jacobian(lambda w: functional_call(model, {"weight": w}, (x,)), model.weight)
    variance = 0.25 * slopes.square().sum((-2, -1))
    assert torch.allclose(draws.mean(0), model(x), atol=0.12)
    assert torch.allclose(draws.var(0), variance, rtol=0.12)


def test_a_noisy_layer_is_copied_and_pickled():
    bnn = bayesian()
    bnn.fit(BATCHES, epochs=1, seed=0)
    for model in (copy.deepcopy(bnn.model), pickle.loads(pickle.dumps(bnn.model))):
        assert type(model[0]) is type(bnn.model[0])
        assert torch.equal(model.eval()(X), bnn.model.eval()(X))


def test_a_layer_that_is_not_as_declared_is_refused():
    bnn = bayesian(network(Doubled))
    with pytest.raises(UnsupportedModel, match=r"Doubled is declared linear.*not the variance"):
        bnn.fit(BATCHES, epochs=1)


def test_only_classes_of_layers_are_declared():
    with pytest.raises(TypeError, match=r"decorates a subclass of torch\.nn\.Module"):
        bl.linear_in_parameters(F.linear)


def test_a_subclass_of_a_declared_layer_is_drawn_whole():
    class Other(MaskedLinear):
        pass

    bnn = bayesian(network(Other))
    bnn.fit(BATCHES, epochs=1, seed=0)
    assert not is_noisy(bnn.model[0])
    assert is_noisy(bnn.model[2])
