"""Networks trained side by side: one vmapped step for several Bayesian networks of one architecture.

    networks = [bl.bayesianize(make_network(), bl.Variational(), likelihood=...) for _ in range(8)]
    bl.fit_together(networks, loader, epochs=20)

Every parameter is stacked, (S, *shape), and the losses of all networks are computed under one `vmap`. A step on their
sum is a step of each: nothing that one network computes depends on another. The step of a small network is mostly
overhead, which a stack has once. On a GPU its step is one CUDA graph. On a CPU networks of more than about 100,000
weights gain nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from bayeslim.bayesian import Bayesian
from bayeslim.errors import UnsupportedModel
from bayeslim.io.storage import encode
from bayeslim.methods.base import Terms
from bayeslim.methods.shared.abreast import AbreastLoader, average_history, raise_if_of_vmap, stack_tensors
from bayeslim.noise import kept_random_state, vmapped
from bayeslim.posteriors.particles import stacked, tensors_of
from bayeslim.priors import Learnable, Prior
from bayeslim.results import Fit
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.fit import fit
from bayeslim.train.loaders import check_loader, training_set_size
from bayeslim.train.options import check_names, check_values
from bayeslim.train.seeding import seeded
from bayeslim.types import Batch, Params, chosen_device, device_of

REFUSED = {
    "optimizer": "all networks are one stack of parameters, and each method makes its own optimizer of it",
    "validate": "it measures one network",
    "patience": "all networks train for the same number of epochs",
    "callbacks": "they are called with one network",
    "clip": "the norm would be that of the gradients of all networks",
}
"""Options of training that need networks trained one by one, each with the reason."""

Settings = dict[int, Params]
"""Tensors that are the hyperparameters of fixed priors, by the identity of the prior."""


def fit_together(networks: Sequence[Bayesian], loader: Any, *, seed: int | None = None, **training: Any) -> Fit:
    """Train several networks side by side, in place.

    They share architecture, method, likelihood and data, and differ in their weights: networks of several seeds, for
    example. Fixed priors may differ in their hyperparameters. Each network has its own noise, and goes over the data in
    its own order. `DeepEnsemble(together=True)` trains its members in the same way.

    It is for methods that train by gradients of a loss, such as `Variational` with every family, prior and gate, `IVON`
    and `MCDropout`, and for networks that `vmap` can run: recurrent layers, for example, it cannot. Where it is not
    possible, an error says why, and no network is changed. The loss of all networks must stay finite.

    Args:
        networks: the networks, which are trained in place.
        loader: batches of inputs and targets, read once for every network.
        seed: makes the run repeatable, and leaves the global random state unchanged.
        **training: options of `bayeslim.train.fit`: epochs, lr, lr_schedule, checkpoint, accumulate, autocast, compile,
            device, progress.

    Returns:
        the history of the mean loss over networks.
    """
    networks = list(networks)
    check_loader(loader)
    check_values({**training, "seed": seed})
    check_names("fit_together", training, fit, REFUSED)
    if training.get("compile") is True:
        raise ValueError('compile=True cannot trace a vmapped loss. Use compile="auto": a CUDA graph on a GPU.')
    _check(networks, loader)
    device = training.pop("device", None)
    if device is not None:
        for network in networks:
            network.to(chosen_device(device))
    stack = Stack.of(networks)
    stack.num_data, stack.seed = training_set_size(networks[0], loader), seed
    with seeded(seed, 0, loader):
        result = fit(stack, AbreastLoader(loader, len(networks)), **training)
    stack.unstack(networks)
    average_history(result, len(networks))
    return result


def _check(networks: list[Any], loader: Any) -> None:
    """Raise unless the networks can be one stack."""
    if not networks or not all(isinstance(network, Bayesian) for network in networks):
        raise TypeError("networks must be a list of Bayesian networks, made by bl.bayesianize, at least one.")
    if len({id(network) for network in networks}) < len(networks):
        raise ValueError("A network is in the list twice. Make one for every seed.")
    first: Bayesian = networks[0]
    method = first.method
    own = type(method)
    if not own.trains_by_loss:
        raise UnsupportedModel(
            f"{own.__name__} does more than descend the gradient of a loss (it samples, averages or measures the "
            "network), so its networks cannot be one vmapped step. Use bnn.fit for each, or fit_together for "
            "bl.Variational, bl.IVON or bl.MCDropout."
        )
    obstacles = [
        ("pruned networks", any(network.masks for network in networks)),
        ("continual learning", any(network.anchor is not None for network in networks)),
        ('priors with learn="closed form"', any(network.priors.has_closed_forms for network in networks)),
        ("several processes", rank_and_world()[1] > 1),
        ("a loader with persistent_workers", bool(getattr(loader, "persistent_workers", False))),
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


class _Loss(nn.Module):
    """The terms of the loss of one network, as a module to call with its parameters."""

    def __init__(self, bnn: Bayesian):
        super().__init__()
        self.bnn = bnn

    def forward(self, batch: Batch, kl_weight: float | Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        terms = self.bnn.method.loss(self.bnn, batch, cast("float | None", kl_weight))
        log_hyperprior = self.bnn.priors.log_hyperprior()
        if log_hyperprior is not None:
            terms = terms.less(log_hyperprior)
        return terms.objective, terms.nll, terms.kl


class Stack(Bayesian):
    """Several networks as one: their parameters and buffers are stacked, (S, *shape).

    Its loss is the sum of theirs, so that optimizers, CUDA graphs and checkpoints need not know of it.
    """

    count: int
    settings: Settings
    ready: bool

    @classmethod
    def of(cls, networks: Sequence[Bayesian]) -> Stack:
        """Stack the networks, which are not changed."""
        stack: Any = copy.deepcopy(networks[0])
        stack.__class__ = cls
        stack._set(count=len(networks), settings={}, ready=False)
        values = stacked([{n: t.detach() for n, t in tensors_of(network).items()} for network in networks])
        stack_tensors(stack, values)
        stack._stack_priors(networks)
        return cast("Stack", stack)

    def _stack_priors(self, networks: Sequence[Bayesian]) -> None:
        """Stack the hyperparameters of fixed priors."""
        for names in self._priors.shared():
            prior = self._priors.given[names[0]]
            if not isinstance(prior, Learnable) or prior.learned:
                continue
            like = tensors_of(self.model)[names[0]]
            given = [cast("Learnable", network.priors.given[names[0]]) for network in networks]
            settings = {
                setting: torch.stack([own.setting_like(setting, like) for own in given])
                for setting in prior.hyperparameters()
            }
            together = prior.with_settings(settings)
            self.settings[id(together)] = settings
            self._priors.given.update(dict.fromkeys(names, together))

    def loss(self, batch: Batch, *, kl_weight: float | Tensor | None = None) -> Tensor:
        """Sum the losses of all networks, each of its own batch, (S, B, ...)."""
        tensors = {f"bnn.{name}": tensor for name, tensor in tensors_of(self).items()}
        if not self.ready:
            self._prepare(tensors, batch, kl_weight)

        def of_one(tensors: Params, settings: Settings, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
            return self._of_one(tensors, settings, batch, kl_weight)

        try:
            with vmapped():
                objective, nll, kl = vmap(of_one, randomness="different")(tensors, self.settings, batch)
        except RuntimeError as error:
            who = f"{type(self.model).__name__} with {self.method!r}"
            raise_if_of_vmap(error, f"{who} cannot run under vmap: {error} Use bnn.fit for each network.")
            raise
        weight = self._kl_weight_now(kl_weight)
        self._set(terms=Terms(nll.sum(), kl.sum(), weight, self.data_size()).detached())
        total: Tensor = objective.sum()
        return total

    def _kl_weight_now(self, kl_weight: float | Tensor | None) -> float | Tensor:
        schedule = getattr(self.method, "kl_schedule", None)
        if kl_weight is None:
            kl_weight = 1.0 if schedule is None else self.scheduled(schedule)
        return kl_weight * getattr(self.method, "temperature", 1.0)

    def _of_one(
        self, tensors: Params, settings: Settings, batch: Batch, kl_weight: float | Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the loss of one network, with its tensors in place of the stack's."""
        stacked_priors = self._priors
        own = copy.copy(stacked_priors)
        made: dict[int, Prior] = {}
        for prior in stacked_priors.given.values():
            if id(prior) in settings and id(prior) not in made:
                made[id(prior)] = cast("Learnable", prior).with_settings(settings[id(prior)])
        own.given = {name: made.get(id(prior), prior) for name, prior in stacked_priors.given.items()}
        self._set(_priors=own)
        try:
            found: tuple[Tensor, Tensor, Tensor] = functional_call(_Loss(self), tensors, (batch, kl_weight))
            return found
        finally:
            self._set(_priors=stacked_priors)

    def _prepare(self, tensors: Params, batch: Any, kl_weight: float | Tensor | None) -> None:
        """Call the loss of the first network: it settles which layers are noisy."""
        first = {name: tensor.detach()[0].clone() for name, tensor in tensors.items()}
        settings = {key: {name: value[0] for name, value in own.items()} for key, own in self.settings.items()}
        with torch.no_grad(), kept_random_state():
            self._of_one(first, settings, _first(batch), kl_weight)
        self._set(ready=True)

    @torch.no_grad()
    def unstack(self, networks: Sequence[Bayesian]) -> None:
        """Copy every network's share back to it."""
        together = tensors_of(self)
        for index, network in enumerate(networks):
            for name, tensor in tensors_of(network).items():
                tensor.copy_(together[name][index])
            network.num_data = self.num_data
            network.steps_per_epoch = self.steps_per_epoch
            network.step = self.step


def _first(batch: Any) -> Any:
    """Take the first network's part of a stacked batch."""
    if isinstance(batch, Mapping):
        return {key: _first(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(_first(value) for value in batch)
    return batch[0]
