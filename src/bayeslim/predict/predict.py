"""`predict`: the predictive distribution, p(y | x, D) = E_q[p(y | x, w)].

Samples are the outer loop: weights are drawn S times, not once for every batch. A method may know better than to sample
(`Method.predictive`); otherwise the posterior's type decides, through `predictive`, a single-dispatch function open to
new posteriors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, singledispatch
from numbers import Integral
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bayeslim import stochastic
from bayeslim.bayesian import Bayesian
from bayeslim.blas import FEW_ROWS, IS_ARM, by_blas, is_better_apart
from bayeslim.captured import outputs_captured, way_captured
from bayeslim.fused import is_plain
from bayeslim.likelihoods import Categorical, Likelihood
from bayeslim.methods.braid import Braid, at_once
from bayeslim.methods.chain import Chain
from bayeslim.methods.mapped import is_worth_trying, outputs_mapped
from bayeslim.methods.shared.abreast import dense_width, outputs_abreast
from bayeslim.methods.tables import are_tables_quick, begins_with_table
from bayeslim.noise import drawing_from
from bayeslim.passes import converted, networks_of, passes
from bayeslim.posteriors import Particles, Posterior
from bayeslim.predict import moments
from bayeslim.predict.batches import batches_of
from bayeslim.ready import Way, keep_ready, outputs_ready
from bayeslim.results import Prediction
from bayeslim.train.loaders import check_inputs
from bayeslim.twins import laid_out, outputs_of, twins_of, way_of
from bayeslim.types import Batches, Inputs, Params, batch_size, call, fitting, modules_of, note_inputs
from bayeslim.unrolled import is_unrolled, unrolled

WEIGHTS, ACTIVATIONS = 2**23, {"cpu": 2**22, "cuda": 2**26}
"""How many weights networks may have that are drawn together, and how many numbers a layer may give of those that are
called abreast. A CPU is quickest with what stays in its caches; a GPU wants as much as keeps it busy."""

BUSY = {"cpu": 2**21 if IS_ARM else 300_000, "cuda": 5_500_000}
"""Networks of which a layer gives more numbers are as quick one after the other."""

BRAIDED = {"cpu": 2**17 if IS_ARM else 2**15, "cuda": 5_500_000}
"""The same of those that are no chains, as they pass over values more often."""

FEW, MAPS = {"cpu": 2**12 if IS_ARM else 2**13, "cuda": 2**20}, {"cpu": 2**17, "cuda": 2**23}
"""Inputs of how many numbers networks with convolutions are called abreast for, and how many of all networks together
there may be."""
LONG = 1 if IS_ARM else 4
"""Of how many times as many, if convolutions run along one dimension, on a CPU."""

_chains: WeakKeyDictionary[Particles, Chain | Braid] = WeakKeyDictionary()
"""Particles ready to be called."""

WAYS = ("auto", "sample", "local", "moments", "mean", "map")


def predict(
    bnn: Bayesian,
    x: Inputs | Iterable[Any],
    samples: int | None = None,
    how: str = "auto",
    *,
    batch_size: int | Literal["auto"] | None = "auto",
    generator: torch.Generator | None = None,
) -> Prediction:
    """Predict with uncertainty.

    Args:
        bnn: a Bayesian network.
        x: inputs (a tensor, a tuple of arguments or a dict), or a loader of batches, whose targets are ignored if there
            are any; it is read once, so that shuffling does no harm. Inputs go to the network's device.
        samples: how many networks to average, S: 32 if not given, and 256 by moments, which only draw outputs. Of a
            posterior made of particles every one is used once, or this many, evenly spread over them.
        how: "sample" draws S networks and averages what they say; "local" draws noise for every example at the
            pre-activations instead; "moments" carries means and variances through the network in one pass and draws S
            outputs from the Gaussian at its end (see `bayeslim.moments`); "mean" and "map" use the one network at the
            posterior's mean or mode; "auto" is what the method does best.
        batch_size: how many examples go through the network at once; None for all. It does not change the result. If
            not given, as many as suit the device and the network (see `bayeslim.batches`).
        generator: where the random numbers come from, for repeatable predictions.

    The network's mode, gradients and weights are left as they were.
    """
    if not isinstance(bnn, Bayesian):
        raise TypeError(
            f"predict needs a Bayesian network, such as bl.bayesianize(network, bl.Laplace(), likelihood=...) gives. "
            f"Got {type(bnn).__name__}, whose only prediction is network(x)."
        )
    check_inputs(x)
    is_usual = samples is None and batch_size == "auto" and generator is None
    if not is_usual:
        _check(samples, batch_size, generator)
    if is_usual and how == "auto" and (outputs := outputs_ready(bnn, x)) is not None:
        likelihood: Any = bnn._modules["likelihood"]  # as attributes modules take a while of all this to read
        return _averaged(outputs, likelihood)
    with torch.set_grad_enabled(False), stochastic.evaluating(bnn):  # as no_grad, which takes twice as long
        try:
            return _found(bnn, x, samples, how, batch_size, generator)
        except (RuntimeError, ValueError) as error:
            note_inputs(error, bnn.model, x)
            raise


def _found(
    bnn: Bayesian,
    x: Inputs | Iterable[Any],
    samples: int | None,
    how: str,
    batch_size: int | Literal["auto"] | None,
    generator: torch.Generator | None,
) -> Prediction:
    """A prediction that is not at hand, as it has not been made before."""
    with drawing_from(generator):
        if samples is None:
            samples = _all_samples(bnn, how)
        batches = batches_of(x, batch_size, bnn.model, bnn.method.only_calls)
        known = bnn.method.predictive(bnn, batches, samples, how, generator)
        if known is not None:
            return known
        if how not in WAYS:
            raise ValueError(f"how must be one of {', '.join(WAYS)} for {bnn.method.name}. Got {how!r}.")
        if how == "moments":
            return moments.predict(bnn, batches, samples, generator)
        if how == "local":
            outputs = torch.stack([_local_pass(bnn, batches) for _ in range(samples)])
        else:
            outputs = predictive(bnn.posterior_, bnn, batches, samples, how, generator)
        return _averaged(outputs, bnn.likelihood)


def _averaged(outputs: Tensor, likelihood: Likelihood) -> Prediction:
    """What a likelihood makes of outputs, which come as they lie in memory: of classes that is taken as it is."""
    if type(likelihood) is Categorical:
        return likelihood.predict(outputs)  # there is nothing to differentiate: not to say so saves a while
    with torch.set_grad_enabled(False):
        return likelihood.predict(outputs.contiguous())


def _check(samples: Any, batch_size: Any, generator: Any) -> None:
    if samples is not None and not (isinstance(samples, Integral) and int(samples) > 0):
        raise ValueError(f"samples must be a whole number, at least 1. Got {samples!r}.")
    if batch_size not in ("auto", None) and not (isinstance(batch_size, Integral) and int(batch_size) > 0):
        raise ValueError(f'batch_size must be "auto", None for all, or a positive whole number. Got {batch_size!r}.')
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator, such as torch.Generator().manual_seed(0). Got {generator!r}."
        )


@singledispatch
def predictive(
    posterior: Posterior,
    bnn: Bayesian,
    batches: Batches,
    samples: int,
    how: str,
    generator: torch.Generator | None,
) -> Tensor:
    """Raw outputs of networks drawn from a posterior, (S, N, ...); register a posterior's type to do it another way."""
    if how in ("mean", "map"):
        params = fitting(bnn.model, posterior.mean if how == "mean" else posterior.mode)
        return torch.cat([call(bnn.model, inputs, params) for inputs in batches()]).unsqueeze(0)
    stacks = stacks_of(posterior, bnn.model, samples, generator)
    if not dense_width(bnn.model):
        row = unrolled(bnn.model, next(batches()))
        return _one_by_one(row, converted(network for stack in stacks for network in unstacked(stack)), batches)
    return torch.cat([_of_stack(bnn.model, stack, batches) for stack in stacks])


