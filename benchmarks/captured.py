"""Training a Bayesian network with its step captured as one CUDA graph.

A step of a small network is a few hundred kernels of microseconds each, and launching them from Python takes several
times longer than running them. Captured once, they are launched together: the same loss, optimizer and schedules as in
`bnn.fit`, whose callbacks, checkpoints and checks are not there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

import bayeslim as bl
from bayeslim.train.fit import LR_SCHEDULES
from bayeslim.train.schedules import Position

WARM_UP = 3
"""Steps before the capture, at a learning rate of zero: what is allocated or looked up once is there afterwards."""


def train(
    bnn: bl.Bayesian,
    loader: bl.data.Loader,
    *,
    epochs: int,
    lr: float,
    lr_schedule: str | Callable[[float], float],
    seed: int,
    optimizer: Callable[[list[Any], Tensor], torch.optim.Optimizer] | None = None,
    autocast: torch.dtype | None = None,
    shown: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    each_epoch: Callable[[int], None] | None = None,
) -> bl.Bayesian:
    """Train in place.

    Args:
        bnn: on a GPU.
        loader: of data on the same GPU, all batches of one size.
        epochs: passes over the data.
        lr: the learning rate.
        lr_schedule: as for `bnn.fit`.
        seed: of the noise.
        optimizer: made of the parameters and the learning rate as a tensor; a fused Adam if not given.
        autocast: a lower precision for the forward pass.
        shown: what a step learns from, given the inputs and targets of a batch.
        each_epoch: called with the number of epochs done; it may write into the tensors of `bnn.masks`.
    """
    torch.manual_seed(seed)
    factor = lr_schedule if callable(lr_schedule) else LR_SCHEDULES[lr_schedule]
    x, y = loader.dataset.x, loader.dataset.y
    assert isinstance(x, Tensor)
    size, steps = loader.batch_size, len(loader)
    rate, weight = torch.zeros((), device=x.device), torch.zeros((), device=x.device)
    inputs, targets = x[:size].clone(), y[:size].clone()
    parameters = [p for p in bnn.parameters() if p.requires_grad]
    bnn.num_data, bnn.steps_per_epoch = len(loader.dataset), steps
    decay = None if optimizer else weight_decay(bnn)
    make = optimizer or partial(torch.optim.Adam, fused=True, capturable=True, weight_decay=decay or 0.0)
    stepper = make(parameters, rate)
    bnn.count_steps_of(stepper)
    schedule = getattr(bnn.method, "kl_schedule", bl.schedules.Uniform())
    bnn.train()

    def step() -> None:
        stepper.zero_grad(set_to_none=True)
        batch = (inputs, targets) if shown is None else shown(inputs, targets)
        context: Any = nullcontext()
        if autocast is not None:
            context = torch.autocast("cuda", dtype=autocast, cache_enabled=False)
        with context:
            if decay is None:
                loss = bnn.loss(batch, kl_weight=weight)  # type: ignore[arg-type]
            else:
                loss = bnn.likelihood.mean_nll(bnn.model(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        stepper.step()

    graph = graph_of(step)
    for epoch in range(epochs):
        order = loader._order(epoch).to(x.device)
        for index in range(steps):
            done = epoch * steps + index
            rate.fill_(lr * factor(done / (epochs * steps)))
            weight.fill_(schedule.weight(Position(done, steps)))
            rows = order[index * size : (index + 1) * size]
            torch.index_select(x, 0, rows, out=inputs)
            torch.index_select(y, 0, rows, out=targets)
            graph.replay()
        if each_epoch is not None:
            each_epoch(epoch + 1)
    torch.cuda.synchronize()
    stepper.zero_grad(set_to_none=True)
    del graph
    bnn.eval()
    return bnn


def graph_of(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture a step, after a few at the learning rate that is set."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def weight_decay(bnn: bl.Bayesian) -> float | None:
    """Find the weight decay that has the gradient of one Normal prior.

    It takes a third of the kernels of the prior itself.
    """
    return bl.samplers.weight_decay(bnn) if isinstance(bnn.method, bl.Laplace) else None
