"""Predict with uncertainty: p(y | x, D) = E_q[p(y | x, w)].

The loop is the obvious one: draw a network, call it on the inputs, chunk after chunk, and let the likelihood average
the outputs. It runs on a replica of the network (`bayeslim.replica`), so the network itself is not touched and several
threads can predict at once. A method may know better than to sample (`Method.predictive`); otherwise the type of the
posterior decides, through `predictive`, a single-dispatch function that is open to new posteriors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import singledispatch
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bayeslim.bayesian import Bayesian
from bayeslim.errors import NotFinite
from bayeslim.noise import drawing_from, on_device
from bayeslim.posteriors import Particles, Posterior
from bayeslim.predict import moments
from bayeslim.predict.batches import batches_of
from bayeslim.replica import Slots
from bayeslim.results import Prediction
from bayeslim.sites import check_has_values
from bayeslim.train.loaders import check_inputs
from bayeslim.types import (
    Batches,
    Inputs,
    Params,
    arguments,
    as_tensors,
    batch_size,
    call,
    device_of,
    fitting,
    misfit,
    note_inputs,
)

DEFAULT_SAMPLES = 32
"""Networks to average where the posterior is not made of particles."""

MAX_NUMBERS_PER_DRAW = 2**23
"""Weights that are drawn in one call, unless one network has more."""

WAYS = ("auto", "sample", "local", "moments", "mean", "map")


def predict(
    bnn: Bayesian,
    x: Inputs | Iterable[Any],
    samples: int | None = None,
    how: str = "auto",
    *,
    batch_size: int | Literal["auto"] | None = "auto",
    generator: torch.Generator | None = None,
    allow_nonfinite: bool = False,
) -> Prediction:
    """Predict with uncertainty.

    The network is not touched: its mode, gradients, weights and buffers stay as they are, and several threads can
    predict with one network at once.

    Args:
        bnn: a Bayesian network.
        x: inputs (a tensor or a NumPy array, a tuple of arguments or a dict), or a loader of batches, whose targets are
            ignored. The loader is read once, so shuffling does no harm. Inputs go to the network's device; real numbers
            in arrays take the dtype of its parameters.
        samples: the number of networks to average, S: 32 if not given, and 256 by moments, which only draw outputs. Of
            particles all are used once, or this many, evenly spread over them.
        how: "sample" draws S networks and averages their outputs; "local" draws noise for every example at the
            pre-activations instead; "moments" carries means and variances through the network in one pass and draws S
            outputs from the Gaussian at its end (see `bayeslim.predict.moments`); "mean" and "map" use the one network
            at the posterior's mean or mode; "auto" is the method's own choice.
        batch_size: the number of examples in one call of the network; None for all. It does not change the result.
            "auto" keeps memory bounded.
        generator: the source of random numbers, for repeatable predictions.
        allow_nonfinite: whether NaN and infinite inputs and outputs pass through; else they are an error.
    """
    if not isinstance(bnn, Bayesian):
        raise TypeError(
            f"predict needs a Bayesian network, such as bl.bayesianize(network, bl.Laplace(), likelihood=...) gives. "
            f"Got {type(bnn).__name__}, whose only prediction is network(x)."
        )
    check_has_values(bnn.model)
    x = as_tensors(x, bnn.model)
    check_inputs(x)
    _check(samples, batch_size, generator)
    with torch.no_grad():
        try:
            batches = batches_of(x, batch_size, bnn.model)
            if not allow_nonfinite:
                _check_inputs_are_finite(batches)
            found = _prediction(bnn, batches, samples, how, generator)
            if not allow_nonfinite:
                _check_outputs_are_finite(found)
            return found
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise NotFinite(f"The prediction met a matrix that it cannot factorise: {error}. {_WEIGHTS}") from error
        except (RuntimeError, ValueError) as error:
            note_inputs(error, bnn.model, x)
            if (mismatch := misfit(error)) is not None:
                raise mismatch from error
            raise


def _prediction(
    bnn: Bayesian, batches: Batches, samples: int | None, how: str, generator: torch.Generator | None
) -> Prediction:
    bnn = bnn.replica(next(batches()))
    generator = on_device(generator, device_of(bnn.model))
    samples = _default_samples(bnn, how) if samples is None else samples
    with drawing_from(generator):
        known = bnn.method.predictive(bnn, batches, samples, how, generator)
        if known is not None:
            return known
        if how not in WAYS:
            raise ValueError(f"how must be one of {', '.join(WAYS)} for {bnn.method.name}. Got {how!r}.")
        if how == "moments":
            return moments.predict(bnn, batches, samples, generator)
        if how == "local":
            draws = [torch.cat([bnn.method.draw(bnn, inputs) for inputs in batches()]) for _ in range(samples)]
            return bnn.likelihood.predict(torch.stack(draws))
        return bnn.likelihood.predict(predictive(bnn.posterior_, bnn, batches, samples, how, generator))


def _check(samples: Any, batch_size: Any, generator: Any) -> None:
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, Integral) or int(samples) < 1):
        raise ValueError(f"samples must be a whole number, at least 1. Got {samples!r}.")
    if batch_size not in ("auto", None) and not (isinstance(batch_size, Integral) and int(batch_size) > 0):
        raise ValueError(f'batch_size must be "auto", None for all, or a positive whole number. Got {batch_size!r}.')
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator, such as torch.Generator().manual_seed(0). Got {generator!r}."
        )


def _check_inputs_are_finite(batches: Batches) -> None:
    first = 0
    for inputs in batches():
        args, kwargs = arguments(inputs)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isfinite().all()):
                bad = (~value.isfinite()).reshape(len(value), -1).any(1) if value.ndim else value.new_ones(1)
                raise NotFinite(
                    f"The inputs of {int(bad.sum())} examples hold NaN or infinite values, the first of them example "
                    f"{first + int(bad.nonzero()[0])}. Remove or impute them, or pass allow_nonfinite=True."
                )
        first += batch_size(inputs)


def _check_outputs_are_finite(prediction: Prediction) -> None:
    if not bool(prediction.mean.isfinite().all()):
        bad = (~prediction.mean.isfinite()).reshape(len(prediction), -1).any(1)
        raise NotFinite(
            f"The predictions of {int(bad.sum())} of {len(prediction)} examples are NaN or infinite, the first of them "
            f"example {int(bad.nonzero()[0])}, though their inputs are finite. {_WEIGHTS}"
        )


_WEIGHTS = (
    "Look for NaN, infinite or very large weights (training may have diverged), or pass allow_nonfinite=True to go on."
)


def _default_samples(bnn: Bayesian, how: str) -> int:
    posterior = bnn.state.get("posterior")
    if isinstance(posterior, Particles):
        return posterior.count
    return moments.SAMPLES if how == "moments" else DEFAULT_SAMPLES


@singledispatch
def predictive(
    posterior: Posterior,
    bnn: Bayesian,
    batches: Batches,
    samples: int,
    how: str,
    generator: torch.Generator | None,
) -> Tensor:
    """Compute raw outputs (S, N, ...) of drawn networks; open to other posteriors."""
    if how in ("mean", "map"):
        params = fitting(bnn.model, posterior.mean if how == "mean" else posterior.mode)
        return outputs_of(bnn.model, [params], batches)
    return outputs_of(bnn.model, draws_of(posterior, bnn.model, samples, generator), batches)


@predictive.register
def _(
    posterior: Particles,
    bnn: Bayesian,
    batches: Batches,
    samples: int,
    how: str,
    generator: torch.Generator | None,
) -> Tensor:
    """Call every particle with its own buffers.

    With how="mean", call the one network that stands for all particles.
    """
    if how == "mean":
        return outputs_of(bnn.model, [bnn.method.one_network(bnn)], batches)
    chosen = [posterior.nearest_to_mean()] if how == "map" else posterior.spread(samples)
    networks = unstacked(posterior.values | posterior.buffers, bnn.model)
    safe = {id(b) for m in bnn.model.modules() if isinstance(m, _NormBase) for b in m._buffers.values()}
    own = Slots(bnn.model).own
    written = [name for name in posterior.buffers if id(own[name]) not in safe]  # a forward may write to these

    def copied(network: Params) -> Params:
        return network | {name: network[name].clone() for name in written} if written else network

    return outputs_of(bnn.model, (copied(networks[k]) for k in chosen), batches)


def outputs_of(model: nn.Module, networks: Iterable[Params], batches: Batches) -> Tensor:
    """Call networks one after the other and stack their outputs, (S, N, ...).

    The slots of the model, a replica, take the tensors of each network in turn.
    """
    slots, outputs = Slots(model), []
    for network in networks:
        slots.put(network)
        outputs.append(torch.cat([call(model, inputs) for inputs in batches()]))
    return torch.stack(outputs)


def unstacked(stack: Params, model: nn.Module) -> list[Params]:
    """Split tensors (S, *shape) into S networks in the model's precision and device."""
    own = Slots(model).own
    parts = {name: values.to(own[name]).unbind() for name, values in stack.items()}
    return [dict(zip(parts, tensors, strict=True)) for tensors in zip(*parts.values(), strict=True)]


def draws_of(
    posterior: Posterior, model: nn.Module, samples: int, generator: torch.Generator | None
) -> Iterator[Params]:
    """Draw networks, as many at once as memory allows, and yield one after the other."""
    at_once = max(1, MAX_NUMBERS_PER_DRAW // posterior.num_parameters)
    for first in range(0, samples, at_once):
        yield from unstacked(posterior.sample(min(at_once, samples - first), generator=generator), model)
