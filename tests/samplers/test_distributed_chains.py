"""Ranks run chains of their own: those that one process runs one after the other, on every rank at the end.

The processes are started once; what they find is read by the tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bayeslim as bl
from bayeslim.errors import BayeslimError
from processes import in_processes

WORLD = 2
X = torch.randn(24, 20, generator=torch.Generator().manual_seed(1))
Y = torch.randn(24, 20, generator=torch.Generator().manual_seed(2))
METHODS = {
    "sgld": lambda chains: bl.SGLD(samples=2, chains=chains),
    "sghmc-subset": lambda chains: bl.SGHMC(samples=2, chains=chains, subset="last-layer"),
    "hmc": lambda chains: bl.HMC(samples=2, warmup=2, leapfrog=2, chains=chains),
}


def fitted(kind: str, chains: int, checkpoint: Path | None = None) -> bl.Bayesian:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20), nn.Linear(20, 20))
    bnn = bl.bayesianize(model, METHODS[kind](chains), likelihood=bl.likelihoods.Gaussian(1.0))
    data = DataLoader(TensorDataset(X, Y), 8, shuffle=True) if kind == "sgld" else bl.data.Loader(X, Y, batch_size=8)
    options = {} if kind == "hmc" else {"epochs": 4, "lr": 1e-2}
    if checkpoint is not None:
        options["checkpoint"] = checkpoint
    bnn.fit(data, seed=5, **options)
    return bnn


def subspace(inner: str, checkpoint: Path) -> bl.Bayesian:
    torch.manual_seed(0)
    method = {"hmc": bl.HMC(samples=8, warmup=10, leapfrog=4), "sghmc": bl.SGHMC(samples=6)}[inner]
    model = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20), nn.Linear(20, 20))
    bnn = bl.bayesianize(model, bl.Subspace(rank=2, inner=method), likelihood=bl.likelihoods.Gaussian(1.0))
    options = {} if inner == "hmc" else {"inner_epochs": 4, "inner_lr": 1e-2}
    bnn.fit(bl.data.Loader(X, Y, batch_size=8), epochs=8, seed=5, checkpoint=checkpoint, **options)
    return bnn


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found: dict[str, torch.Tensor] = {}
    for kind in METHODS:
        bnn = fitted(kind, 1)
        found |= {f"{kind}/{name}": tensor for name, tensor in bnn.posterior_.tensors().items()}
        assert bnn.posterior_.chains == WORLD
    streamed = fitted("sgld", 1, Path(folder) / "run")
    found |= {f"streamed/{name}": tensor for name, tensor in streamed.posterior_.tensors().items()}
    for inner in ("hmc", "sghmc"):
        within = subspace(inner, Path(folder) / f"subspace-{inner}")
        assert within.posterior_.chains == WORLD
        found |= {f"subspace-{inner}/{name}": tensor for name, tensor in within.posterior_.tensors().items()}
    data = TensorDataset(X, Y)
    try:
        streamed.fit(DataLoader(data, 8, sampler=DistributedSampler(data)), epochs=1)
        found["refused"] = torch.tensor(0)
    except BayeslimError as error:
        found["refused"] = torch.tensor("not shared out" in str(error))
    save_file(found, Path(folder) / f"rank{rank}.safetensors")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("processes")
    in_processes(worker, WORLD, str(folder))
    return [load_file(folder / f"rank{rank}.safetensors") for rank in range(WORLD)]


@pytest.mark.parametrize("kind", METHODS)
def test_two_ranks_are_two_chains(ranks, kind):
    posterior = fitted(kind, WORLD).posterior_
    assert posterior.chains == WORLD
    whole = posterior.tensors()
    for found in ranks:
        for name, tensor in whole.items():
            assert torch.equal(found[f"{kind}/{name}"], tensor), name


def test_chains_are_independent(ranks):
    """The noise of two chains with the same start, on data in different orders, is uncorrelated."""
    weight = ranks[0]["sghmc-subset/value:2.weight"]
    first, second = (weight[k + 1] - weight[k] for k in (0, 2))
    correlation = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
    assert correlation.abs() < 5 / first.numel() ** 0.5
    assert not torch.equal(weight[0], weight[2])


def test_every_rank_streams_its_own(ranks):
    for name in ("value:0.weight", "buffer:1.running_mean"):
        assert torch.equal(ranks[1][f"streamed/{name}"], ranks[0][f"sgld/{name}"])


def test_data_that_are_shared_out_are_refused(ranks):
    assert all(found["refused"] == 1 for found in ranks)


@pytest.mark.parametrize("inner", ["hmc", "sghmc"])
def test_every_rank_has_a_subspace_of_its_own(ranks, inner):
    for name in ("value:0.weight", "buffer:1.running_mean"):
        assert torch.equal(ranks[0][f"subspace-{inner}/{name}"], ranks[1][f"subspace-{inner}/{name}"])
    weight = ranks[0][f"subspace-{inner}/value:2.weight"].double().flatten(1)
    dimensions = [int(torch.linalg.matrix_rank(part - part.mean(0), rtol=1e-4)) for part in weight.chunk(WORLD)]
    assert dimensions == [2, 2]
    both = torch.cat([part - part.mean(0) for part in weight.chunk(WORLD)])
    assert int(torch.linalg.matrix_rank(both, rtol=1e-4)) == 4
