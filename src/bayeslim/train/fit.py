"""The fit loop: plain gradient descent on `bnn.loss`, for any method that trains.

It uses ordinary `.backward()` calls, so DDP, hooks and accumulation work as usual. Under `torchrun` the
loss is wrapped in `DistributedDataParallel`: every rank takes the mean NLL of its own batches plus the whole KL /
num_data, and the average of these gradients is the gradient of one process with all the batches.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bayeslim.errors import BayeslimError, BayeslimWarning, NonFiniteLoss
from bayeslim.metrics import Classification, Regression
from bayeslim.results import Fit, Prediction
from bayeslim.stochastic import evaluating
from bayeslim.train.captured_step import CapturedStep, step_of
from bayeslim.train.checkpoints import Checkpoint
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.loaders import number_of_batches, training_set_size
from bayeslim.train.options import check_batch, check_values
from bayeslim.train.progress import progress as progress_bar
from bayeslim.train.seeding import seeded
from bayeslim.train.step import Compile, Step
from bayeslim.types import Inputs, chosen_device, device_of, note_inputs, split_batch, to_device

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian
    from bayeslim.methods.base import Terms

LR_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "half-then-linear": lambda done: min(1.0, 2 * (1 - done)),
}
"""Factors on the learning rate as a function of the fraction of training done."""


@dataclass
class Epoch:
    """The state at the end of an epoch, passed to callbacks.

    Attributes:
        bnn: the network.
        number: the epoch, from 1.
        metrics: the metrics of this epoch; a callback may add to them.
        stop: set it to a reason, in words, to end training.
    """

    bnn: Bayesian
    number: int
    metrics: dict[str, float]
    stop: str | None = None


Callback = Callable[[Epoch], None]


def fit(
    bnn: Bayesian,
    loader: Any,
    *,
    epochs: int = 1,
    lr: float | None = None,
    lr_schedule: str | Callable[[float], float] = "constant",
    optimizer: torch.optim.Optimizer | None = None,
    validate: Any = None,
    monitor: str = "val_nll",
    patience: int | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    autocast: torch.dtype | None = None,
    compile: Compile = "auto",
    device: torch.device | str | None = None,
    seed: int | None = None,
    progress: bool = True,
) -> Fit:
    """Train a Bayesian network.

    Args:
        bnn: the network.
        loader: an iterable of batches with a length, such as a DataLoader or `bayeslim.data.Loader`.
        epochs: passes over the loader; a single one if not given, which is rarely enough.
        lr: the learning rate; the default of the method if not given, which is 1e-3 for Adam.
        lr_schedule: "constant", "linear" or "cosine" decay to zero, "half-then-linear" (constant for the first half),
            or a function from the fraction of training done to a factor.
        optimizer: used instead of `bnn.optimizer(lr)`, with the learning rates it has; it keeps them.
        validate: a loader to measure the mean network on after every epoch: `val_nll`, and `val_error` or `val_rmse`.
        monitor: the metric that picks the best epoch (smaller is better).
        patience: stop after this many epochs without a new best, and go back to the best one.
        callbacks: functions of an `Epoch`, called after each one in order.
        checkpoint: a folder to save to after every epoch. If it holds a checkpoint of this run, training continues
            exactly as if it had not been interrupted. Other data are refused if they are tensors in memory; data sets
            of other kinds are told apart by their size alone.
        accumulate: batches whose gradients are averaged for one step.
        clip: the largest allowed norm of the gradient.
        autocast: a lower precision for the forward pass: torch.bfloat16 or torch.float16.
        compile: "auto" replays the step as a CUDA graph on a GPU (see `train/captured_step.py`) and runs it eagerly
            elsewhere. True also compiles the loss with `torch.compile`, on any device: it takes a minute, and pays for
            large networks that train for long. False runs every step eagerly. The noise is the same in all three, and
            results agree up to rounding. A graph replays kernels, not Python: use False for a network whose forward
            changes what it does from step to step.
        device: where to train, "auto" for a GPU if there is one; None for where the network is.
        seed: makes the run repeatable, bit for bit on a CPU: it seeds the global generators and the order of the
            loader's data, and restores both afterwards.
        progress: show a progress bar.
    """
    check_values(locals())
    if patience is not None and validate is None:
        raise ValueError("patience needs validate=..., a loader to measure on.")
    factor = lr_schedule if callable(lr_schedule) else LR_SCHEDULES.get(lr_schedule)
    if factor is None:
        raise ValueError(f"lr_schedule must be one of {', '.join(LR_SCHEDULES)} or a function. Got {lr_schedule!r}.")
    if validate is not None and not isinstance(validate, Iterable):
        raise TypeError(f"validate must be a loader of batches. Got {type(validate).__name__}.")
    batches = number_of_batches(loader)
    num_data = training_set_size(bnn, loader)
    if device is not None:
        bnn.to(chosen_device(device))
    rank, world = rank_and_world()
    bnn.num_data = num_data
    bnn.steps_per_epoch = math.ceil(batches / accumulate)
    with seeded(seed, rank, loader):
        if optimizer is None:
            optimizer = bnn.optimizer(lr)
        else:
            bnn.count_steps_of(optimizer)
        saved = None if checkpoint is None else Checkpoint(checkpoint, loader)
        return TrainingRun(
            bnn, loader, optimizer, epochs, factor, validate, monitor, patience, callbacks, accumulate, clip, autocast,
            compile, saved, rank, world, progress and rank == 0,
        ).run()  # fmt: skip


@dataclass
class TrainingRun:
    """One run of the fit loop: the arguments of `fit` and the state of training.

    Attributes:
        factor: the factor on the learning rates, as a function of the fraction of training done.
        rank: of this process.
        world: number of processes that train together.
        batches: minibatches in an epoch.
        shown: whether to show a progress bar.
        result: the history so far.
        best_value: the smallest value of the monitored metric so far.
        best_state: the network at that epoch, with `patience`.
    """

    bnn: Bayesian
    loader: Any
    optimizer: torch.optim.Optimizer
    epochs: int
    factor: Callable[[float], float]
    validate: Any = None
    monitor: str = "val_nll"
    patience: int | None = None
    callbacks: Sequence[Callback] = ()
    accumulate: int = 1
    clip: float | None = None
    autocast: torch.dtype | None = None
    compile: Compile = "auto"
    checkpoint: Checkpoint | None = None
    rank: int = 0
    world: int = 1
    shown: bool = True
    result: Fit = field(default_factory=Fit)
    best_value: float = math.inf
    best_state: dict[str, Tensor] | None = None

    def __post_init__(self) -> None:
        self.batches = number_of_batches(self.loader)

    def run(self) -> Fit:
        """Train to the end, from the checkpoint if there is one."""
        started = time.monotonic()
        with self._scheduled():
            if self.checkpoint is not None and self.checkpoint.resume(self):
                self.result.resumed_from = len(self.result.history)
            step = self._step()
            first = len(self.result.history)
            bar = progress_bar(range(0), "", total=self.batches * max(0, self.epochs - first), enabled=self.shown)
            with bar, self._tidied():
                for epoch in range(first, self.epochs):
                    if self.result.stopped != "epochs":
                        break
                    bar.description = f"epoch {epoch + 1}/{self.epochs}"
                    self._finish_epoch(epoch, self._epoch(step, epoch, bar))
                    bar.show(**{k: v for k, v in self.result.history[-1].items() if k.startswith("val_")})
        if self.patience is not None and self.best_state is not None:
            self.bnn.load_state_dict(self.best_state)
        self.result.seconds = time.monotonic() - started
        return self.result

    @contextlib.contextmanager
    def _scheduled(self) -> Iterator[None]:
        """Keep learning rates as "initial_lr", also in checkpoints; restore both on exit."""
        groups = self.optimizer.param_groups
        own = [group.get("initial_lr") for group in groups]  # of a scheduler of torch
        for group in groups:
            group["initial_lr"] = group["lr"]
        try:
            yield
        finally:
            for group, initial in zip(groups, own, strict=True):
                group["lr"] = group.pop("initial_lr")
                if initial is not None:
                    group["initial_lr"] = initial

    @contextlib.contextmanager
    def _tidied(self) -> Iterator[None]:
        """Clear gradients before and after training, and restore the mode of every module."""
        training = [m for m in self.bnn.modules() if m.training]
        self.bnn.zero_grad(set_to_none=True)
        try:
            yield
        finally:
            self.bnn.zero_grad(set_to_none=True)
            self.bnn.eval()
            for module in training:
                module.training = True

    def _step(self) -> Step | CapturedStep:
        """Make the step: eager, compiled or captured."""
        objective, device = self._wrapped(), device_of(self.bnn.model)
        eager = Step(
            self.bnn, objective, self.optimizer, device, self.clip, self.autocast, self.world > 1, self.compile is True
        )
        return step_of(eager, self.compile, self.accumulate)

    def _wrapped(self) -> nn.Module:
        objective = self.bnn.objective
        if self.world == 1:
            return objective
        sampler = getattr(self.loader, "sampler", None)
        if not hasattr(sampler, "set_epoch") and getattr(self.loader, "world_size", 1) == 1:
            warnings.warn(
                "Every rank goes over the whole loader. Use torch.utils.data.DistributedSampler, or "
                "bayeslim.data.Loader(rank=..., world_size=...), to share the data out.",
                BayeslimWarning,
                stacklevel=4,
            )
        return DistributedDataParallel(objective)

    def _epoch(self, step: Step | CapturedStep, epoch: int, bar: Any) -> dict[str, float]:
        bnn, device, meter = self.bnn, device_of(self.bnn.model), step.meter
        bnn.train()
        step.begin_epoch()
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        check_every = 1 if device.type == "cpu" else 50
        ignored: int | None = getattr(bnn.likelihood, "ignore_index", None)
        labelled: Tensor | int = 0
        for index, batch in enumerate(self.loader):
            if index == self.batches:
                raise BayeslimError(
                    f"The loader gave more batches than its length, {self.batches}. The fit loop schedules by that "
                    "length: correct __len__ of the loader or of its dataset."
                )
            if not index and not epoch:
                check_batch(bnn.model, batch)
                bnn.likelihood.check_targets(split_batch(batch)[1])
            if not epoch and ignored is not None:
                labelled = labelled + (split_batch(batch)[1] != ignored).sum()
            last = index + 1 == self.batches
            window = min(self.accumulate, self.batches - index // self.accumulate * self.accumulate)
            updates = (index + 1) % self.accumulate == 0 or last
            done = (epoch * self.batches + index) / (self.epochs * self.batches)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * self.factor(done)
            check = partial(_check_finite, epoch=epoch, index=index) if index % check_every == 0 or last else None
            step(to_device(batch, device), window, updates, check)
            assert bnn.terms is not None
            if index % check_every == 0:
                bar.show(nll=float(bnn.terms.nll), kl=float(bnn.terms.kl))
            bar.advance()
        if not meter.count:
            raise BayeslimError("The loader gave no batches: there is nothing to train on.")
        if meter.count < self.batches:
            raise BayeslimError(
                f"The loader gave {meter.count} batches, fewer than its length, {self.batches}. The fit loop schedules "
                "by that length: correct __len__ of the loader or of its dataset."
            )
        if not epoch and ignored is not None and not int(labelled):
            raise BayeslimError(
                f"All targets are {ignored}, which Categorical(ignore_index={ignored}) ignores: there is nothing to "
                "learn from. Check the labels, or pass another ignore_index."
            )
        return meter.means()

    def _finish_epoch(self, epoch: int, metrics: dict[str, float]) -> None:
        metrics["epoch"] = epoch + 1
        if self.validate is not None:
            metrics.update(measure(self.bnn, self.validate))
        seen = Epoch(self.bnn, epoch + 1, metrics)
        for callback in self.callbacks:
            callback(seen)
        metrics, stop = self._agreed(seen.metrics, seen.stop)
        if self.validate is not None and self.monitor not in metrics:
            raise ValueError(f"monitor={self.monitor!r} is not measured. Measured: {', '.join(metrics)}.")
        self.result.history.append(metrics)
        if self.validate is not None:
            if metrics[self.monitor] < self.best_value:
                self.best_value, self.result.best_epoch = metrics[self.monitor], epoch + 1
                if self.patience is not None:
                    self.best_state = {k: v.detach().clone() for k, v in self.bnn.state_dict().items()}
            elif self.patience is not None and epoch + 1 - (self.result.best_epoch or 0) >= self.patience:
                stop = stop or "early stopping"
        if stop:
            self.result.stopped = stop
        if self.checkpoint is not None:
            self.checkpoint.write(self)

    def _agreed(self, metrics: dict[str, float], stop: str | None) -> tuple[dict[str, float], str | None]:
        """Share the metrics of the first rank, so that all ranks stop together."""
        if self.world == 1:
            return metrics, stop
        shared: list[Any] = [metrics, stop]
        torch.distributed.broadcast_object_list(shared, src=0)
        return shared[0], shared[1]


def measure(bnn: Bayesian, loader: Any) -> dict[str, float]:
    """Measure the mean network on a loader.

    The metrics are `val_nll`, and `val_error` for classes or `val_rmse` for values.

    Several networks that are trained together are measured by their average prediction.
    """
    device = device_of(bnn.model)
    total, count, kind = 0.0, 0, ""
    classes, values = Classification(), Regression()
    for batch in loader:
        inputs, targets = to_device(split_batch(batch), device)
        with torch.no_grad(), evaluating(bnn):
            prediction = _mean_prediction(bnn, inputs)
            each = torch.stack([bnn.likelihood.log_prob(outputs, targets) for outputs in prediction.samples])
            log_prob = each.logsumexp(0) - math.log(len(each))
        if not bool(prediction.mean.isfinite().all() and targets.isfinite().all()):
            raise BayeslimError(
                "The validation data hold NaN or infinite values, or the network predicts some. Check the inputs and "
                "targets of validate=..., and the network's weights."
            )
        total, count = total - float(log_prob.double().sum()), count + len(log_prob)
        if prediction.kind == "classes" and targets.ndim == 1:
            classes.update(prediction.mean, targets)
            kind = "classes"
        elif prediction.kind == "values":
            values.update(prediction.mean.view_as(targets), prediction.variance.reshape(targets.shape), targets)
            kind = "values"
    if not count:
        raise BayeslimError("The validation loader gave no batches.")
    metrics = {"val_nll": total / count}
    if kind == "classes":
        metrics["val_error"] = classes.compute().error
    elif kind == "values":
        metrics["val_rmse"] = values.compute().rmse
    return metrics


def _mean_prediction(bnn: Bayesian, inputs: Inputs) -> Prediction:
    try:
        known = bnn.method.predictive(bnn, lambda: iter([inputs]), 1, "mean", None)
        return bnn.likelihood.predict(bnn(inputs).unsqueeze(0)) if known is None else known
    except (RuntimeError, ValueError) as error:
        note_inputs(error, bnn.model, inputs)
        raise


def _check_finite(terms: Terms, epoch: int, index: int) -> None:
    loss = terms.loss
    if bool(torch.isfinite(loss)):
        return
    bad = [name for name, value in (("data term (NLL)", terms.nll), ("KL", terms.kl)) if not torch.isfinite(value)]
    advice = "a smaller learning rate, clip=1.0, and inputs without NaN or infinity"
    if bad == ["KL"]:
        advice = "a smaller learning rate, a larger initial_std, and a prior that is not far narrower than the weights"
    raise NonFiniteLoss(
        f"The loss is {float(loss)} in epoch {epoch + 1}, batch {index + 1}: its "
        f"{' and its '.join(bad) or 'sum'} is not finite (NLL {float(terms.nll):.4g}, KL {float(terms.kl):.4g}). "
        f"Try {advice}."
    )
