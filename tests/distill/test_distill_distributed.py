"""Two processes teach one student; what they find is read by the test."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bayeslim as bl
from bayeslim.errors import BayeslimError
from processes import in_processes

WORLD = 2
X = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    teacher = bl.bayesianize(nn.Linear(3, 2), bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=32)
    data = TensorDataset(X, torch.zeros(32))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=3))
    torch.manual_seed(rank)  # the ranks start apart
    student = bl.distill(teacher, loader, nn.Linear(3, 2), how="online", epochs=25, lr=0.05, seed=5, progress=False)
    found = {name: value.detach().clone() for name, value in student.state_dict().items()}
    p = bl.predict(teacher, X, samples=64).probs
    found["kl"] = (p * (p.log() - student(X).detach().log_softmax(-1))).sum(-1).mean()
    try:
        bl.distill(teacher, loader, nn.Linear(3, 2), progress=False)
    except BayeslimError as error:
        found["refused"] = torch.tensor('use how="online" in several' in str(error))
    save_file(found, f"{folder}/found-{rank}.safetensors")
    dist.destroy_process_group()


def test_processes_share_the_inputs_and_end_with_one_student(tmp_path: Path):
    in_processes(worker, WORLD, str(tmp_path))
    first, second = (load_file(tmp_path / f"found-{rank}.safetensors") for rank in range(WORLD))
    assert torch.equal(first["weight"], second["weight"])
    assert first["kl"] < 0.01
    assert first["refused"]
