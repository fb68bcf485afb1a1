"""Two processes train every member of an ensemble, and every cycle of snapshots, together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import bayeslim as bl
from processes import in_processes

WORLD = 2
METHODS = {"ensemble": bl.DeepEnsemble(2), "snapshot": bl.Snapshot(2)}
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(16, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def fitted(name: str, rank: int, folder: Path) -> bl.posteriors.Posterior:
    torch.manual_seed(rank)  # the ranks start apart; the wrapper brings them together
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    bnn = bl.bayesianize(model, METHODS[name], likelihood=bl.likelihoods.Gaussian(0.5))
    loader = bl.data.Loader(X, Y, batch_size=4, rank=rank, world_size=WORLD)
    bnn.fit(loader, epochs=2, lr=0.05, seed=0, progress=False, checkpoint=folder / name)
    return bnn.posterior_


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    found = {}
    for name in METHODS:
        for attempt in ("first", "again"):
            dist.barrier()  # the first rank may still be writing its checkpoint
            found |= {f"{name}:{attempt}:{key}": t for key, t in fitted(name, rank, folder).tensors().items()}
    save_file({key: tensor.clone() for key, tensor in found.items()}, folder / f"rank-{rank}.safetensors")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("ranks")
    in_processes(work, WORLD, folder)
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(WORLD)]


@pytest.mark.parametrize("name", METHODS)
def test_all_ranks_have_the_same_particles_and_find_them_again(name, found):
    first, second = found
    keys = [key for key in first if key.startswith(f"{name}:first")]
    assert keys
    for key in keys:
        assert torch.equal(first[key], second[key]), key
        assert torch.equal(first[key], first[key.replace(":first:", ":again:")]), key
        assert not torch.equal(first[key][0], first[key][1]), key
