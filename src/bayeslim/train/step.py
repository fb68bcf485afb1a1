"""One eager training step: loss, gradients and update; `captured_step.py` replays it as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from bayeslim.noise import kept_random_state

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian
    from bayeslim.methods.base import Terms

Compile = Literal["auto"] | bool
Check = Callable[["Terms"], None]


def is_capturing() -> bool:
    """Tell whether kernels are recorded into a CUDA graph at present, and not run."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def own_code(function: Any) -> FunctionType:
    """Copy a function: torch compiles each piece of code at most eight times."""
    parts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    return FunctionType(function.__code__.replace(), *parts)


@dataclass
class Meter:
    """Sums of the loss terms, kept on the device to avoid synchronisation."""

    sums: Tensor
    count: int = 0

    def add(self, terms: Terms) -> None:
        """Add the terms of a batch."""
        self.sums += torch.stack([terms.nll, terms.kl, terms.loss]).to(self.sums.dtype)

    def reset(self) -> None:
        """Start an epoch."""
        self.sums.zero_()
        self.count = 0

    def means(self) -> dict[str, float]:
        """Average over the batches of the epoch."""
        return dict(zip(("nll", "kl", "loss"), (self.sums / max(1, self.count)).tolist(), strict=True))


@dataclass
class Step:
    """A step run eagerly.

    Attributes:
        bnn: the network.
        objective: a module whose forward is the loss; wrapped in DDP or compiled.
        optimizer: the optimizer.
        device: where the network is.
        clip: the largest norm of the gradient.
        autocast: a lower precision for the forward pass.
        shares_gradients: whether `objective` averages gradients between processes.
        compiles: whether to compile the objective.
        kl_weight: the weight of the KL as a tensor; None for the method's own.
    """

    bnn: Bayesian
    objective: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    clip: float | None
    autocast: torch.dtype | None
    shares_gradients: bool
    compiles: bool = False
    kl_weight: Tensor | None = None
    is_compiled: bool = field(default=False, init=False)
    meter: Meter = field(init=False)

    def __post_init__(self) -> None:
        precise = torch.float32 if self.device.type == "mps" else torch.float64
        self.meter = Meter(torch.zeros(3, dtype=precise, device=self.device))

    def begin_epoch(self) -> None:
        """Start the means of an epoch."""
        self.meter.reset()

    def __call__(self, batch: Any, window: int, updates: bool, check: Check | None = None) -> None:
        """Add the gradients of a batch; move the weights if it is the last of its window.

        Gradients are averaged over the batches of a window. `check` raises for bad terms of the loss, before the
        weights move.
        """
        if self.compiles and not self.is_compiled:
            self._compile(batch)
        self.meter.count += 1
        self.gradients(batch, window, updates)
        if check is not None:
            assert self.bnn.terms is not None
            check(self.bnn.terms)
        if updates:
            self.update()

    def gradients(self, batch: Any, window: int, updates: bool = True) -> None:
        """Compute the loss and add its gradients."""
        waits = self.shares_gradients and not updates
        with self.objective.no_sync() if waits else nullcontext():  # type: ignore[operator]
            with self._precision():
                loss = self.objective(batch, self.kl_weight)
            (loss / window).backward()
        assert self.bnn.terms is not None
        self.meter.add(self.bnn.terms)

    def update(self) -> None:
        """Move the weights, and clear the gradients."""
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.bnn.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _compile(self, batch: Any) -> None:
        """Compile the objective before the first step, so that runs resume exactly.

        The loss settles where noise is drawn, which a compiler cannot trace; nothing else of this call is left.
        """
        kept = [(buffer, buffer.clone()) for buffer in self.bnn.buffers()]
        with kept_random_state(), self._precision():
            self.bnn.loss(batch)
        for buffer, value in kept:
            buffer.copy_(value)
        own: Any = getattr(self.objective, "module", self.objective)  # inside DDP
        own.forward = MethodType(own_code(type(own).forward), own)
        self.objective = torch.compile(  # type: ignore[assignment]
            self.objective,
            dynamic=False,
            options={"fallback_random": True},  # draws what an eager step draws
        )
        self.is_compiled = True

    def _precision(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        # A replay must cast the weights anew. A compiled loss would be compiled again if this changed in its capture.
        keeps_copies = not (is_capturing() or self.is_compiled)
        return torch.autocast(self.device.type, dtype=self.autocast, cache_enabled=keeps_copies)
