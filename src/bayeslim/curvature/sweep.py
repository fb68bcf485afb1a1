"""One pass over the data that leaves the user's model as it was found.

During a pass the model is in eval mode with gradients enabled; afterwards, and after an error, every module's mode and
the random number generators are back where they were. Under `torch.distributed` each process passes over its own
shard, and sums are added over the processes, so that they equal those of one process over all the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bayeslim.errors import NoSiteMatched, ShapeMismatch, UnsupportedModel, closest
from bayeslim.train.progress import progress as progress_bar
from bayeslim.types import Batch, Inputs, device_of, split_batch, to_device

CPU_CHUNK_BYTES = 2**24
DEVICE_CHUNK_BYTES = 2**29


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put `model` in eval mode with gradients on, and bring modes and random states back at the end."""
    _check_examples_are_independent(model)
    modes = [(module, module.training) for module in model.modules()]
    device = device_of(model)
    forked = {"devices": [device.index or 0], "device_type": device.type} if device.type == "cuda" else {"devices": []}
    # the fused encoder layer reads its children's weights without calling them, so that hooks would see nothing
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        with torch.random.fork_rng(**forked), torch.inference_mode(False), torch.enable_grad():
            torch.backends.mha.set_fastpath_enabled(False)
            model.eval()
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, training in modes:
            module.training = training


def batches(
    model: nn.Module, loader: Iterable[Batch], description: str, progress: bool = False
) -> Iterator[tuple[Inputs, Tensor]]:
    """Yield (inputs, targets) of every batch, on the model's device; refuse a loader that yields nothing."""
    device = device_of(model)
    empty = True
    for batch in progress_bar(loader, description, enabled=progress):
        empty = False
        yield split_batch(to_device(batch, device))
    if empty:
        raise ShapeMismatch(
            "The curvature needs data, and the loader yielded no batch. "
            "A generator can be used up only once: pass a DataLoader or a list of batches."
        )


def seeded(seed: int) -> torch.Generator:
    """A generator of its own for a pass, different in every process of a distributed run."""
    rank = dist.get_rank() if _distributed() else 0
    return torch.Generator().manual_seed(seed + 1_000_003 * rank)


def sum_over_processes(*tensors: Tensor) -> None:
    """Add each tensor, in place, over all processes; nothing to do outside a distributed run."""
    if _distributed():
        for tensor in tensors:
            if tensor.device.type == "cpu" and dist.get_backend() == "nccl":
                moved = tensor.cuda()
                dist.all_reduce(moved)
                tensor.copy_(moved)
            else:
                dist.all_reduce(tensor)


def examples_at_once(bytes_per_example: int, device: torch.device) -> int:
    """How many examples to treat together so that a temporary stays within cache on a CPU, within bounds on a GPU."""
    budget = CPU_CHUNK_BYTES if device.type == "cpu" else DEVICE_CHUNK_BYTES
    return max(1, budget // max(1, bytes_per_example))


def accumulation_dtype(model: nn.Module, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype to sum in: the one asked for, or the model's, but never below float32."""
    if dtype is not None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64, to sum many small terms. Got {dtype}.")
        return dtype
    floating = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return torch.float64 if floating and all(d == torch.float64 for d in floating) else torch.float32


def chosen_parameters(model: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """The parameters called `names`, in the model's order; by default every trainable floating-point one."""
    known = dict(model.named_parameters())
    if names is None:
        chosen = {name: p for name, p in known.items() if p.requires_grad and p.is_floating_point()}
        if not chosen:
            raise NoSiteMatched(
                f"None of the {len(known)} parameters of {type(model).__name__} is trainable. "
                "Name the ones whose curvature is wanted, or call model.requires_grad_(True)."
            )
        return chosen
    wanted = {names} if isinstance(names, str) else set(names)
    for name in sorted(wanted):
        if name not in known:
            near = closest(name, known) or ", ".join(f'"{n}"' for n in list(known)[:3])
            raise NoSiteMatched(
                f'"{name}" is no parameter of {type(model).__name__}. Closest names: {near}. '
                "Tied weights go by the first of their names."
            )
        if not known[name].is_floating_point():
            raise NoSiteMatched(f'"{name}" holds {known[name].dtype}, which has no curvature. Leave it out.')
    return {name: p for name, p in known.items() if name in wanted}


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _check_examples_are_independent(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise UnsupportedModel(
                f'"{name}" normalises by the statistics of the batch even in eval mode, so that examples depend on '
                "each other and have no curvature of their own. Use track_running_stats=True."
            )
