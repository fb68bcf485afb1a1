"""Networks trained side by side are those that are trained one by one."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.errors import BayeslimError, UnsupportedModel
from bayeslim.families import DropoutGaussian, LowRankGaussian, MixtureOfGaussians, Point, SparseGaussian
from bayeslim.gates import HardConcrete, NormalJeffreys
from bayeslim.methods.sgnht import Thermostat
from bayeslim.methods.shared.abreast import AbreastLoader, Stack
from bayeslim.posteriors.particles import tensors_of
from bayeslim.priors import Laplace, LogUniform, Normal, RelevanceDetermination, ScaleMixture, per_layer

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long() + (X[:, 0] > 1).long()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def some(method: bl.Method, priors, make=network, likelihood=None) -> list[bl.Bayesian]:
    torch.manual_seed(0)
    likelihood = bl.likelihoods.Categorical() if likelihood is None else likelihood
    return [bl.bayesianize(make(), method, likelihood=likelihood, prior=prior) for prior in priors]


def in_order(x=X, y=Y) -> bl.data.Loader:
    return bl.data.Loader(x, y, batch_size=25, shuffle=False)


OPTIONS = {"epochs": 3, "lr": 0.02, "seed": 0, "progress": False}


@pytest.mark.parametrize(
    ("method", "priors", "make"),
    [
        (bl.Variational(estimator="mean"), [Normal(0.7), Normal(0.1)], network),
        (bl.Variational(Point()), [Laplace(0.7), Laplace(2.0)], normed),
        (bl.Variational(estimator="mean", kl_schedule=bl.schedules.Blundell()), [Normal(1.0, learn=True)] * 2, network),
        (bl.Variational(SparseGaussian(), estimator="mean"), [LogUniform()] * 2, network),
    ],
    ids=["own priors", "batch norm", "learned prior, schedule", "sparse"],
)
def test_without_noise_each_network_learns_as_it_does_alone(method, priors, make):
    together = some(method, priors, make)
    alone = copy.deepcopy(together)
    found = bl.fit_together(together, in_order(), **OPTIONS)
    losses = [bnn.fit(in_order(), **OPTIONS).history[-1]["loss"] for bnn in alone]
    assert found.history[-1]["loss"] == pytest.approx(sum(losses) / 2, rel=1e-4)
    for one, other in zip(together, alone, strict=True):
        assert one.step == other.step == 9
        for name, tensor in tensors_of(other).items():
            torch.testing.assert_close(tensors_of(one)[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    apart = together[0].model[0].weight - together[1].model[0].weight
    assert float(apart.detach().abs().min()) > 0


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (bl.Laplace(), {}),
        (bl.Snapshot(3), {}),
        (bl.SWA(start=0.0, every=2), {}),
        (bl.SWAG(start=0.0, every=2, samples=2), {}),
        (bl.SGLD(samples=3, temperature=1e-20), {}),
        (bl.PSGLD(samples=3, temperature=1e-20), {}),
        (bl.SGHMC(samples=3, temperature=1e-20), {}),
        (bl.SGHMC(samples=3, temperature=1e-20, adapt=True), {"lr": 1e-3}),
        (bl.SGNHT(samples=3, temperature=1e-20), {}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.parametrize("make", [network, normed])
def test_seeds_of_methods_that_do_more_than_descend_have_the_posteriors_they_have_alone(method, options, make):
    together = some(method, [Normal(1.0)] * 2, make)
    alone = copy.deepcopy(together)
    bl.fit_together(together, in_order(), **OPTIONS | options)
    for one, other in zip(together, alone, strict=True):
        other.fit(in_order(), **OPTIONS | options)
        assert one.step == other.step
        for name, tensor in tensors_of(other).items():
            torch.testing.assert_close(tensors_of(one)[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
        for own, its in ((one.posterior_.mean, other.posterior_.mean), (one.posterior_.std, other.posterior_.std)):
            for name, tensor in its.items():
                torch.testing.assert_close(own[name], tensor, rtol=1e-2, atol=1e-4, msg=name)
        same = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
        probs = [
            bl.predict(bnn, X[:9], samples=5, generator=g).probs for bnn, g in zip((one, other), same, strict=True)
        ]
        if not (isinstance(method, bl.SWAG) and make is normed):  # which draws its networks at the end of training
            torch.testing.assert_close(*probs, rtol=1e-2, atol=1e-3)
    assert float((together[0].posterior_.mean["0.weight"] - together[1].posterior_.mean["0.weight"]).abs().min()) > 0


def test_every_stacked_network_has_a_thermostat_of_its_own(monkeypatch):
    monkeypatch.setattr(Thermostat, "noise", lambda self, params: [torch.zeros_like(p) for p in params])
    weights = [torch.randn(2, 3), torch.randn(2)]
    gradients = [[torch.randn(2, 3), torch.randn(2)] for _ in range(20)]
    settings = {"lr": 0.1, "num_data": 10}
    stacked = [nn.Parameter(w.clone()) for w in weights]
    together = Thermostat(stacked, networks=2, **settings)
    apart = [[nn.Parameter(w[k].clone()) for w in weights] for k in range(2)]
    each = [Thermostat(own, **settings) for own in apart]
    for step in gradients:
        for p, gradient in zip(stacked, step, strict=True):
            p.grad = gradient.clone()
        together.step()
        for k, own in enumerate(apart):
            for p, gradient in zip(own, step, strict=True):
                p.grad = gradient[k].clone()
            each[k].step()
    friction = together.friction_of(together.param_groups[0])
    assert friction.tolist() == pytest.approx([t.present_friction(t.param_groups[0]) for t in each])
    assert float((friction[0] - friction[1]).abs()) > 1e-3
    for k, own in enumerate(apart):
        for p, one in zip(stacked, own, strict=True):
            torch.testing.assert_close(p[k], one)


@pytest.mark.parametrize(
    "method",
    [bl.DeepEnsemble(3, together=True), bl.SVGD(3), bl.MCBatchNorm(4), bl.Subspace(2, inner=bl.Laplace(), draws=4000)],
    ids=lambda method: method.name,
)
def test_methods_of_several_networks_have_the_posterior_they_have_alone(method):
    make = normed if isinstance(method, bl.MCBatchNorm) else network
    together = some(method, [Normal(1.0)] * 2, make)
    alone = copy.deepcopy(together[0])  # the second draws its starts after the first
    options = OPTIONS | {"epochs": 10}
    found = bl.fit_together(together, in_order(), **options)
    result = alone.fit(in_order(), **options)
    assert len(found.history) == len(result.history) == 10
    assert found.history[-1]["loss"] == pytest.approx(result.history[-1]["loss"], rel=0.1)
    one, other = together[0].posterior_, alone.posterior_
    assert one.count == other.count
    few = 0.1 if isinstance(method, bl.Subspace) else 1e-3  # its draws from a Gaussian are others
    for own, its in ((one.mean, other.mean), (one.std, other.std)):
        for name, tensor in its.items():
            torch.testing.assert_close(own[name], tensor, rtol=few, atol=few / 10, msg=name)
    assert float((one.mean["0.weight"] - together[1].posterior_.mean["0.weight"]).abs().min()) > 0
    probs = [bl.predict(bnn, X[:9]).probs for bnn in (together[0], alone)]
    torch.testing.assert_close(*probs, rtol=few, atol=few)


def test_the_modes_of_multi_swag_are_those_of_training_alone(monkeypatch):
    for module in ("shared.members", "multi_swag"):
        monkeypatch.setattr(f"bayeslim.methods.{module}.reinitialise_", lambda *_: None)
    method = bl.MultiSWAG(members=2, samples=3, start=0.0, every=2, scale=1e-20)
    together = some(method, [Normal(1.0)] * 2, normed)
    alone = copy.deepcopy(together)
    bl.fit_together(together, in_order(), **OPTIONS)
    for one, other in zip(together, alone, strict=True):
        other.fit(in_order(), **OPTIONS)
        assert one.posterior_.count == other.posterior_.count == 6
        for name, tensor in other.posterior_.mean.items():
            torch.testing.assert_close(one.posterior_.mean[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
        probs = [bl.predict(bnn, X[:9]).probs for bnn in (one, other)]
        torch.testing.assert_close(*probs, rtol=1e-2, atol=1e-3)


def test_modes_of_stacked_ensembles_have_starts_of_their_own():
    networks = some(bl.MultiSWAG(members=2, samples=2, start=0.0, every=2), [Normal(1.0)] * 2)
    bl.fit_together(networks, in_order(), **OPTIONS)
    every = torch.cat([bnn.posterior_.values["0.weight"].flatten(1) for bnn in networks])
    assert float(torch.pdist(every).min()) > 1e-3


def test_ensembles_that_cannot_be_stacked_are_refused():
    fitted = some(bl.DeepEnsemble(2), [Normal(1.0)] * 2)
    bl.fit_together(fitted, in_order(), **OPTIONS)
    with pytest.raises(UnsupportedModel, match="go on one by one"):
        bl.fit_together(fitted, in_order(), **OPTIONS)
    with pytest.raises(UnsupportedModel, match="adversarial"):
        bl.fit_together(some(bl.DeepEnsemble(2, adversarial=0.1), [Normal(1.0)] * 2, normed), in_order(), epochs=1)
    with pytest.raises(UnsupportedModel, match="function_space"):
        bl.fit_together(some(bl.SVGD(2, function_space=True), [Normal(1.0)] * 2), in_order(), epochs=1)


@pytest.mark.parametrize("method", [bl.IVON(), bl.SGLD(samples=4), bl.SGHMC(samples=4)], ids=lambda m: m.name)
def test_the_default_rate_fits_noise_that_each_network_learns(method):
    values = X.sum(1, keepdim=True)
    networks = some(method, [Normal(1.0)] * 2, lambda: nn.Linear(3, 1), bl.likelihoods.Gaussian("learned"))
    bl.fit_together(networks, bl.data.Loader(X, values, batch_size=20), epochs=200, seed=0, progress=False)
    for bnn in networks:
        assert float((bl.predict(bnn, X).mean - values).square().mean()) < 0.05 * float(values.var())


def test_every_chain_of_a_stack_has_noise_of_its_own():
    start, *_ = some(bl.SGLD(samples=20), [Normal(1.0)])
    networks = [start, copy.deepcopy(start)]
    bl.fit_together(networks, in_order(), epochs=20, lr=0.02, seed=0, progress=False)
    one, other = (bnn.posterior_.values["0.weight"].flatten(1) for bnn in networks)
    assert len(one) == 20
    assert float((one - other).abs().min()) > 0
    spread = one.std(0) / other.std(0)
    assert 0.3 < float(spread.median()) < 3.0


def test_every_network_may_have_data_of_its_own():
    halves = [in_order(X[:30], Y[:30]), in_order(X[30:], Y[30:])]
    together = some(bl.Variational(estimator="mean"), [Normal(1.0)] * 2)
    alone = copy.deepcopy(together)
    bl.fit_together(together, halves, epochs=3, lr=0.02, seed=0, progress=False)
    for network, single, own in zip(together, alone, halves, strict=True):
        assert network.num_data == 30
        single.fit(own, epochs=3, lr=0.02, seed=0, progress=False)
        for name, tensor in tensors_of(single).items():
            torch.testing.assert_close(tensors_of(network)[name], tensor, atol=1e-5, rtol=1e-4)


def test_lists_of_batches_are_loaders():
    parts = [[(X[:30], Y[:30])], [(X[30:], Y[30:])]]
    given, wanted = (some(bl.Variational(estimator="mean"), [Normal(1.0)] * 2) for _ in range(2))
    bl.fit_together(given, parts, epochs=3, lr=0.02, seed=0, progress=False)
    for network, part in zip(wanted, parts, strict=True):
        network.fit(part, epochs=3, lr=0.02, seed=0, progress=False)
    for one, other in zip(given, wanted, strict=True):
        for name, tensor in tensors_of(other).items():
            torch.testing.assert_close(tensors_of(one)[name], tensor, atol=1e-5, rtol=1e-4)
    for batch in ((X, Y), [X, Y], {"input": X, "y": Y}):  # one loader of one batch
        bl.fit_together(some(bl.Variational(), [Normal(1.0)] * 2), [batch], epochs=1, progress=False)


def test_a_subspace_takes_the_options_of_its_inner_sampler():
    networks = some(bl.Subspace(rank=2, snapshots=4, inner=bl.SGLD(samples=3)), [Normal(1.0)] * 2)
    with pytest.raises(TypeError, match="needs inner_epochs"):
        bl.fit_together(networks, in_order(), **OPTIONS)
    bl.fit_together(networks, in_order(), inner_epochs=4, inner_lr=0.1, **OPTIONS)
    assert [bnn.posterior_.count for bnn in networks] == [3, 3]
    with pytest.raises(TypeError, match="no option 'inner_epochs'"):
        bl.fit_together(some(bl.Variational(), [None] * 2), in_order(), epochs=1, inner_epochs=4)


def test_loaders_that_do_not_fit_are_refused():
    networks = some(bl.Variational(), [Normal(1.0)] * 2)
    with pytest.raises(ValueError, match="Got 1 for 2"):
        bl.fit_together(networks, [in_order()], epochs=1)
    with pytest.raises(ValueError, match="2 batches of 40 examples, 3 batches of 60"):
        bl.fit_together(networks, [in_order(), in_order(X[:40], Y[:40])], epochs=1)
    with pytest.raises(ValueError, match="one loader"):
        bl.fit_together(networks, [in_order(), in_order()], epochs=1, checkpoint="run")


@pytest.mark.parametrize("estimator", ["local", "shared", "flipout"])
def test_every_network_has_noise_of_its_own_from_the_same_distribution(estimator):
    count = 400
    (bnn,) = some(bl.Variational(bl.families.DiagonalGaussian(0.5), estimator=estimator), [ScaleMixture(0.3, 1.0, 0.1)])
    bnn.num_data = 60
    batch = X[:10], Y[:10]
    alone = []
    for _ in range(count):
        bnn.loss(batch)
        alone.append(float(bnn.terms.nll))
    alone = torch.tensor(alone)
    stack = Stack.of([bnn] * count)
    stack.loss(tuple(part.expand(count, *part.shape) for part in batch))
    each = float(stack.terms.nll) / count
    assert abs(each - float(alone.mean())) < 5 * float(alone.std()) / count**0.5
    # The variance of the mean of a stack falls with its size only if its networks have noise of their own.
    few = Stack.of([bnn] * 100)
    batches = tuple(part.expand(100, *part.shape) for part in batch)
    means = []
    for _ in range(20):
        few.loss(batches)
        means.append(float(few.terms.nll) / 100)
    assert 0.4 < float(torch.tensor(means).std()) / (float(alone.std()) / 10) < 1.8


@pytest.mark.parametrize(
    ("method", "prior"),
    [
        (bl.Variational(SparseGaussian()), LogUniform()),
        (bl.Variational(DropoutGaussian()), LogUniform("approximate")),
        (bl.Variational(LowRankGaussian(2)), Normal(1.0)),
        (bl.Variational(MixtureOfGaussians(2)), Normal(1.0)),
        (bl.Variational(renyi=0.5, samples=2), ScaleMixture()),
        (bl.Variational(samples=2), per_layer(Normal(1.0, learn=True))),
        (bl.Variational(), RelevanceDetermination()),
        (bl.Variational(gates=NormalJeffreys()), Normal(1.0)),
        (bl.Variational(gates=HardConcrete(), estimator="shared"), Normal(1.0)),
        (bl.IVON(), Normal(1.0)),
    ],
    ids=lambda value: getattr(value, "name", "prior"),
)
def test_every_family_and_gate_trains(method, prior):
    networks = some(method, [prior] * 3)
    before = [float(bnn.model[0].weight.detach().sum()) for bnn in networks]
    result = bl.fit_together(networks, bl.data.Loader(X, Y, batch_size=25), **OPTIONS)
    assert len(result.history) == 3
    assert all(float(bnn.model[0].weight.detach().sum()) != value for bnn, value in zip(networks, before, strict=True))
    for bnn in networks:
        assert bl.predict(bnn, X[:5], samples=2).mean.isfinite().all()
        bnn.fit(in_order(), epochs=1, progress=False)  # each can go on alone


def test_dropout_and_learned_noise_of_a_likelihood():
    def dropping():
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))

    likelihood = bl.likelihoods.Gaussian(noise="learned")
    networks = some(bl.MCDropout(), [Normal(1.0)] * 3, dropping, likelihood)
    bl.fit_together(networks, in_order(X, X[:, :1] * 2), **OPTIONS)
    noises = {float(next(bnn.likelihood.parameters()).detach()) for bnn in networks}
    assert len(noises) == 3


def test_a_large_network_on_a_cpu_has_noise_of_its_own():
    """Large draws on a CPU come from numpy, which knows nothing of vmap."""
    networks = some(bl.Variational(estimator="shared"), [Normal(1.0)] * 2, lambda: nn.Linear(100, 100))
    networks[1].load_state_dict(networks[0].state_dict())
    bl.fit_together(networks, in_order(torch.ones(10, 100), torch.zeros(10).long()), epochs=1, seed=0, progress=False)
    assert not torch.equal(networks[0].model.weight, networks[1].model.weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_a_compiler_traces_the_loss_whole_and_every_network_has_noise_of_its_own():
    gradients = {}
    for estimator in ("mean", "shared"):
        networks = some(bl.Variational(estimator=estimator), [Normal(1.0), Normal(0.5)])
        networks[1].model.load_state_dict(networks[0].model.state_dict())
        stack = Stack.of(networks)
        stack.num_data = 60
        batch = X.expand(2, -1, -1), Y.expand(2, -1)
        stack.loss(batch, kl_weight=0.0).backward()  # settles where noise is drawn
        weight = stack.model[0].weight
        eager, weight.grad = weight.grad, None
        torch.compile(stack.objective, backend="aot_eager", fullgraph=True)(batch, 0.0).backward()
        gradients[estimator] = eager, weight.grad
    torch.testing.assert_close(*gradients["mean"])
    assert torch.equal(*gradients["mean"][1])
    assert not torch.equal(*gradients["shared"][1])


def test_stacked_batches_of_a_loader_are_those_of_its_next_epochs():
    class Plain(bl.data.Loader):
        pass

    fast, slow = (list(AbreastLoader([kind(X, Y, 25, seed=4)] * 3)) for kind in (bl.data.Loader, Plain))
    assert [len(x[0]) for x, _ in fast] == [25, 25, 10]
    for one, other in zip(fast, slow, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Failing:
    """A loader that fails in its third epoch."""

    def __init__(self, loader, passes):
        self.loader, self.left = loader, passes

    def __len__(self):
        return len(self.loader)

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def __iter__(self):
        self.left -= 1
        if self.left < 0:
            raise InterruptedError
        return iter(self.loader)


def test_an_interrupted_run_resumes_exactly_and_leaves_networks_alone(tmp_path):
    def fitted(passes, folder):
        networks = some(bl.Variational(), [Normal(1.0), Normal(0.5)])
        loader = Failing(bl.data.Loader(X, Y, batch_size=25), passes)
        options = {**OPTIONS, "checkpoint": folder}
        if passes < 6:
            before = copy.deepcopy(networks)
            with pytest.raises(InterruptedError):
                bl.fit_together(networks, loader, **options)
            for one, other in zip(networks, before, strict=True):
                assert all(torch.equal(t, tensors_of(other)[n]) for n, t in tensors_of(one).items())
        else:
            bl.fit_together(networks, loader, **options)
        return networks

    whole = fitted(6, tmp_path / "whole")
    fitted(4, tmp_path / "interrupted")
    for one, other in zip(whole, fitted(6, tmp_path / "interrupted"), strict=True):
        assert all(torch.equal(t, tensors_of(other)[n]) for n, t in tensors_of(one).items())
    others = some(bl.Variational(), [Normal(1.0), Normal(0.25)])
    with pytest.raises(BayeslimError, match="another run"):
        bl.fit_together(others, in_order(), **OPTIONS, checkpoint=tmp_path / "whole")


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.lstm(x[:, None])[0][:, -1])


@pytest.mark.parametrize(
    ("networks", "options", "words"),
    [
        (lambda: some(bl.HMC(2, 2), [None] * 2), {"checkpoint": "run"}, "holds one network"),
        (lambda: some(bl.HMC(2, 2), [None] * 2, Recurrent), {}, "cannot run under vmap"),
        (lambda: some(bl.SGLD(chains=2), [None] * 2), {}, "one chain each"),
        (lambda: some(bl.SWAG(), [None] * 2), {"checkpoint": "run"}, "holds one network"),
        (lambda: some(bl.Variational(), [Normal(1.0), Laplace(1.0)]), {}, "the same kinds of priors"),
        (lambda: some(bl.Variational(), [None]) + some(bl.Variational(samples=2), [None]), {}, "the same method"),
        (lambda: some(bl.Variational(), [None]) + some(bl.Variational(), [None], normed), {}, "the same sites"),
        (lambda: some(bl.Variational(), [Normal(learn="closed form")] * 2), {}, "closed form"),
        (lambda: [bl.prune(b, bl.Budget(sparsity=0.5)) for b in some(bl.Variational(), [None] * 2)], {}, "pruned"),
        (lambda: some(bl.Variational(estimator="shared"), [None] * 2, Recurrent), {}, "cannot run under vmap"),
        (lambda: some(bl.Variational(), [None] * 2), {"validate": [0]}, "it measures one network"),
        (lambda: some(bl.Variational(), [None]) * 2, {}, "twice"),
        (list, {}, "at least one"),
    ],
)
def test_what_cannot_be_one_step_is_refused_with_the_reason(networks, options, words):
    with pytest.raises((ValueError, TypeError, UnsupportedModel), match=re.escape(words)):
        bl.fit_together(networks(), in_order(), epochs=1, progress=False, **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize(
    ("method", "prior"),
    [
        (bl.Variational(), Normal(1.0)),
        (bl.Variational(estimator="shared", kl_schedule=bl.schedules.Blundell()), ScaleMixture()),
        (bl.Variational(SparseGaussian()), LogUniform()),
        (bl.Variational(gates=NormalJeffreys()), Normal(1.0, learn=True)),
        (bl.IVON(), Normal(1.0)),
    ],
)
def test_a_replayed_step_trains_as_an_eager_one(method, prior, caplog):
    found = []
    for compile in ("auto", False):
        networks = some(method, [prior] * 3)
        loader = bl.data.Loader(X, Y, batch_size=20, device="cuda")
        with caplog.at_level("INFO", "bayeslim"):
            bl.fit_together(networks, loader, **{**OPTIONS, "epochs": 5}, device="cuda", compile=compile)
        found.append(networks)
    assert not caplog.records, caplog.text
    for one, other in zip(*found, strict=True):
        for name, tensor in tensors_of(other).items():
            torch.testing.assert_close(tensors_of(one)[name], tensor, rtol=1e-2, atol=1e-3, msg=name)
