"""`compact`: it makes a pruned network smaller, plain or Bayesian.

The Bayesian one is the plain one with the posterior of the kept weights (`bayeslim.compact.restricted`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor, nn

from bayeslim.bayesian import Bayesian
from bayeslim.compact import Compaction, compaction
from bayeslim.compact.example import EXAMPLE
from bayeslim.compact.quiet import one_thread_at_a_time
from bayeslim.compact.restricted import Kept, NotRestrictable, behind, restricted, sliced_setting
from bayeslim.compact.slim_gates import copy_gates, gate_parameters
from bayeslim.compact.surgery import sliced
from bayeslim.errors import UnsupportedModel
from bayeslim.methods.shared.particle_method import ParticleMethod
from bayeslim.methods.variational import Variational
from bayeslim.noise import kept_random_state
from bayeslim.posteriors import Particles, Posterior
from bayeslim.priors import Learnable, Prior
from bayeslim.types import Inputs, Params


@overload
def compact(
    network: Bayesian,
    example: Inputs,
    *,
    bayesian: Literal[True],
    tolerance: float = ...,
    drop_inputs: bool = ...,
) -> Bayesian: ...


@overload
def compact(
    network: Bayesian | nn.Module,
    example: Inputs,
    *,
    bayesian: bool = ...,
    tolerance: float = ...,
    drop_inputs: bool = ...,
) -> nn.Module: ...


@one_thread_at_a_time
def compact(
    network: Bayesian | nn.Module,
    example: Inputs,
    *,
    bayesian: bool = False,
    tolerance: float = 1e-6,
    drop_inputs: bool = False,
) -> nn.Module:
    """Remove the units that were cut, and check that the outputs stay the same.

    With `bayesian=True` the result keeps the posterior of the kept weights given the removed ones: the old precision at
    the weights that stay. After a cut by units, which sets all removed weights to zero, predictions and their variances
    are those of the pruned network. A cut by weights may leave a unit idle whose other weights are not zero: these are
    removed at their means, and their uncertainty is lost. A constant that such a unit fed forward is added to the mean
    of the next bias, which keeps its own uncertainty. The result trains with the remaining zeros kept at zero, and can
    be saved, pruned and compacted again.

    Args:
        network: a pruned Bayesian network, of which the mean network is taken; or a plain one with zeros.
        example: inputs on which to trace and to check: a tensor, a tuple of arguments or a dict.
        bayesian: return a `Bayesian` with the posterior of the kept weights, instead of a plain network.
        tolerance: the largest difference allowed, relative to the largest output.
        drop_inputs: read only the input features that the first layers use, and of flattened feature maps only the
            positions that are read.

    Raises:
        CompactionFailed: if the smaller network gives other outputs.
        UnsupportedModel: if it cannot be traced, or stay Bayesian because it had to be rewritten as a graph.
        NotRestrictable: if no posterior of its kind exists over fewer weights.
    """
    if not isinstance(network, nn.Module):
        raise TypeError(
            f"compact takes a Bayesian or a torch.nn.Module. Got {type(network).__name__}. Compact before you quantise."
        )
    if bayesian and not isinstance(network, Bayesian):
        raise TypeError(
            f"bayesian=True keeps a posterior, and a {type(network).__name__} has none. Pass the pruned Bayesian "
            "network, or leave bayesian out."
        )
    masks, plain = (network.masks, network.mean_network()) if isinstance(network, Bayesian) else (None, network)
    result = compaction(plain, masks, example, tolerance=tolerance, drop_inputs=drop_inputs)
    # `save` traces the network on this example again, to store it without its class.
    object.__setattr__(result.network, EXAMPLE, result.units.structure.channels.trace.example)
    return _slim_bayesian(network, plain, result) if bayesian and isinstance(network, Bayesian) else result.network


def _slim_bayesian(bnn: Bayesian, plain: nn.Module, result: Compaction) -> Bayesian:
    """Give the compacted network the priors, posterior and zeros of a Bayesian one.

    Args:
        bnn: the pruned network.
        plain: its mean network.
        result: the compaction of the mean network.
    """
    if result.kind == "graph":
        raise UnsupportedModel(
            f"The compacted {bnn.sites.model} is a rewritten graph, since {result.why}, and a posterior belongs to the "
            "network's own modules. Let its forward take sizes from x.shape (and drop_inputs be False), or leave "
            "bayesian=True out for the plain network."
        )
    slim, kept = result.network, result.kept
    weights = {name: p.detach().clone() for name, p in slim.named_parameters()}
    masks = {name: sliced(mask, kept.get(name, {})) for name, mask in bnn.masks.items()}
    moved = {n: weights[n] - sliced(p.detach(), kept.get(n, {})) for n, p in plain.named_parameters()}
    _check_folded(moved, masks)
    # Sites are regular expressions, and a name has to match only itself.
    priors = {re.compile(re.escape(name)): prior for name, prior in _priors(bnn, kept).items()}
    with kept_random_state():  # the initial values of a family are random, and replaced below
        found = Bayesian(slim, bnn.method, copy.deepcopy(bnn.likelihood), priors, list(priors), bnn.num_data)
    _copy_additions(bnn, found, set(weights) | gate_parameters(bnn), kept)
    if isinstance(bnn.method, Variational) and bnn.method.gates is not None:
        copy_gates(bnn, found, bnn.method.gates, kept, moved)
    for key, posterior in list(bnn.state.items()):
        if isinstance(posterior, Posterior):
            found.state[key] = _left_of(posterior, bnn, kept, weights, moved)
    found.masks = {name: mask for name, mask in masks.items() if not bool(mask.all())}
    found.num_data_given, found.step, found.steps_per_epoch = bnn.num_data_given, bnn.step, bnn.steps_per_epoch
    found.training = bnn.training
    _check_posterior(found, weights)
    if found.priors.has_closed_forms:
        found.priors.maximise_(found.posterior_, found.masks)
    return found


def _left_of(posterior: Posterior, bnn: Bayesian, kept: Kept, weights: Params, moved: Params) -> Posterior:
    if isinstance(posterior, Particles):
        folded = next((n for n in (*posterior.values, *posterior.buffers) if n in moved and bool(moved[n].any())), None)
        if folded is not None:
            raise NotRestrictable(
                f'The constant output of an idle unit has to be added to "{folded}", and every '
                "particle has its own. Cut by units, or compact the plain network: compact(network, example)."
            )
    if posterior is bnn.posterior_:
        return restricted(posterior, kept, {name: weights[name] for name in posterior.names})
    # A posterior that is kept for continual learning is not conditioned on the zeros yet.
    given = posterior.condition({name: mask for name, mask in bnn.masks.items() if name in posterior.names})
    mean = {name: sliced(value, kept.get(name, {})) + moved[name].to(value) for name, value in given.mean.items()}
    return restricted(given, kept, mean)


def _priors(bnn: Bayesian, kept: Kept) -> dict[str, Prior]:
    """Slice the current priors; parameters still share their learned priors."""
    found: dict[str, Prior] = {}
    for names in bnn.priors.shared():
        own = {name: _prior(bnn, name, kept) for name in names}
        first = own[names[0]]
        if isinstance(first, Learnable) and first.learned:
            if not all(isinstance(prior, Learnable) and _agree(prior, first) for prior in own.values()):
                raise NotRestrictable(
                    f"The learned settings of single weights in the prior that {', '.join(names)} share cannot be cut "
                    "with all of them. Compact the plain network instead: compact(network, example)."
                )
            own = dict.fromkeys(names, first)
        found |= own
    return found


def _agree(one: Learnable, other: Learnable) -> bool:
    pairs = ((one.setting(name), other.setting(name)) for name in one.hyperparameters())
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def _prior(bnn: Bayesian, name: str, kept: Kept) -> Prior:
    """Slice the current prior of a parameter."""
    given, now = bnn.priors.given[name], bnn.priors[name]
    weight, dims = bnn.model.get_parameter(name).detach(), kept.get(name, {})
    try:
        settings = _left_of_settings(now, weight, dims) if dims else _settings(now)
        settings = {setting: value.detach() for setting, value in settings.items()}
        if not settings:
            left = given
        elif isinstance(given, Learnable):
            left = replace(given.with_settings(settings), learn=given.learn, hyperprior=given.hyperprior)
        else:
            left = type(given)(**{**given.config(), **settings})
        left.check_fits(name, sliced(weight, dims))
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise NotRestrictable(
            f'The {type(given).__name__} prior of "{name}" cannot be cut with it: {str(error).rstrip(".")}. Settings '
            "of single weights must broadcast to the parameter, and be those that the prior's `at` picks from. Compact "
            "the plain network instead: compact(network, example)."
        ) from error
    return left


def _left_of_settings(prior: Prior, weight: Tensor, dims: Mapping[int, Tensor]) -> Params:
    """Slice those tensors of a prior's settings that belong to single weights."""
    picked = _settings(prior.at(torch.ones_like(weight, dtype=torch.bool)))
    return {
        name: value if picked[name] is value else sliced_setting(value, weight.ndim, dims)
        for name, value in _settings(prior).items()
    }


