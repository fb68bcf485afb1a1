"""Steps that are compiled or replayed as CUDA graphs train as eager ones do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import bayeslim as bl
from bayeslim.train.captured_step import step_of
from bayeslim.train.step import Meter, Step

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax:UserWarning"),  # Inductor of torch 2.11
]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")

METHODS: dict[str, tuple[Any, Any]] = {
    "shared": (bl.Variational(estimator="shared"), None),
    "local": (bl.Variational(), None),
    "flipout": (bl.Variational(estimator="flipout"), None),
    "two draws": (bl.Variational(samples=2, estimator="shared"), None),
    "warm-up": (bl.Variational(kl_schedule=bl.schedules.Warmup(2)), None),
    "blundell": (bl.Variational(kl_schedule=bl.schedules.Blundell()), bl.priors.ScaleMixture()),
    "renyi": (bl.Variational(renyi=0.5, samples=2), None),
    "low rank": (bl.Variational(bl.families.LowRankGaussian(2)), None),
    "mixture": (bl.Variational(bl.families.MixtureOfGaussians(2)), None),
    "sparse": (bl.Variational(bl.families.SparseGaussian()), bl.priors.LogUniform()),
    "gates": (bl.Variational(gates=bl.gates.NormalJeffreys()), None),
    "hard concrete": (bl.Variational(bl.families.Point(), gates=bl.gates.HardConcrete()), None),
    "learned prior": (bl.Variational(), bl.priors.Normal(1.0, learn=True)),
    "student": (bl.Variational(), bl.priors.StudentT()),
    "ivon": (bl.IVON(), None),
    "sgld": (bl.SGLD(samples=3), None),
    "sghmc": (bl.SGHMC(samples=3), None),
    "ensemble": (bl.DeepEnsemble(2, together=False), None),
    "vmapped ensemble": (bl.DeepEnsemble(2, together=True), None),
    "swag": (bl.SWAG(), None),
    "dropout": (bl.MCDropout(), None),
}


def data(device: str, rows: int = 100) -> bl.data.Loader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 6, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return bl.data.Loader(x, y, batch_size=16, device=device)  # of 100, the last batch has four rows


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))


def trained(
    method: Any, prior: Any, compile: Any, device: str = "cuda", rows: int = 100, **options: Any
) -> tuple[Any, Any]:
    bnn = bl.bayesianize(network(), method, likelihood=bl.likelihoods.Categorical(), prior=prior)
    options = {"epochs": 6, "lr": 1e-2, "progress": False, **options}
    with torch.random.fork_rng([0] if device == "cuda" else []):
        result = bnn.fit(data(device, rows), compile=compile, device=device, seed=3, **options)
    return bnn, result


@needs_gpu
@pytest.mark.parametrize("name", METHODS)
def test_a_replayed_step_trains_as_an_eager_one(name: str, caplog: pytest.LogCaptureFixture) -> None:
    method, prior = METHODS[name]
    with caplog.at_level(logging.INFO, "bayeslim"):
        fast, ours = trained(method, prior, "auto")
    slow, theirs = trained(method, prior, False)
    assert not caplog.records, caplog.text
    for one, other in zip(ours.history, theirs.history, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    for one, other in zip(fast.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    assert fast.step == slow.step


@needs_gpu
@pytest.mark.parametrize("name", ["shared", "ivon", "ensemble"])
def test_rates_decay_in_a_graph(name: str) -> None:
    runs = []
    for compile in ("auto", False):
        bnn, _ = trained(*METHODS[name], compile, epochs=20, lr=0.05, lr_schedule="linear", clip=0.5)
        runs.append(torch.cat([p.flatten() for p in bnn.parameters()]))
    torch.testing.assert_close(*runs, rtol=1e-2, atol=1e-3)


@needs_gpu
@pytest.mark.parametrize("name", ["local", "ivon", "sgld"])
def test_an_interrupted_run_resumes_exactly(name: str, tmp_path: Any) -> None:
    method, prior = METHODS[name]

    class Stop(Exception):
        pass

    def interrupt(epoch: Any) -> None:
        if epoch.number == 4:
            raise Stop

    whole, _ = trained(method, prior, "auto", epochs=8, checkpoint=tmp_path / "whole")
    with pytest.raises(Stop):
        trained(method, prior, "auto", epochs=8, checkpoint=tmp_path / "parts", callbacks=[interrupt])
    parts, result = trained(method, prior, "auto", epochs=8, checkpoint=tmp_path / "parts")
    assert result.resumed_from == 3
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@needs_gpu
def test_zeros_stay_zero_in_a_graph() -> None:
    bnn, _ = trained(*METHODS["shared"], "auto", epochs=2)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5))
    tuned = bl.fine_tune(pruned, data("cuda"), epochs=4, progress=False)
    for name, mask in tuned.masks.items():
        weight = tuned.model.get_parameter(name)
        assert bool((weight[~mask] == 0).all())
        assert not torch.equal(weight, pruned.model.get_parameter(name))


@needs_gpu
def test_a_pruned_posterior_trains_in_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    bnn, _ = trained(*METHODS["local"], "auto", epochs=2)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5))
    with caplog.at_level(logging.INFO, "bayeslim"):
        pruned.fit(data("cuda"), epochs=4, progress=False)
    assert not caplog.records, caplog.text
    assert all(bool((pruned.model.get_parameter(n)[~mask] == 0).all()) for n, mask in pruned.masks.items())


@needs_gpu
def test_a_step_that_needs_the_cpu_runs_eagerly_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    class Peeks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * (1.0 if float(x.sum()) > 0 else 2.0)

    torch.manual_seed(0)
    model = Peeks()
    with caplog.at_level(logging.INFO, "bayeslim"):
        for compile in ("auto", False):
            bnn = bl.bayesianize(model, bl.Variational(), likelihood=bl.likelihoods.Categorical())
            bnn.fit(data("cuda"), epochs=6, device="cuda", seed=1, compile=compile, progress=False)
            weights = bnn.model.layer.weight.detach().clone()
            if compile == "auto":
                assert "runs eagerly" in caplog.text
                first = weights
    torch.testing.assert_close(first, weights)
    captured, _ = trained(*METHODS["local"], "auto")  # the failed capture left nothing behind
    eager, _ = trained(*METHODS["local"], False)
    torch.testing.assert_close(captured.model[0].weight, eager.model[0].weight, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["shared", "local", "dropout"])
def test_a_compiled_step_trains_as_an_eager_one(name: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    one, other = (trained(*METHODS[name], compile, device, rows=96)[0] for compile in (True, False))  # one shape
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def test_a_compiled_loss_is_not_compiled_again_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, options, **rest: compiler(module, backend=backend, **rest))
    bnn = bl.bayesianize(network(), bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=16)
    step = Step(bnn, bnn.objective, bnn.optimizer(), torch.device("cpu"), None, torch.bfloat16, False, compiles=True)
    batch = torch.randn(16, 6), torch.randint(2, (16,))
    for _ in range(3):
        step(batch, 1, True)
    compiled = len(graphs)
    monkeypatch.setattr("bayeslim.train.step.is_capturing", lambda: True)
    step(batch, 1, True)
    assert 0 < compiled == len(graphs)


def test_a_compiled_run_is_resumed_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, options, **rest: compiler(module, backend="eager", **rest))

    def fitted(**options: Any) -> bl.Bayesian:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        bnn = bl.bayesianize(net, bl.Variational(), likelihood=bl.likelihoods.Categorical())
        bnn.fit(data("cpu", 48), epochs=2, lr=0.05, seed=3, compile=True, progress=False, **options)
        return bnn

    def interrupt(epoch: Any) -> None:
        if epoch.number == 2:
            raise KeyboardInterrupt

    whole = fitted()
    with pytest.raises(KeyboardInterrupt):
        fitted(checkpoint=tmp_path, callbacks=[interrupt])
    resumed = fitted(checkpoint=tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    )


def test_every_network_is_compiled_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    counter, compiler = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, options, **rest: compiler(module, backend=counter, **rest))
    with torch._dynamo.config.patch(recompile_limit=1):
        for width in (3, 4, 5):
            net = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 2))
            bnn = bl.bayesianize(net, METHODS["shared"][0], likelihood=bl.likelihoods.Categorical())
            bnn.fit(data("cpu", 48), epochs=1, compile=True, progress=False)
    assert counter.frame_count == 3


@needs_gpu
def test_a_compiled_step_in_bfloat16_is_replayed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bayeslim"):
        _, result = trained(*METHODS["shared"], True, rows=96, epochs=12, autocast=torch.bfloat16)
    assert "runs eagerly" not in caplog.text
    assert result.history[-1]["nll"] < result.history[0]["nll"]


def test_on_a_cpu_nothing_changes() -> None:
    one, _ = trained(*METHODS["local"], "auto", "cpu", epochs=2)
    other, _ = trained(*METHODS["local"], False, "cpu", epochs=2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("compile", ["yes", 1.5, "always"])
def test_another_value_is_refused(compile: Any) -> None:
    with pytest.raises(ValueError, match='compile must be "auto", True or False'):
        trained(*METHODS["local"], compile, "cpu")


def test_accumulated_gradients_are_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    bnn = bl.bayesianize(network(), bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=10)
    step = Step(bnn, bnn.objective, bnn.optimizer(), torch.device("cpu"), None, None, False)
    step.device = torch.device("cuda")
    with caplog.at_level(logging.INFO, "bayeslim"):
        assert step_of(step, "auto", accumulate=2) is step
    assert "accumulate=2" in caplog.text
    assert isinstance(step.meter, Meter)
