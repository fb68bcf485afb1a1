"""A training step replayed as a CUDA graph.

On a GPU the step of a small network is a few hundred kernels of microseconds each, and launching them from Python takes
several times longer than running them. `CapturedStep` records them once, as a CUDA graph, and launches them together.
It records the whole step where the optimizer has a fused kernel (the default Adam); with other optimizers (samplers,
natural gradients, your own) it records the loss and its gradients, and the optimizer runs eagerly.

The first steps of every batch shape run eagerly and count as training: they allocate the optimizer's state. A replay
draws its noise from torch's generator, in the same order as the eager step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from bayeslim.train.schedules import Schedule, Uniform
from bayeslim.train.step import Check, Compile, Step

if TYPE_CHECKING:
    from bayeslim.methods.base import Terms

EAGER_STEPS = 3
"""Steps of a batch shape before its capture."""

MAX_GRAPHS = 8
"""Batch shapes that are captured; others run eagerly."""

_log = logging.getLogger("bayeslim")


@dataclass
class _Graph:
    """A captured step: the graph, the memory it reads and writes.

    Attributes:
        batch: the tensors that a replay learns from.
        terms: of the loss.
        gradients: of every parameter, where the optimizer is not part of the graph.
    """

    graph: torch.cuda.CUDAGraph
    batch: list[Tensor]
    terms: Terms
    gradients: list[tuple[nn.Parameter, Tensor]]


class CapturedStep:
    """A step that is replayed as a CUDA graph.

    Args:
        step: the step to capture.
    """

    def __init__(self, step: Step):
        self.step, self.bnn, self.optimizer, self.meter = step, step.bnn, step.optimizer, step.meter
        hooks = self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks
        counts_alone = not hooks[0] and len(hooks[1]) <= 1  # no hook but the network's own runs at its steps
        self.whole = counts_alone and all(group.get("fused") for group in self.optimizer.param_groups)
        self.reason: str | None = None
        """Why steps run eagerly, where the capture failed."""
        self._rates = [torch.zeros((), device=step.device) for _ in self.optimizer.param_groups]
        self._written: list[float | None] = [None] * len(self._rates)
        schedule: Schedule | None = getattr(self.bnn.method, "kl_schedule", None)
        self._schedule = None if schedule is None or type(schedule) is Uniform else schedule
        if self._schedule is not None:
            step.kl_weight = torch.ones((), dtype=torch.float64, device=step.device)
        self._graphs: dict[Any, _Graph] = {}
        self._seen: dict[Any, int] = {}
        self._network: Any = None

    def begin_epoch(self) -> None:
        """Start the means of an epoch; graphs are made anew if the network has changed."""
        self.step.begin_epoch()
        modes = [module.training for module in self.bnn.modules()]
        network = modes, [(p.data_ptr(), p.requires_grad) for p in self.bnn.parameters()]
        if network != self._network:
            self._graphs.clear()
            self._network = network

    def __call__(self, batch: Any, window: int, updates: bool, check: Check | None = None) -> None:
        """Make a step on a batch: eagerly at first, then by a replay, checked afterwards."""
        with torch.cuda.device(self.step.device):
            self._run(batch, window, updates, check)

    def _run(self, batch: Any, window: int, updates: bool, check: Check | None) -> None:
        leaves, structure = tree_flatten(batch)
        key = self._key(leaves)
        if self._schedule is not None:
            assert self.step.kl_weight is not None
            self.step.kl_weight.fill_(self._schedule.weight(self.bnn.position))
        if key in self._graphs:
            self._replay(self._graphs[key], leaves, check)
            return
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if self.reason is None and seen > EAGER_STEPS and len(self._graphs) < MAX_GRAPHS:
            try:
                self._graphs[key] = self._capture(leaves, structure)
            except (RuntimeError, NotImplementedError) as error:
                self.reason = _first_cause(error)
                self.optimizer.zero_grad(set_to_none=True)
                _log.warning("The training step cannot be a CUDA graph and runs eagerly: %s", self.reason)
            else:
                self._replay(self._graphs[key], leaves, check)
                return
        self.step(batch, window, updates, check)

    def _key(self, leaves: list[Any]) -> Any:
        """Identify the graph: shapes of the batch, and the masks that it keeps."""
        masks = tuple((id(mask), mask._version) for mask in self.bnn.masks.values())
        return tuple((getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves), masks

    def _capture(self, leaves: list[Any], structure: Any) -> _Graph:
        other = next((leaf for leaf in leaves if not isinstance(leaf, Tensor)), None)
        if other is not None:
            raise NotImplementedError(f"a batch holds {other!r}, and a graph reads tensors alone")
        fixed = [leaf.clone() for leaf in leaves]
        example = tree_unflatten(fixed, structure)
        graph = torch.cuda.CUDAGraph()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        random_state = generator.clone_state()
        self.optimizer.zero_grad(set_to_none=True)
        try:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                if self.whole:
                    group.update(lr=rate, capturable=True)
            with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                self.step.gradients(example, 1)
                if self.step.clip is not None:
                    nn.utils.clip_grad_norm_(self.bnn.parameters(), self.step.clip)
                if self.whole:
                    self.optimizer.step()
        except BaseException:
            generator.graphsafe_set_state(random_state)  # a failed capture leaves the generator in the graph
            raise
        finally:
            for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
                if self.whole:
                    group.update(lr=lr, capturable=False)
        held = [] if self.whole else [(p, p.grad) for p in self.bnn.parameters() if p.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        assert self.bnn.terms is not None
        return _Graph(graph, fixed, self.bnn.terms, held)

    def _replay(self, captured: _Graph, leaves: list[Tensor], check: Check | None) -> None:
        torch._foreach_copy_(captured.batch, leaves)
        for place, (group, rate) in enumerate(zip(self.optimizer.param_groups, self._rates, strict=True)):
            if self._written[place] != group["lr"]:
                self._written[place] = group["lr"]
                rate.fill_(group["lr"])
        captured.graph.replay()
        self.meter.count += 1
        self.bnn._set(terms=captured.terms)
        if check is not None:
            check(captured.terms)
        if self.whole:
            self.bnn.count_step()
            return
        for parameter, gradient in captured.gradients:
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def step_of(step: Step, compile: Compile, accumulate: int) -> Step | CapturedStep:
    """Choose how steps run: eagerly, or captured as a CUDA graph."""
    if compile is False or step.device.type != "cuda":
        return step
    if step.shares_gradients:
        obstacle = "several processes average their gradients"
    elif accumulate > 1:
        obstacle = f"accumulate={accumulate} adds gradients of several batches"
    else:
        return CapturedStep(step)
    _log.info("The training step runs eagerly and not as a CUDA graph: %s.", obstacle)
    return step


def _first_cause(error: BaseException) -> str:
    """Describe the first of a chain of errors: others only say that capture is over."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).partition("\n")[0]
