"""`Following`: a training run of another library, from its first step to the posterior.

1. the size of the data and of an epoch, which the weight of the KL depends on, are read from the loader
2. every optimizer step is counted: zeros of pruned weights are put back, priors learned in closed form are
   updated, and networks are collected where the method needs them (`bayeslim.trainers.collecting`)
3. at the end the method's posterior is found, such as the curvature of Laplace
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.errors import NotFitted, check_whole
from bayeslim.metrics import Classification, Regression
from bayeslim.predict.predict import predict
from bayeslim.train.loaders import number_of_batches, training_set_size
from bayeslim.trainers.collecting import collector
from bayeslim.types import Params, inputs_of, split_batch

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class Following:
    """A training loop of your own, or of another library, that ends with a posterior.

    As a context it finds the posterior at its end, unless an error ends it; without a context call `finish`.

    Args:
        bnn: the network that is trained by `bnn.loss` or `bnn.objective`.
        loader: training data, of known length.
        optimizer: the optimizer of the run, or several that all step in one iteration, in this order: a step is counted
            with the last of them.
        epochs: passes over the loader; together with `accumulate` it gives the number of steps.
        total: the number of optimizer steps, instead of `epochs`.
        accumulate: batches whose gradients are averaged for one step.
        done: of a run that goes on from a checkpoint, the steps before it, `run.done`. `epochs` and `total` are those
            of the whole run.
        collected: what `run.collected()` returned at the checkpoint.

    >>> import bayeslim as bl
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> loader = bl.data.Loader(x, 2 * x, batch_size=16)
    >>> bnn = bl.bayesianize(torch.nn.Linear(1, 1), bl.Laplace(), likelihood=bl.likelihoods.Gaussian(0.1))
    >>> optimizer = bnn.optimizer(lr=0.1)
    >>> with Following(bnn, loader, optimizer, epochs=30) as run:
    ...     for _ in range(30):
    ...         for batch in loader:
    ...             loss = bnn.loss(batch)
    ...             optimizer.zero_grad()
    ...             loss.backward()
    ...             optimizer.step()
    >>> sorted(bnn.posterior_.variance)
    ['bias', 'weight']
    """

    def __init__(
        self,
        bnn: Bayesian,
        loader: Any,
        optimizer: Optimizers,
        *,
        epochs: int | None = None,
        total: int | None = None,
        accumulate: int = 1,
        done: int = 0,
        collected: Mapping[str, Tensor] | None = None,
    ):
        if (epochs is None) == (total is None):
            raise ValueError("Following needs either epochs, or total, the number of optimizer steps.")
        check_whole("done", done, 0)
        per_epoch = math.ceil(number_of_batches(loader) / accumulate)
        bnn.num_data = training_set_size(bnn, loader)
        bnn.steps_per_epoch = per_epoch
        self.bnn, self.loader = bnn, loader
        given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        if not given:
            raise ValueError("Following needs the optimizer that steps in your loop. Got an empty list.")
        own = [_unwrapped(one) for one in given]
        steps = int(total) if total is not None else int(epochs or 0) * per_epoch
        self.collector = collector(bnn.method, bnn, loader, steps, own)
        self.collector.resume(done, collected)
        self.collector.begin_()
        _count_on_last(bnn, own)
        self._hook = own[-1].register_step_post_hook(self._stepped)
        self.is_finished = False

    @property
    def done(self) -> int:
        """Optimizer steps of the run so far."""
        return self.collector.step

    def collected(self) -> Params:
        """Return the networks that were taken so far, for a checkpoint."""
        return self.collector.collected()

    def _stepped(self, *_: Any) -> None:
        self.collector.observe()

    def evaluate(self, loader: Iterable[Any], samples: int | None = None) -> dict[str, float]:
        """Measure predictions on a loader; see `evaluate`."""
        return evaluate(self.bnn, loader, samples)

    def finish(self) -> None:
        """Find the posterior after the last step; a second call does nothing."""
        if self.is_finished:
            return
        self.is_finished = True
        self._hook.remove()
        self.bnn.eval()
        self.collector.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self._hook.remove()


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Find torch's optimizer inside the wrapper of a trainer."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _count_on_last(bnn: Bayesian, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Count one step of the network when all optimizers have stepped."""
    for optimizer in optimizers[:-1]:
        hooks = optimizer._optimizer_step_post_hooks
        for key in [key for key, hook in hooks.items() if hook == bnn._stepped]:
            del hooks[key]
    bnn.count_steps_of(optimizers[-1])


class Meter:
    """Scores of the predictions of a network, batch by batch.

    Before a method has found its posterior, the mean network is measured.

    Args:
        bnn: the network.
        samples: networks to average.
    """

    def __init__(self, bnn: Bayesian, samples: int | None = None):
        self.bnn, self.samples = bnn, samples
        self.classes, self.values, self.kind = Classification(), Regression(), ""
        self._count, self._squares, self._nll = 0, 0.0, 0.0

    def update(self, batch: Any) -> None:
        """Predict a batch and add its scores."""
        inputs, targets = inputs_of(batch), split_batch(batch)[1]
        prediction = predict(self.bnn, inputs, self.samples, "auto" if has_posterior(self.bnn) else "mean")
        mean, probs, targets = prediction.mean, prediction.probs, targets.to(prediction.mean.device)
        self.kind = prediction.kind
        if probs is not None:
            if self.kind == "binary":
                probs, targets = torch.stack([1 - probs, probs], -1), targets.reshape(probs.shape).long()
            ignored: int | None = getattr(self.bnn.likelihood, "ignore_index", None)
            told = torch.ones_like(targets, dtype=torch.bool) if ignored is None else targets.ne(ignored)
            if bool(told.any()):
                self.classes.update(probs[told], targets[told])
        elif self.kind == "values":
            self.values.update(mean, prediction.variance, targets.reshape(mean.shape))
        else:
            with torch.no_grad():
                each = torch.stack([self.bnn.likelihood.log_prob(one, targets) for one in prediction.samples]).double()
            self._nll -= float((each.logsumexp(0) - math.log(len(each))).sum())
            self._squares += float((targets.reshape(mean.shape) - mean).double().square().sum())
            self._count += mean.numel()

    def compute(self) -> dict[str, float]:
        """Return nll and either error and ece, or rmse for values and counts."""
        if self.kind == "values":
            values = self.values.compute()
            return {"nll": values.nll, "rmse": values.rmse}
        if self.kind == "counts":
            return {"nll": self._nll / self._count, "rmse": math.sqrt(self._squares / self._count)}
        found = self.classes.compute()
        return {"nll": found.nll, "error": found.error, "ece": found.ece}


def evaluate(bnn: Bayesian, loader: Iterable[Any], samples: int | None = None) -> dict[str, float]:
    """Measure the predictions of a network on a loader.

    Args:
        bnn: the network; before its posterior is found, its mean network is measured.
        loader: data with targets.
        samples: networks to average.

    Returns:
        "nll", and "error" and "ece" for classes and yes/no targets, or "rmse" for values and counts.
    """
    meter = Meter(bnn, samples)
    for batch in loader:
        meter.update(batch)
    return meter.compute()


def has_posterior(bnn: Bayesian) -> bool:
    """Tell whether the posterior of a network can be read."""
    try:
        return bnn.posterior_ is not None
    except NotFitted:
        return False
