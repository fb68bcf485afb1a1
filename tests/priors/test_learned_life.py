"""Learned hyperparameters live as parameters do: trained, copied, moved, saved, resumed, pruned, compiled, shared."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import distributions as D
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl
from bayeslim import priors
from bayeslim.errors import BayeslimError, UnsupportedModel

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3
CASES = {
    "normal": priors.Normal(1.0, learn=True),
    "closed form": priors.Normal(1.0, learn="closed form"),
    "laplace": priors.per_layer(priors.Laplace(0.5, learn=True, hyperprior=D.HalfCauchy(1.0))),
    "laplace closed form": priors.per_parameter(priors.Laplace(0.5, learn="closed form")),
    "mixture": priors.ScaleMixture(0.5, 1.0, 0.1, learn=True, samples=2, hyperprior={"pi": D.Beta(2.0, 2.0)}),
    "student": {"0": priors.StudentT(3.0, learn="df"), "all": priors.Normal(0.5)},
    "rows": {"0.weight": priors.Normal(torch.ones(5, 1), learn=True), "all": priors.LogUniform()},
    "cauchy": priors.Distribution(D.Cauchy(0.0, 1.0), learn=True, hyperprior=priors.Normal(1.0)),
}


@pytest.fixture(params=CASES)
def prior(request):
    return CASES[request.param]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def network(prior, seed: int = 0, **options) -> bl.Bayesian:
    torch.manual_seed(seed)
    likelihood = bl.likelihoods.Categorical()
    return bl.bayesianize(model(), bl.Variational(), likelihood=likelihood, prior=prior, num_data=len(X), **options)


def loader() -> DataLoader:
    return DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True)


def hyperparameters(bnn: bl.Bayesian) -> dict[str, torch.Tensor]:
    return {name: value for name, value in bnn.state_dict().items() if name.startswith("prior:")}


def assert_same(a: bl.Bayesian, b: bl.Bayesian) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert repr(a.priors) == repr(b.priors)


def test_training_moves_them(prior):
    bnn = network(prior)
    before = {name: value.clone() for name, value in hyperparameters(bnn).items()}
    assert before
    bnn.fit(loader(), epochs=2, lr=0.05)
    after = hyperparameters(bnn)
    assert all(torch.isfinite(value).all() for value in after.values())
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_save_and_load(prior, tmp_path):
    bnn = network(prior)
    bnn.fit(loader(), epochs=1, lr=0.05)
    bl.save(bnn, tmp_path / "bnn")
    again = bl.load(tmp_path / "bnn", model=model())
    assert_same(bnn, again)
    assert repr(again.priors.given) == repr(bnn.priors.given)
    assert again.priors.shared() == bnn.priors.shared()
    for one in (bnn, again):
        one.fit(loader(), epochs=1, lr=0.05, seed=3)
    assert_same(bnn, again)


def test_a_checkpoint_resumes_exactly(prior, tmp_path):
    class Stop(BaseException):
        pass

    def stop(epoch):
        raise Stop

    whole, parts = network(prior), network(prior)
    whole.fit(loader(), epochs=3, lr=0.05, seed=5)
    for _ in range(2):
        with pytest.raises(Stop):
            parts.fit(loader(), epochs=3, lr=0.05, seed=5, checkpoint=tmp_path, callbacks=[_after(2, stop)])
        parts = network(prior)
    fit = parts.fit(loader(), epochs=3, lr=0.05, seed=5, checkpoint=tmp_path)
    assert fit.resumed_from == 1
    assert_same(whole, parts)


def _after(number: int, call):
    return lambda epoch: call(epoch) if epoch.number == number else None


def test_a_checkpoint_of_another_start_is_refused(tmp_path):
    network(priors.Normal(1.0, learn=True)).fit(loader(), epochs=1, checkpoint=tmp_path)
    for other in (priors.Normal(2.0, learn=True), priors.Normal(1.0)):
        with pytest.raises(BayeslimError, match="priors differs"):
            network(other).fit(loader(), epochs=1, checkpoint=tmp_path)


def test_deepcopy_is_equal_and_independent(prior):
    bnn = network(prior)
    bnn.loss((X, Y)).backward()
    twin = copy.deepcopy(bnn)
    assert_same(bnn, twin)
    assert twin.priors.learned is twin.hyperparameters
    before = {name: value.clone() for name, value in hyperparameters(bnn).items()}
    twin.fit(loader(), epochs=1, lr=0.05)
    assert all(torch.equal(before[name], value) for name, value in hyperparameters(bnn).items())
    assert all(not torch.equal(before[name], value) for name, value in hyperparameters(twin).items())


def test_state_dicts_nested_in_another_module(prior):
    outer, other = nn.ModuleDict({"bnn": network(prior)}), nn.ModuleDict({"bnn": network(prior, seed=1)})
    outer["bnn"].fit(loader(), epochs=1, lr=0.05)
    assert any(name.startswith("bnn.prior:0.raw_") for name in outer.state_dict())
    other.load_state_dict(outer.state_dict())
    assert_same(outer["bnn"], other["bnn"])
    loaded = network(prior, seed=2)
    loaded.load_state_dict(outer["bnn"].state_dict())
    assert_same(outer["bnn"], loaded)


def test_moves_change_type_and_keep_values(prior):
    bnn = network(prior)
    before = repr(bnn.priors)
    bnn.double()
    assert all(value.dtype == torch.float64 for value in hyperparameters(bnn).values())
    assert repr(bnn.priors)[:12] == before[:12]
    optimizer = bnn.optimizer(0.05)
    bnn.loss((X.double(), Y)).backward()
    optimizer.step()
    assert all(torch.isfinite(value).all() for value in hyperparameters(bnn).values())


def test_nothing_stays_behind_on_another_device(prior, monkeypatch):
    """Tensors without values take part in no operation with others."""
    monkeypatch.setattr("bayeslim.bayesian.check_device", lambda *_: None)  # it refuses the meta device
    bnn = network(prior, sites="all").to("meta")
    loss = bnn.loss((X.to("meta"), Y.to("meta")))
    loss.backward()
    assert loss.device.type == "meta"
    assert all(p.grad.device.type == "meta" for p in bnn.parameters())
    bnn._maximise_priors()
    assert all(value.device.type == "meta" for value in hyperparameters(bnn).values())


def test_half_precision_networks_learn_in_single():
    torch.manual_seed(0)
    bnn = bl.bayesianize(
        model().bfloat16(), bl.Variational(), likelihood=bl.likelihoods.Categorical(),
        prior=priors.Normal(0.3, learn=True), num_data=24,
    )  # fmt: skip
    bnn.loss((X.bfloat16(), Y)).backward()
    (raw,) = bnn.hyperparameters.parameters()
    assert raw.dtype == torch.float32
    assert torch.isfinite(raw.grad).all()


def test_pruning_scoring_and_learning_on(prior):
    bnn = network(prior)
    bnn.fit(loader(), epochs=1)
    improper = not all(p.is_proper for p in bnn.priors.values())
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5), criterion="snr" if improper else "savage_dickey")
    pruned.fit(loader(), epochs=1, lr=0.05)
    assert all(not torch.equal(value, hyperparameters(bnn)[n]) for n, value in hyperparameters(pruned).items())
    assert torch.isfinite(pruned.terms.kl)
    later = bl.continual.update(bnn, loader(), epochs=1)
    assert not hyperparameters(later)
    torch.testing.assert_close(later.priors["0.weight"].mean, bnn.posterior_.mean["0.weight"])


def test_evidence_and_prediction_leave_no_trace(prior):
    bnn = network(prior)
    bnn.fit(loader(), epochs=1)
    before = {name: value.clone() for name, value in bnn.state_dict().items()}
    if all(p.is_proper for p in bnn.priors.values()):
        found = bl.log_evidence(bnn, loader(), samples=3)
        assert found.value < 0
    bl.predict(bnn, X, samples=2)
    assert all(torch.equal(before[name], value) for name, value in bnn.state_dict().items())
    assert all(p.grad is None for p in bnn.parameters())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_loss_agrees():
    torch._dynamo.reset()
    every = {
        "0.weight": priors.ScaleMixture(learn=True, hyperprior={"pi": D.Beta(2.0, 2.0)}),
        "0.bias": priors.LogUniform(),
        "2.weight": priors.Distribution(D.Cauchy(0.0, 1.0), learn=True, hyperprior=priors.Normal(1.0)),
        "2.bias": priors.Laplace(learn="closed form"),
    }
    bnn = network(every, sites="all")
    bnn.loss((X, Y))
    found = []
    for objective in (torch.compile(bnn.objective, fullgraph=True, backend="eager"), bnn.objective):
        bnn.zero_grad()
        torch.manual_seed(2)
        loss = objective((X, Y))
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in bnn.parameters())])
    torch.testing.assert_close(*found)
    torch._dynamo.reset()


def test_distributed_training_reaches_them(prior, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        bnn, plain = network(prior), network(prior)
        wrapped = DistributedDataParallel(bnn.objective)
        for objective, own in ((wrapped, bnn), (plain.objective, plain)):
            optimizer = own.optimizer(0.05)
            for step in range(2):
                torch.manual_seed(step)
                optimizer.zero_grad()
                objective((X, Y)).backward()
                optimizer.step()
        assert_same(bnn, plain)
    finally:
        dist.destroy_process_group()


def test_closed_forms_follow_every_step():
    bnn = network(priors.Normal(7.0, learn="closed form"))
    optimizer = bnn.optimizer(0.1)
    for _ in range(3):
        q = bnn.posterior_
        squares = torch.cat([(q.mean[n].square() + q.variance[n]).flatten() for n in bnn.sites.names])
        assert bnn.priors["0.weight"].std.item() == pytest.approx(squares.mean().sqrt().item(), rel=1e-6)
        assert bnn.priors["0.weight"].std.requires_grad is False
        bnn.loss((X, Y)).backward()
        optimizer.step()


def test_what_is_learned_can_be_read_and_replaced():
    bnn = network(priors.Normal(0.25, learn=True))
    assert bnn.priors["0.weight"].std.item() == pytest.approx(0.25)
    assert repr(bnn.priors["0.weight"]) == "Normal(std=0.25, mean=0.0)"
    assert repr(bnn.priors.given["0.weight"]) == "Normal(std=0.25, mean=0.0, learn=True)"
    assert set(bnn.priors) == {"0.weight", "2.weight"}
    assert isinstance(bnn.priors["0.weight"], priors.Normal)
    bnn.priors["0.weight"] = priors.Normal(3.0)
    assert len(bnn.hyperparameters) == 1
    bnn.priors["2.weight"] = priors.Normal(3.0)
    assert len(bnn.hyperparameters) == 0
    bnn.loss((X, Y)).backward()
    assert all(p.grad is not None for p in bnn.parameters())
    with pytest.raises(ValueError, match="takes a fixed prior"):
        bnn.priors["0.weight"] = priors.Normal(1.0, learn=True)
    with pytest.raises(ValueError, match="takes a fixed prior"):
        bnn.priors["nowhere"] = priors.Normal(1.0)
    bnn.priors = dict(bnn.priors) | {"0.weight": priors.Normal(1.0, learn=True)}
    assert list(hyperparameters(bnn)) == ["prior:0.raw_std"]


def test_a_learned_prior_given_to_another_network_is_a_number_there():
    first = network(priors.Normal(0.25, learn=True))
    second = network(first.priors["0.weight"])
    for _ in range(2):
        second.loss((X, Y)).backward()
    assert not len(second.hyperparameters)
    assert all(p.grad is None for p in first.parameters())


BAD = [
    (lambda: priors.Normal(1.0, learn="width"), ValueError, "some of std, mean"),
    (lambda: priors.Normal(1.0, learn=3), ValueError, "learn must be"),
    (lambda: priors.Normal(1.0, learn=("std", "df")), ValueError, "some of std, mean"),
    (lambda: priors.StudentT(learn="closed form"), ValueError, "no hyperparameter with a closed form"),
    (lambda: priors.Normal(learn="closed form", hyperprior=D.HalfCauchy(1.0)), ValueError, "without a hyperprior"),
    (lambda: priors.Normal(hyperprior=D.HalfCauchy(1.0)), ValueError, "learns none"),
    (lambda: priors.StudentT(learn=True, hyperprior=D.HalfCauchy(1.0)), ValueError, "a dict by name"),
    (lambda: priors.Normal(learn=True, hyperprior={"mean": D.Normal(0.0, 1.0)}), ValueError, "not learned"),
    (lambda: priors.Normal(learn=True, hyperprior=1.0), TypeError, "hyperprior must be"),
    (lambda: priors.per_layer(priors.Normal(1.0)), ValueError, "per_layer needs a prior that is learned"),
    (lambda: priors.per_parameter(priors.LogUniform()), ValueError, "per_parameter needs"),
]


@pytest.mark.parametrize(("build", "error", "words"), BAD)
def test_bad_settings_are_refused(build, error, words):
    with pytest.raises(error, match=words):
        build()


def test_methods_that_cannot_learn_a_prior_say_so():
    likelihood = bl.likelihoods.Categorical()
    learned, closed = priors.Normal(1.0, learn=True), priors.Normal(1.0, learn="closed form")
    with pytest.raises(UnsupportedModel, match=r'laplace does not learn priors.*tune="evidence"'):
        bl.bayesianize(model(), bl.Laplace(), likelihood=likelihood, prior=learned)
    renyi = bl.Variational(renyi=0.5, samples=2)
    with pytest.raises(UnsupportedModel, match=r"not the optimum.*learn=True"):
        bl.bayesianize(model(), renyi, likelihood=likelihood, prior=closed)
    bnn = bl.bayesianize(model(), renyi, likelihood=likelihood, prior=learned, num_data=24)
    bnn.loss((X, Y)).backward()
    (raw,) = bnn.hyperparameters.parameters()
    assert raw.grad.abs().item() > 0
    for other in (
        priors.Laplace(1.0),
        priors.ScaleMixture(),
        priors.StudentT(),
        priors.Distribution(D.Normal(0.0, 1.0)),
    ):
        with pytest.raises(UnsupportedModel, match=f"needs a Normal prior.*{type(other).__name__}"):
            bl.bayesianize(model(), bl.Laplace(), likelihood=likelihood, prior=other)
