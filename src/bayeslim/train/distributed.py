"""Distributed training: the rank of this process, and the loss as a module to wrap in DDP."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bayeslim.errors import BayeslimWarning
from bayeslim.types import Batch

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian


def rank_and_world() -> tuple[int, int]:
    """Return the rank of this process and their number; (0, 1) without a group."""
    d = torch.distributed
    return (d.get_rank(), d.get_world_size()) if d.is_available() and d.is_initialized() else (0, 1)


class Objective(nn.Module):
    """The loss as a module: `forward(batch)` is `bnn.loss(batch)`."""

    def __init__(self, bnn: Bayesian):
        super().__init__()
        self.bnn = bnn

    def forward(self, batch: Batch, kl_weight: float | None = None) -> Tensor:
        """Compute the training loss of a batch."""
        return self.bnn.loss(batch, kl_weight=kl_weight)


def warn_if_past_wrapper(bnn: Bayesian) -> None:
    """Warn of a loss outside a DDP wrapper: its gradients are not averaged."""
    if rank_and_world()[1] == 1 or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    inside = getattr(DistributedDataParallel, "_active_ddp_module", None) is not None
    sharded = any(hasattr(p, "device_mesh") for p in bnn.parameters())
    if not inside and not sharded:
        warnings.warn(
            "A loss was taken in a process group of several ranks without a DistributedDataParallel wrapper, so its "
            "gradients are not averaged. Wrap ddp = DistributedDataParallel(bnn.objective) and call ddp(batch); never "
            "bnn.loss or ddp.module.",
            BayeslimWarning,
            stacklevel=3,
        )
