"""Distillation: train one network to predict as a whole posterior does.

    student = argmin_θ  E_x KL( p(y|x, D) ‖ q_θ(y|x) ),      p(y|x, D) = E_{w ~ posterior}[p(y|x, w)]

The targets of the student:

    "probs"       the teacher's predictive distribution on every input, computed once and stored
    "online"      one new draw of the posterior at every step, as in Bayesian dark knowledge: the same gradient in
                  expectation, nothing stored, and augmented inputs get targets of their own
    "dirichlet"   the probabilities of all draws. The student outputs a distribution over them, which separates
                  aleatoric from epistemic uncertainty

Labels are not used, so any inputs serve. Inputs far from the data teach the student where to be unsure.

Balan et al. 2015, arXiv:1506.04416 · Malinin, Mlodozeniec & Gales 2020, arXiv:1905.00076
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import singledispatch
from typing import Any, Literal

import torch
from torch import nn

from bayeslim.bayesian import Bayesian
from bayeslim.distill.student import Student
from bayeslim.distill.targets import Online, stored
from bayeslim.errors import BayeslimError, BayeslimWarning, ShapeMismatch, UnsupportedModel
from bayeslim.likelihoods import Categorical, Gaussian, Likelihood
from bayeslim.methods.base import Method
from bayeslim.methods.laplace import Laplace
from bayeslim.methods.variational import Variational
from bayeslim.noise import kept_random_state
from bayeslim.posteriors import Particles
from bayeslim.predict.predict import predict
from bayeslim.replica import replicate
from bayeslim.train import fit as train
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.loaders import Loader, check_inputs, check_loader
from bayeslim.types import Inputs, Params, batch_size, call, device_of, inputs_of, to_device

MAX_DIFFERENCE_NATS, MAX_RATIO = 0.02, 3
"""A student whose epistemic uncertainty differs from its teacher's by more than both of these gets a warning."""

How = Literal["probs", "online", "dirichlet"]


def distill(
    teacher: Bayesian,
    loader: Any,
    student: nn.Module | None = None,
    *,
    how: How = "probs",
    unlabelled: Any = None,
    samples: int | None = None,
    temperature: float = 1.0,
    epochs: int = 10,
    lr: float = 1e-3,
    seed: int | None = None,
    progress: bool = True,
    **training: Any,
) -> nn.Module:
    """Train one network to predict as a posterior does, in one pass.

    Neither the teacher nor the student that is given changes.

    Args:
        teacher: a fitted Bayesian network, of any method.
        loader: batches of inputs and targets; the targets are ignored.
        student: the network to train, from its present weights: a plain one, smaller or not; a pruned Bayesian one,
            whose zeros stay zero; None for the teacher's own architecture, from its mean (or the particle nearest to
            it). For values, a student with as many outputs as the teacher has means learns the means; with twice as
            many it learns means and log variances, as `likelihoods.Gaussian("heteroscedastic")` reads them.
        how: "probs", "online" or "dirichlet"; all but "online" hold the inputs in memory.
        unlabelled: more inputs: a tensor, or a loader of batches like those of `loader`, or without targets.
        samples: the number of networks that the teacher averages, as in `predict`.
        temperature: a value above 1 softens the probabilities of both in training.
        epochs: passes over the inputs.
        lr: the learning rate.
        seed: the seed of a run that can be repeated.
        progress: show progress bars.
        **training: options of `bayeslim.train.fit`: validate, lr_schedule, checkpoint, device, ... Validation data have
            labels, and the student's own error and NLL are measured on them. A run that is resumed from a checkpoint is
            exact if it has a seed.

    Returns:
        The student, in evaluation mode. With "dirichlet" it is a `Bayesian` that `predict` and `save` take, whose
        uncertainties are in closed form. Otherwise it is a plain network, except for Bayesian students: one of
        `Variational` keeps its standard deviations around new means, one of `Laplace` measures its curvature again on
        `loader`.

    >>> import bayeslim as bl
    >>> x = torch.randn(64, 2)
    >>> teacher = bl.bayesianize(nn.Linear(2, 3), bl.Variational(), likelihood=bl.likelihoods.Categorical())
    >>> bl.distill(teacher, [(x, None)], nn.Linear(2, 3), epochs=2, seed=0, progress=False)
    Linear(in_features=2, out_features=3, bias=True)
    """
    _check(teacher, student, how, samples)
    check_loader(loader)
    check_inputs(unlabelled, "unlabelled")
    method = Student("dirichlet" if how == "dirichlet" else "probs", temperature)
    with nullcontext() if seed is None else kept_random_state():
        if seed is not None:
            torch.manual_seed(seed)
        network, masks = _start(teacher if student is None else student)
        loader, begun = _with_first(loader)
        first = inputs_of(begun)
        likelihood = _likelihood(teacher, first, network)
        if temperature != 1 and likelihood.name not in ("categorical", "bernoulli"):
            raise ValueError(f"temperature softens probabilities, and a {likelihood.name} likelihood has none.")
        size = batch_size(first)
        targets: Loader | Online
        if how == "online":
            targets = Online.of(teacher, loader, unlabelled, size)
        else:
            options: dict[str, Any] = {"samples": samples, "size": size, "progress": progress}
            targets = stored(teacher, loader, unlabelled, dirichlet=how == "dirichlet", **options)
    # num_data only weighs a prior, and a student has none: any value serves where `fit` cannot read it.
    learner = Bayesian(network, method, likelihood, None, None, 1 if how == "online" else None)
    learner.masks = masks
    learner.keep_zeros()
    train.fit(learner, targets, epochs=epochs, lr=lr, seed=seed, progress=progress, **training)
    learner.eval()
    if how == "dirichlet":
        _warn_if_unlike(teacher, learner, first, samples)
        return learner
    plain = learner.mean_network()
    return _returned(student.method, student, plain, loader) if isinstance(student, Bayesian) else plain