def _settings(prior: Prior) -> Params:
    """Return the tensors among a prior's settings, by name."""
    settings = prior.config()
    if isinstance(prior, Learnable):
        settings = {name: prior.setting(name) for name in prior.hyperparameters()}
    return {name: value for name, value in settings.items() if isinstance(value, Tensor)}


def _copy_additions(bnn: Bayesian, found: Bayesian, own: set[str], kept: Kept) -> None:
    """Copy the tensors that the method added, such as log σ."""
    sites = {name: tuple(bnn.model.get_parameter(name).shape) for name in bnn.sites.names}
    for name, new in found.model.named_parameters():
        if name in own:
            continue
        source = bnn.model.get_parameter(name)
        old = source.detach()
        site = max((s for s in sites if name.startswith(s)), key=len, default="")
        lead = old.ndim - len(sites.get(site, ()))
        if site and all(size in (1, whole) for size, whole in zip(old.shape[lead:], sites[site], strict=True)):
            places = {dim: p for dim, p in kept.get(site, {}).items() if old.shape[lead + dim] > 1}
            # A tensor that weights share, such as an α for each unit, has size 1 along the other dimensions.
            old = behind(old, lead, places)
        if old.shape != new.shape:
            raise NotRestrictable(
                f'"{name}", which {bnn.method.name} added to the network, does not have the shape of a parameter and '
                "cannot be cut with one. Compact the plain network instead: compact(network, example)."
            )
        with torch.no_grad():
            new.copy_(old)
        new.requires_grad_(source.requires_grad)


def _check_folded(moved: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    for name, mask in masks.items():
        if bool((moved[name] != 0)[~mask].any()):
            raise NotRestrictable(
                f'The constant output of an idle unit has to be added to "{name}" at a place that was cut, which a '
                "posterior given that it is zero cannot hold. Leave that bias out of the plan, or compact the plain "
                "network: compact(network, example)."
            )


def _check_posterior(found: Bayesian, weights: Params) -> None:
    """Check that the posterior of the method belongs to this network."""
    try:
        if isinstance(found.method, ParticleMethod):
            found.method.place(found, found.method.posterior(found))
        stands = found.mean_network()
        same = all(
            torch.allclose(stands.get_parameter(name), weight.to(stands.get_parameter(name)), rtol=1e-3, atol=1e-5)
            for name, weight in weights.items()
        )
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise NotRestrictable(_METHOD.format(found.method.name, f": {error}")) from error
    if not same:
        raise NotRestrictable(_METHOD.format(found.method.name, "."))


_METHOD = (
    "The posterior state of {} cannot be cut with the network{} Compact the plain network instead: "
    "compact(network, example)."
)
