"""Networks trained side by side: one vmapped step for several Bayesian networks of one architecture.

    networks = [bl.bayesianize(make_network(), bl.Variational(), likelihood=...) for _ in range(8)]
    bl.fit_together(networks, loader, epochs=20)             # or a loader for each: folds, splits

Their parameters are one stack (`abreast.py`), whose step is one CUDA graph on a GPU. On a CPU networks of more than
about 100,000 weights gain nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.errors import UnsupportedModel
from bayeslim.io.storage import encode
from bayeslim.methods.base import Method
from bayeslim.methods.shared.abreast import AbreastLoader, Stack
from bayeslim.posteriors.particles import tensors_of
from bayeslim.priors import Learnable, Prior
from bayeslim.results import Fit
from bayeslim.sites import check_has_values
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.fit import fit
from bayeslim.train.loaders import check_loader, size_of_data, training_set_size
from bayeslim.train.options import check_names, check_values
from bayeslim.train.seeding import seeded
from bayeslim.types import Params, chosen_device, device_of

REFUSED = {
    "optimizer": "all networks are one stack of parameters, and each method makes its own optimizer of it",
    "validate": "it measures one network",
    "patience": "all networks train for the same number of epochs",
    "callbacks": "they are called with one network",
    "clip": "the norm would be that of the gradients of all networks",
}
"""Options of training that need networks trained one by one, each with the reason."""


def fit_together(networks: Sequence[Bayesian], loader: Any, *, seed: int | None = None, **training: Any) -> Fit:
    """Train several networks side by side, in place.

    They share architecture, method and likelihood, and differ in their weights, as networks of several seeds do, or in
    their data, as those of a cross-validation do. Fixed priors may differ in their hyperparameters. Each network has
    its own noise, and goes over the data in its own order. `DeepEnsemble(together=True)` trains its members in the same
    way.

    It is for every method, and for networks that `vmap` can run: recurrent layers, for example, it cannot. `Laplace`
    and `MCBatchNorm` measure each network after training, and `Subspace` infers the coordinates of each. `SVGD`
    compares weights, not functions. Chains of `HMC` are those that each network has alone, with step sizes and
    trajectories of their own. Where training together is not possible, an error says why, and no network is changed.
    The loss of all networks must stay finite.

    Args:
        networks: the networks, which are trained in place.
        loader: batches of inputs and targets, read once for every network; or a list of loaders, one for each, with
            as many batches of the same sizes.
        seed: makes the run repeatable, and leaves the global random state unchanged.
        **training: options of `bayeslim.train.fit`: epochs, lr, lr_schedule, checkpoint, accumulate, autocast, compile,
            device, progress; inner_epochs and inner_lr of `Subspace`; start and dtype of `HMC`, which needs no epochs.

    Returns:
        the history of the mean loss over networks.
    """
    networks = list(networks)
    loaders = _loaders(loader, networks, training)
    check_values({**training, "seed": seed})
    _check(networks, loaders)
    method = type(networks[0].method)
    own = [name for name, p in inspect.signature(method.fit_stack).parameters.items() if p.kind is p.KEYWORD_ONLY]
    check_names("fit_together", {k: v for k, v in training.items() if k not in own}, fit, REFUSED)
    if training.get("checkpoint") is not None and method.fit_stack is not Method.fit_stack:
        raise ValueError(f"A checkpoint of {method.__name__} holds one network. Leave it out, or use bnn.fit for each.")
    device = training.pop("device", None)
    if device is not None:
        for network in networks:
            network.to(chosen_device(device))
    stack = Stack.of(networks)
    stack.num_data, stack.seed = training_set_size(networks[0], loaders[0]), seed
    with ExitStack() as orders:
        for own in {id(one): one for one in loaders}.values():
            orders.enter_context(seeded(seed, 0, own))
        result = networks[0].method.fit_stack(stack, networks, AbreastLoader(loaders), **training)
    return result.averaged_over(len(networks))


def _loaders(given: Any, networks: list[Any], training: Mapping[str, Any]) -> list[Any]:
    """List a loader for every network."""
    if not isinstance(given, (list, tuple)) or not given or _is_batch(given[0]):
        check_loader(given)
        return [given] * len(networks)
    for one in given:
        check_loader(one)
    if len(given) != len(networks):
        raise ValueError(f"A list of loaders needs one for each network. Got {len(given)} for {len(networks)}.")
    sizes = {(len(one), size_of_data(one)) for one in given}
    if len(sizes) > 1:
        listed = ", ".join(f"{batches} batches of {examples} examples" for batches, examples in sorted(sizes))
        raise ValueError(f"Networks that train together need data of one size. Got {listed}.")
    if training.get("checkpoint") is not None:
        raise ValueError("A checkpoint holds the place in one loader. Leave it out, or give one loader for all.")
    return list(given)


def _is_batch(item: Any) -> bool:
    """Tell a batch, which ends in targets, from a loader that is a list."""
    if isinstance(item, (list, tuple)):
        return not item or not isinstance(item[-1], (list, tuple, Mapping))
    return isinstance(item, Mapping)


def _check(networks: list[Any], loaders: list[Any]) -> None:
    """Raise unless the networks can be one stack."""
    if not networks or not all(isinstance(network, Bayesian) for network in networks):
        raise TypeError("networks must be a list of Bayesian networks, made by bl.bayesianize, at least one.")
    if len({id(network) for network in networks}) < len(networks):
        raise ValueError("A network is in the list twice. Make one for every seed.")
    for place, network in enumerate(networks):
        check_has_values(network.model, f" of network {place}")
    first: Bayesian = networks[0]
    obstacles = [
        ("pruned networks", any(network.masks for network in networks)),
        ("continual learning", any(network.anchor is not None for network in networks)),
        ('priors with learn="closed form"', any(network.priors.has_closed_forms for network in networks)),
        ("several processes", rank_and_world()[1] > 1),
        ("a loader with persistent_workers", any(getattr(one, "persistent_workers", False) for one in loaders)),
    ]
    found = [name for name, is_there in obstacles if is_there]
    if found:
        raise UnsupportedModel(f"Networks cannot be trained together with {' and '.join(found)}. Use bnn.fit for each.")
    shape = _shape_of(first)
    for place, network in enumerate(networks[1:], start=1):
        other = _shape_of(network)
        different = next((what for what in shape if shape[what] != other[what]), None)
        if different is not None:
            raise UnsupportedModel(
                f"Networks that train together have the same {different}, and network {place} has another than the "
                "first. Train those that are alike together."
            )


def _shape_of(network: Bayesian) -> dict[str, Any]:
    """Collect everything that networks of a stack share."""
    ignored: Params = {}
    priors = network.priors.shared()
    return {
        "method": encode(network.method, ignored),
        "likelihood": encode(network.likelihood, ignored),
        "sites": network.sites.names,
        "parameters and buffers": {
            name: (t.shape, t.dtype, t.requires_grad) for name, t in tensors_of(network).items()
        },
        "device": device_of(network.model),
        "kinds of priors": [(names, _kind(network.priors.given[names[0]])) for names in priors],
        "num_data": network.num_data if network.num_data_given else None,
        "number of steps taken": network.step,
        "modes of modules": [module.training for module in network.modules()],
    }


def _kind(prior: Prior) -> Any:
    """Describe what may not differ between the priors of networks."""
    if isinstance(prior, Learnable) and not prior.learned:
        return type(prior), prior.samples, {name: _shape(prior.setting(name)) for name in prior.hyperparameters()}
    return repr(prior)


def _shape(setting: float | Tensor) -> tuple[int, ...]:
    return tuple(setting.shape) if isinstance(setting, Tensor) else ()