def stacks_of(
    posterior: Posterior, model: nn.Module, samples: int, generator: torch.Generator | None
) -> Iterator[Params]:
    """Networks drawn from a posterior, stacked, (n, *shape): small ones of linear layers many at a time."""
    together = max(1, WEIGHTS // posterior.num_parameters) if dense_width(model) else 1
    for first in range(0, samples, together):
        yield posterior.sample(min(together, samples - first), generator=generator)


def unstacked(stack: Params) -> Iterator[Params]:
    """The networks of a stack, one after the other."""
    return ({name: values[k] for name, values in stack.items()} for k in range(len(_any(stack))))


def _any(stack: Params) -> Tensor:
    return next(iter(stack.values()))


@predictive.register
def _(
    posterior: Particles,
    bnn: Bayesian,
    batches: Batches,
    samples: int,
    how: str,
    generator: torch.Generator | None,
) -> Tensor:
    """What every particle says, with its own buffers; "mean" is the network as it stands for them."""
    if how == "mean":
        return passes(bnn.model, converted([bnn.method.one_network(bnn)]), batches)
    chosen = [posterior.nearest_to_mean()] if how == "map" else posterior.spread(samples)
    x = next(batches())
    row = unrolled(bnn.model, x)
    stack = posterior.values | posterior.buffers

    def all_at_once(lasting: bool = False) -> Way | None:
        width = dense_width(row)
        step = _at_once(row, width, x, stack, chosen)
        chain = _kept_chain(posterior, row, stack) if step >= len(chosen) == posterior.count > 1 else None
        if chain is None or (lasting and not chain.lasts):
            return None
        return partial(_chained, chain)

    def each_alone() -> Way | None:
        twins = twins_of(posterior, chosen, row, x) if len(chosen) == posterior.count else None
        return way_of(twins, x) if twins is not None else None

    outputs = outputs_captured(posterior, chosen, row, batches, all_at_once)
    if outputs is not None:
        keep_ready(bnn, posterior, batches, partial(way_captured, posterior, chosen, x))
        return outputs
    outputs = _abreast(bnn.model, row, stack, chosen, batches, posterior)
    if outputs is not None:
        if _are_calls_kept(x):
            keep_ready(bnn, posterior, batches, partial(all_at_once, lasting=True))
        return outputs

    def one_by_one() -> Tensor:
        twins = twins_of(posterior, chosen, row, x)
        return outputs_of(twins, batches) if twins else _one_by_one(row, networks_of(posterior, chosen, row), batches)

    if is_worth_trying(bnn.model, posterior, chosen, batches, is_unrolled(row)):
        return outputs_mapped(bnn.model, posterior, batches, one_by_one)
    if _are_calls_kept(x):
        keep_ready(bnn, posterior, batches, each_alone)
    return one_by_one()


def _are_calls_kept(x: Inputs) -> bool:
    """On a GPU they are captured, when they come again."""
    return isinstance(x, Tensor) and x.is_cpu


def _chained(chain: Chain | Braid, x: Tensor) -> Tensor | None:
    """The outputs of networks at once; products of few rows are none that torch has a choice of libraries for."""
    if not IS_ARM or (x.ndim == 2 and x.shape[0] <= FEW_ROWS):
        return chain(x)
    with by_blas():
        return chain(x)


def _kept_chain(particles: Particles | None, model: nn.Module, stack: Params) -> Chain | Braid | None:
    """Networks as one chain; that of all particles is kept for the next prediction if it lasts."""
    if particles is None:
        return at_once(model, stack)
    chain = _chains.get(particles)
    if chain is None or not chain.is_of(model, stack):
        chain = at_once(model, stack)
        if chain is not None and chain.lasts:
            _chains[particles] = chain
    return chain


def _of_stack(model: nn.Module, stack: Params, batches: Batches) -> Tensor:
    """The outputs of all networks of a stack, (S, N, ...): abreast where that takes less time, else one by one."""
    row = unrolled(model, next(batches()))
    outputs = _abreast(model, row, stack, range(len(_any(stack))), batches)
    return _one_by_one(row, converted(unstacked(stack)), batches) if outputs is None else outputs


def _one_by_one(row: nn.Module, networks: Callable[[Params], Iterable[Params]], batches: Batches) -> Tensor:
    """The outputs of networks one after the other, (S, N, ...), of inputs laid out for them if nobody looks on."""
    known = is_unrolled(row) and all(map(is_plain, modules_of(row)))
    return passes(row, networks, (lambda: (laid_out(x, row) for x in batches())) if known else batches)


def _abreast(
    model: nn.Module,
    row: nn.Module,
    stack: Params,
    chosen: Sequence[int],
    batches: Batches,
    particles: Particles | None = None,
) -> Tensor | None:
    """The outputs of networks out of a stack, (S, N, ...), several at once.

    None for networks that are not to be called so, for one alone, and those that are as quick alone. The row is the
    model unrolled; the stack may be that of all particles.
    """
    if len(chosen) < 2:
        return None
    width = dense_width(row)  # of all layers, as those that are not random give an output for each of them, too
    step = _at_once(row, width, next(batches()), stack, chosen)
    if not step:
        return None
    outputs = []
    with by_blas():
        for start in range(0, len(chosen), step):
            some = _taken(stack, chosen[start : start + step])
            chain = _kept_chain(particles if some is stack else None, row, some)
            each: list[Tensor] = []
            for x in batches():
                if (values := outputs_abreast(model, some, x, chain)) is None:
                    return None
                each.append(values)
            outputs.append(each[0] if len(each) == 1 else torch.cat(each, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _at_once(model: nn.Module, width: int, x: Inputs, stack: Params, chosen: Sequence[int]) -> int:
    """How many networks are called at once on batches such as `x`, within bounds of memory; 0 for one by one.

    A loader's first batch is as large as any. Networks with convolutions go abreast where inputs are so few that calls
    take longer than what they compute, if they are chains without hooks.
    """
    members, device = len(_any(stack)), "cuda" if _any(stack).is_cuda else "cpu"
    if width:
        numbers = width * batch_size(x)
        is_chain = type(model) is nn.Sequential and nn.LayerNorm not in map(type, model)
        if device == "cpu" and not is_chain and is_better_apart(model, batch_size(x)):
            return 0
        busy = BUSY if is_chain else BRAIDED
        if numbers > busy[device]:
            return 0
        is_layer = [*map(type, model._modules.values())] == [nn.Linear]  # which gives outputs, kept in any case
        return members if is_layer else ACTIVATIONS[device] // numbers
    if type(model) is not nn.Sequential or not isinstance(x, Tensor):
        return 0
    if not all(map(is_plain, modules_of(model))):
        return 0
    if begins_with_table(model):  # of which copies are kept for all networks
        return members if members == len(chosen) and are_tables_quick(model, members, x) else 0
    if x.numel() > FEW[device] * (LONG if x.ndim == 3 and x.is_cpu else 1):
        return 0
    return MAPS[device] // max(x.numel(), 1)


def _taken(stack: Params, chosen: Sequence[int]) -> Params:
    """Some networks of a stack; all of them, and those that follow each other, without a copy."""
    first, last = chosen[0], chosen[-1]
    if last - first != len(chosen) - 1:
        return {name: value[list(chosen)] for name, value in stack.items()}
    whole = _any(stack).shape[0] == len(chosen)
    return stack if whole else {name: value[first : last + 1] for name, value in stack.items()}


def _all_samples(bnn: Bayesian, how: str) -> int:
    """As many as there are of particles; else as many as are usually enough."""
    posterior = bnn.state.get("posterior")
    if isinstance(posterior, Particles):
        return posterior.count
    return moments.SAMPLES if how == "moments" else 32


def _local_pass(bnn: Bayesian, batches: Batches) -> Tensor:
    return torch.cat([bnn.method.draw(bnn, inputs) for inputs in batches()])
