"""Two processes with `DistributedDataParallel` do what one does with all the data.

The processes are started once; what they find is read by the tests.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bayeslim as bl
from bayeslim.errors import BayeslimWarning
from bayeslim.families import DiagonalGaussian, DropoutGaussian, LowRankGaussian, MixtureOfGaussians, Point
from processes import in_processes

WORLD = 2
WHOLE = {
    "dropout": bl.Variational(DropoutGaussian(0.2, per="unit", largest=1.0), estimator="shared"),
    "gates": bl.Variational(gates=bl.gates.HalfCauchy(initial_std=0.2), estimator="shared"),
    "gated points": bl.Variational(Point(), gates=bl.gates.Bernoulli(), estimator="shared"),
    "lowrank": bl.Variational(LowRankGaussian(2, initial_std=0.2)),
    "mixture": bl.Variational(MixtureOfGaussians(2, initial_std=0.2)),
    "renyi": bl.Variational(DiagonalGaussian(initial_std=0.2), renyi=0.5, samples=2),
}
REPEATS = 60
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(16, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def network(estimator: str, seed: int = 0, dropout: float = 0.0) -> bl.Bayesian:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 2)).double()
    method = WHOLE.get(estimator) or bl.Variational(estimator=estimator, family=DiagonalGaussian(initial_std=0.2))
    return bl.bayesianize(model, method, likelihood=bl.likelihoods.Gaussian("learned"), num_data=len(X))


def gradients(bnn: bl.Bayesian) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in bnn.parameters()])


def weights(bnn: bl.Bayesian) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in bnn.parameters()])


def averaged(objective: nn.Module, bnn: bl.Bayesian, batch) -> torch.Tensor:
    """Many draws of the gradient, (REPEATS, parameters)."""
    draws = []
    for _ in range(REPEATS):
        bnn.zero_grad()
        objective(batch).backward()
        draws.append(gradients(bnn))
    return torch.stack(draws)


def warned(call) -> torch.Tensor:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return torch.tensor(sum("without a DistributedDataParallel wrapper" in str(w.message) for w in caught))


class Stop(BaseException):
    pass


def fitted(rank: int, how: str, folder: Path | None = None, stop_in: int | None = None) -> bl.Bayesian:
    bnn = network("auto", seed=rank, dropout=0.2)  # the ranks start apart; the wrapper brings them together
    if how == "sampler":
        data = TensorDataset(X, Y)
        loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=3))
    else:
        loader = bl.data.Loader(X, Y, batch_size=4, shuffle=True, seed=3, rank=rank, world_size=WORLD)
    scores = ([3.0, 2.0, 1.0], [1.0, 2.0, 3.0])[rank]  # each would go back to another epoch

    def score(epoch):
        epoch.metrics["score"] = scores[epoch.number - 1]
        if epoch.number == stop_in:
            raise Stop

    bnn.fit(
        loader, epochs=3, lr=1e-2, seed=5, validate=[(X, Y)], monitor="score", patience=3, callbacks=[score],
        checkpoint=folder, accumulate=2 if how == "accumulated" else 1,
    )  # fmt: skip
    return bnn


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found: dict[str, torch.Tensor] = {}
    part = slice(rank * 8, rank * 8 + 8)
    for estimator in ("shared", "local", "flipout"):
        bnn = network(estimator)
        ddp = DistributedDataParallel(bnn.objective)
        torch.manual_seed(7)  # alike on both ranks: the same weights are drawn
        ddp((X[part], Y[part])).backward()
        found[f"gradient:{estimator}"] = gradients(bnn)
        torch.manual_seed(100 + rank)
        found[f"many:{estimator}"] = averaged(ddp, bnn, (X[part], Y[part]))
    for kind in WHOLE:
        bnn = network(kind)
        ddp = DistributedDataParallel(bnn.objective)
        for _ in range(2):  # a parameter without a gradient is found in the second pass
            bnn.zero_grad()
            torch.manual_seed(7)
            ddp((X[part], Y[part])).backward()
        found[f"gradient:{kind}"] = gradients(bnn)
    batch = X[part], Y[part]
    with torch.no_grad():
        found["warned:no gradients"] = warned(lambda: bnn.loss(batch))
    found["warned:wrapper"] = warned(lambda: ddp(batch))
    found["warned:loss"] = warned(lambda: bnn.loss(batch))
    found["warned:module"] = warned(lambda: ddp.module(batch))
    for how in ("sampler", "loader", "accumulated"):
        found[f"fitted:{how}"] = weights(fitted(rank, how))
    run = Path(folder) / "run"
    for epoch in (1, 2, 3):
        try:
            fitted(rank, "loader", run, stop_in=epoch)
        except Stop:
            dist.barrier()
    found["resumed"] = weights(fitted(rank, "loader", run))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        network("shared").fit([(X, Y)], epochs=1)
    found["warned:whole loader"] = torch.tensor(sum(issubclass(w.category, BayeslimWarning) for w in caught))
    save_file(found, Path(folder) / f"rank{rank}.safetensors")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("processes")
    in_processes(worker, WORLD, str(folder))
    return [load_file(folder / f"rank{rank}.safetensors") for rank in range(WORLD)]


@pytest.mark.parametrize("kind", ["shared", "dropout", "gates", "gated points", "lowrank", "mixture"])
def test_the_gradient_of_two_processes_is_that_of_one_with_the_same_weights_drawn(ranks, kind):
    bnn = network(kind)
    torch.manual_seed(7)
    bnn.loss((X, Y)).backward()
    torch.testing.assert_close(ranks[0][f"gradient:{kind}"], gradients(bnn), rtol=2e-7, atol=1e-12)


def test_a_renyi_gradient_is_the_average_of_the_bounds_of_the_parts(ranks):
    parts = []
    for part in (slice(0, 8), slice(8, 16)):
        bnn = network("renyi")
        torch.manual_seed(7)
        bnn.loss((X[part], Y[part])).backward()
        parts.append(gradients(bnn))
    torch.testing.assert_close(ranks[0]["gradient:renyi"], sum(parts) / 2, rtol=1e-6, atol=1e-9)
    assert torch.equal(ranks[0]["gradient:renyi"], ranks[1]["gradient:renyi"])


@pytest.mark.parametrize("estimator", ["shared", "local", "flipout"])
def test_every_rank_has_the_same_gradient(ranks, estimator):
    assert torch.equal(ranks[0][f"gradient:{estimator}"], ranks[1][f"gradient:{estimator}"])
    assert torch.equal(ranks[0][f"many:{estimator}"], ranks[1][f"many:{estimator}"])


@pytest.mark.parametrize("estimator", ["shared", "local", "flipout"])
def test_the_expected_gradient_is_that_of_one_process(ranks, estimator):
    bnn = network(estimator)
    torch.manual_seed(200)
    alone, together = averaged(bnn.objective, bnn, (X, Y)), ranks[0][f"many:{estimator}"]
    error = (alone.var(0) / REPEATS + together.var(0) / REPEATS).sqrt()
    assert ((alone.mean(0) - together.mean(0)).abs() <= 5 * error + 1e-9).all()


def test_a_loss_past_the_wrapper_warns(ranks):
    for found in ranks:
        assert found["warned:loss"] == 1
        assert found["warned:module"] == 1
        assert found["warned:wrapper"] == 0
        assert found["warned:no gradients"] == 0


def test_a_loader_that_is_not_shared_out_warns(ranks):
    assert all(found["warned:whole loader"] == 1 for found in ranks)


@pytest.mark.parametrize("how", ["sampler", "loader", "accumulated"])
def test_fit_keeps_the_ranks_together(ranks, how):
    assert torch.equal(ranks[0][f"fitted:{how}"], ranks[1][f"fitted:{how}"])
    assert not torch.equal(ranks[0][f"fitted:{how}"], weights(network("auto")))


def test_a_run_stopped_in_every_epoch_ends_the_same(ranks):
    for found in ranks:
        assert torch.equal(found["resumed"], found["fitted:loader"])