def _warn_if_unlike(teacher: Bayesian, student: Bayesian, first: Inputs, samples: int | None) -> None:
    """Warn if the first batch's epistemic uncertainty is far from the teacher's."""
    with kept_random_state():
        mine, others = (float(p.epistemic.mean()) for p in (predict(student, first), predict(teacher, first, samples)))
    if abs(mine - others) > MAX_DIFFERENCE_NATS and not 1 / MAX_RATIO < mine / max(others, 1e-9) < MAX_RATIO:
        warnings.warn(
            f"On the first batch the student's epistemic uncertainty is {mine:.2g} nats on average, its teacher's "
            f"{others:.2g}. The student has not learned it. Train for longer (epochs=...), or at a higher rate "
            "(lr=...).",
            BayeslimWarning,
            stacklevel=3,
        )


def _with_first(loader: Iterable[Any]) -> tuple[Iterable[Any], Any]:
    """Return a loader, an iterator as a list, and its first batch."""
    if isinstance(loader, Iterator):
        loader = list(loader)
    for batch in loader:
        return loader, batch
    raise BayeslimError("The loader gave no batches: there is nothing to learn from.")


def _start(source: nn.Module) -> tuple[nn.Module, Params]:
    """Make a plain copy to train, and the masks of its zeros."""
    if not isinstance(source, Bayesian):
        return copy.deepcopy(source), {}
    network = source.mean_network()
    posterior = source.posterior_
    if isinstance(posterior, Particles):  # their mean may be a bad network
        nearest = posterior.nearest_to_mean()
        network.load_state_dict(posterior.particle(nearest) | posterior.buffers_of(nearest), strict=False)
    return network, dict(source.masks)


def _likelihood(teacher: Bayesian, first: Inputs, network: nn.Module) -> Likelihood:
    """Choose the student's likelihood; for values by the number of its outputs."""
    if not isinstance(teacher.likelihood, Gaussian):
        return copy.deepcopy(teacher.likelihood)
    prediction = predict(teacher, first, samples=1)
    with torch.no_grad():
        outputs = call(replicate(network), to_device(first, device_of(network)))
    if outputs.shape == prediction.mean.shape:
        return Gaussian(float(prediction.variance.mean().sqrt()))
    if outputs.shape == (*prediction.mean.shape[:-1], 2 * prediction.mean.shape[-1]):
        return Gaussian("heteroscedastic")
    raise ShapeMismatch(
        f"The teacher predicts means of shape {tuple(prediction.mean.shape)}, so the student needs as many outputs, or "
        f"twice as many for means and log variances. Got {tuple(outputs.shape)}."
    )


@singledispatch
def _returned(method: Method, student: Bayesian, taught: nn.Module, loader: Iterable[Any]) -> nn.Module:
    """Return a plain student, unless its method has a posterior around one network."""
    return taught


@_returned.register
def _(method: Variational, student: Bayesian, taught: nn.Module, loader: Iterable[Any]) -> nn.Module:
    return _moved(student, taught)


@_returned.register
def _(method: Laplace, student: Bayesian, taught: nn.Module, loader: Iterable[Any]) -> nn.Module:
    moved = _moved(student, taught)
    moved.fit(loader, progress=False)
    return moved


def _moved(student: Bayesian, taught: nn.Module) -> Bayesian:
    """Copy a Bayesian network with other means."""
    moved = copy.deepcopy(student).eval()
    moved.model.load_state_dict(taught.state_dict(), strict=False)
    return moved


def _check(teacher: Any, student: Any, how: Any, samples: Any) -> None:
    if not isinstance(teacher, Bayesian):
        raise TypeError(f"distill needs a fitted Bayesian network as teacher. Got {type(teacher).__name__}.")
    if student is not None and not isinstance(student, nn.Module):
        raise TypeError(f"student must be a network, plain or Bayesian, or None. Got {type(student).__name__}.")
    if how not in ("probs", "online", "dirichlet"):
        raise ValueError(f'how must be "probs", "online" or "dirichlet". Got {how!r}.')
    if how == "online" and samples is not None:
        raise ValueError('how="online" takes one new draw at every step: leave samples out.')
    if how == "dirichlet" and not isinstance(teacher.likelihood, Categorical):
        raise UnsupportedModel(
            f'A Dirichlet is over classes, and the teacher\'s likelihood is {teacher.likelihood.name}. Use how="probs".'
        )
    if how != "online" and rank_and_world()[1] > 1:
        raise BayeslimError(
            f'how="{how}" stores the targets in one process. Distil in one, or use how="online" in several.'
        )
    teacher.posterior_  # noqa: B018 - raises NotFitted, with its advice, before any work
