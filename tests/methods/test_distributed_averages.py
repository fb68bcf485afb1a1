"""Two processes average, draw and measure networks, and move particles, together."""

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
METHODS = {
    "swag": bl.SWAG(start=0.0, every=1, samples=2),
    "svgd": bl.SVGD(particles=2),
    "mc-batch-norm": bl.MCBatchNorm(samples=2),
}
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(16, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def fitted(name: str, rank: int) -> bl.Bayesian:
    torch.manual_seed(rank)  # the ranks start apart, and would draw apart
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()
    bnn = bl.bayesianize(model, METHODS[name], likelihood=bl.likelihoods.Gaussian(0.5))
    bnn.fit(bl.data.Loader(X, Y, batch_size=8, rank=rank, world_size=WORLD), epochs=2, lr=0.05, progress=False)
    return bnn


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    found = {}
    for name in METHODS:
        for key, posterior in fitted(name, rank).state.items():
            found |= {f"{name}:{key}:{tensor}": value.clone() for tensor, value in posterior.tensors().items()}
    save_file(found, folder / f"rank-{rank}.safetensors")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("ranks")
    in_processes(work, WORLD, folder)
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(WORLD)]


@pytest.mark.parametrize("name", METHODS)
def test_all_ranks_have_the_same_networks(name, found):
    first, second = found
    # the wrapper leaves every rank the batch statistics of its own data while it trains
    keys = [key for key in first if key.startswith(name) and not (name == "svgd" and "running" in key)]
    assert keys
    for key in keys:
        assert torch.equal(first[key], second[key]), key


def test_drawn_networks_are_measured_on_the_data_of_all_ranks(found):
    values = {key.removeprefix("swag:networks:"): tensor for key, tensor in found[0].items() if "networks" in key}
    for k in range(2):
        hidden = nn.functional.linear(X, values["value:0.weight"][k], values["value:0.bias"][k])
        torch.testing.assert_close(values["buffer:1.running_mean"][k], hidden.mean(0))
    assert not torch.equal(values["value:0.weight"][0], values["value:0.weight"][1])
