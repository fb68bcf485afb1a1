"""One pass over the data, on a replica of the user's model.

A replica has parameter slots and hooks of its own and is in evaluation mode, so that the user's model is never touched
and several threads can pass over one model at once. Under `torch.distributed` each process passes over its own shard,
and sums are added over the processes: they equal those of one process over all the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bayeslim.curvature.recurrent import unroll_
from bayeslim.errors import BayeslimError, NoSiteMatched, ShapeMismatch, UnsupportedModel, closest
from bayeslim.noise import kept_random_state
from bayeslim.replica import deep_copy, reads_its_own_tensors, replicate
from bayeslim.train.progress import progress as progress_bar
from bayeslim.types import Batch, Inputs, batch_size, device_of, split_batch, to_device

CPU_CHUNK_BYTES = 2**24
"""Bytes of a temporary on a CPU: it stays in the cache."""

DEVICE_CHUNK_BYTES = 2**29
"""Bytes of a temporary on a GPU: large enough to keep it busy."""


class PackedInputs(BayeslimError, TypeError):
    """The inputs hold examples that cannot be split."""


@contextmanager
def data_pass(
    model: nn.Module, loader: Iterable[Batch], description: str = "curvature", progress: bool = False
) -> Iterator[tuple[nn.Module, Iterator[tuple[Inputs, Tensor]]]]:
    """Start a pass over the data: yield a replica of `model`, and its batches.

    Gradients are on inside. A loader that shuffles draws from the global generators: they are put back at the end.

    Raises:
        ShapeMismatch: if the loader yields no batch.
    """
    _check_examples_are_independent(model)
    with kept_random_state(), with_gradients():
        remaining = batches(model, loader, description, progress)
        first = next(remaining)
        yield evaluation_replica(model, first[0]), chain([first], remaining)


def batches(
    model: nn.Module, loader: Iterable[Batch], description: str, progress: bool = False
) -> Iterator[tuple[Inputs, Tensor]]:
    """Yield (inputs, targets) of every batch, on the model's device.

    Raises:
        ShapeMismatch: if the loader yields no batch.
    """
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


@contextmanager
def with_gradients() -> Iterator[None]:
    """Turn gradients on, in this thread, whatever the caller has turned off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def evaluation_replica(model: nn.Module, inputs: Inputs) -> nn.Module:
    """Make a replica of `model` in evaluation mode, to compute with `inputs`.

    Where its forward reads tensors past the module tree, the replica is a deep copy. Recurrent layers are unrolled.

    Raises:
        UnsupportedModel: if examples depend on each other even in evaluation mode.
    """
    _check_examples_are_independent(model)
    try:
        one = examples(inputs, 0, 1, batch_size(inputs))
    except PackedInputs:
        one = inputs
    twin = replicate(model) if reads_its_own_tensors(model, one) else deep_copy(model).eval()
    return unroll_(twin)


def examples(inputs: Inputs, start: int, stop: int, total: int) -> Inputs:
    """Take some of the examples: slice tensors whose first dimension is `total`."""
    if isinstance(inputs, nn.utils.rnn.PackedSequence):
        raise PackedInputs(
            "Examples of a PackedSequence cannot be split, and this curvature needs them one by one. "
            "Pass padded tensors, and pack them inside the model."
        )

    def take(value: object) -> object:
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == total:
            return value[start:stop]
        return value

    return tree_map(take, inputs, is_leaf=lambda v: isinstance(v, nn.utils.rnn.PackedSequence))


def seeded(seed: int) -> torch.Generator:
    """Make a generator for a pass, different in every process of a distributed run."""
    rank = dist.get_rank() if _distributed() else 0
    return torch.Generator().manual_seed(seed + 1_000_003 * rank)


def sum_over_processes(*tensors: Tensor) -> None:
    """Add each tensor, in place, over all processes of a distributed run."""
    if _distributed():
        for tensor in tensors:
            if tensor.device.type == "cpu" and dist.get_backend() == "nccl":
                moved = tensor.cuda()
                dist.all_reduce(moved)
                tensor.copy_(moved)
            else:
                dist.all_reduce(tensor)


def examples_at_once(bytes_per_example: int, device: torch.device) -> int:
    """Count the examples whose temporaries fit the device's chunk of memory together."""
    budget = CPU_CHUNK_BYTES if device.type == "cpu" else DEVICE_CHUNK_BYTES
    return max(1, budget // max(1, bytes_per_example))


def accumulation_dtype(model: nn.Module, dtype: torch.dtype | None) -> torch.dtype:
    """Choose the dtype to sum in: `dtype`, or the model's, but at least float32."""
    if dtype is not None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64, to sum many small terms. Got {dtype}.")
        return dtype
    floating = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return torch.float64 if floating and all(d == torch.float64 for d in floating) else torch.float32


def chosen_parameters(model: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """Look up the parameters called `names`, by default all trainable ones, in order."""
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


def _check_examples_are_independent(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise UnsupportedModel(
                f'"{name}" normalises by the statistics of the batch even in eval mode, so that examples depend on '
                "each other and have no curvature of their own. Use track_running_stats=True."
            )


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
