"""Two processes, each with its shard of the data, find what one process finds over all of it."""

import torch
import torch.distributed as dist
from curved_networks import make
from safetensors.torch import load_file, save_file

from bayeslim.curvature import diag, ekfac, ggn, kfac, kfra, lowrank
from processes import in_processes


def everything(batches):
    torch.manual_seed(0)
    case, plain = make("convolutions and norms"), make("mlp")
    case.model.load_state_dict(make_state())
    kron = kfac(case.model, batches, case.likelihood, columns="exact")
    found = {f"A {k}": layer.A for k, layer in kron.layers.items()}
    found |= {f"G {k}": layer.G for k, layer in kron.layers.items()}
    found["count"] = torch.tensor(kron.num_data)
    found |= {f"diag {k}": v for k, v in diag(case.model, batches, case.likelihood).items()}
    found["ggn"] = ggn(case.model, batches, case.likelihood, ["9.weight"]).matrix
    found["values"] = lowrank(case.model, batches, case.likelihood, 2).eigenvalues
    corrected = ekfac(case.model, batches, case.likelihood, kron, columns="exact")
    found |= {f"corrected {k}": v.corrected for k, v in corrected.items()}
    flat = [(x[:, 0, 0], y) for x, y in batches]
    found |= {f"kfra {k}": layer.G for k, layer in kfra(plain.model, flat, plain.likelihood).layers.items()}
    return {k: v.contiguous() for k, v in found.items()}


def make_state():
    torch.manual_seed(5)
    return make("convolutions and norms").model.state_dict()


def data():
    torch.manual_seed(7)
    case = make("convolutions and norms")
    return case.batches(2, 3)


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = everything(data()[rank : rank + 1])
    torch.manual_seed(0)
    case = make("mlp")
    signs = kfac(case.model, case.batches(5), case.likelihood).layers["0.weight"].G
    save_file(found | {"signs": signs}, f"{folder}/{rank}.safetensors")
    dist.destroy_process_group()


def test_two_processes_equal_one(tmp_path):
    in_processes(worker, 2, str(tmp_path))
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    torch.manual_seed(0)
    case = make("mlp")
    same_signs_twice = 2 * kfac(case.model, case.batches(5), case.likelihood).layers["0.weight"].G
    assert not torch.allclose(first.pop("signs"), same_signs_twice)
    assert int(first["count"]) == 5
    for key, value in everything(data()).items():
        torch.testing.assert_close(first[key], value, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(second[key], value, rtol=1e-8, atol=1e-10)
