"""Networks trained abreast: S networks of one architecture as one, under one `vmap`.

A training step of a small network is mostly overhead, so S steps at once cost little more than one. Every
parameter and buffer is stacked, (S, *shape), inputs and outputs are (S, B, ...), and nothing that one network computes
depends on another: a step on the sum of their losses is a step of each on its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from bayeslim.bayesian import Bayesian
from bayeslim.errors import ShapeMismatch, UnsupportedModel
from bayeslim.methods.base import Terms
from bayeslim.noise import kept_random_state, vmapped
from bayeslim.posteriors.particles import stacked, tensors_of
from bayeslim.priors import Learnable, Prior, Priors
from bayeslim.stochastic import plain_type
from bayeslim.train.loaders import Loader
from bayeslim.types import Batch, Params

T = TypeVar("T")
Settings = dict[int, Params]
"""Tensors that are the hyperparameters of fixed priors, by the identity of the prior."""

VMAPPED_TYPES = frozenset({
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Linear, nn.Bilinear, nn.Flatten, nn.Unflatten, nn.LayerNorm,
    nn.BatchNorm1d, nn.Softmax, nn.LogSoftmax, nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU,
    nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh,
})  # fmt: skip
"""Modules that are known to work under `vmap` with weights of their own for every network, and to gain from it."""

MAX_WEIGHTS_PER_NETWORK = {"cpu": 100_000, "cuda": 1_000_000}


def is_faster(model: nn.Module) -> bool:
    """Check whether networks train faster abreast.

    Small networks of linear layers without hooks do.

    Convolutions with different weights are slower under `vmap` than one network after the other.
    """
    weights = list(model.parameters())
    if sum(p.numel() for p in weights) > MAX_WEIGHTS_PER_NETWORK.get(weights[0].device.type, 0):
        return False
    return all(
        plain_type(module) in VMAPPED_TYPES
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
        for module in model.modules()
    )


class _One(nn.Module):
    """A function of one network and its batch, as a module to call with the network's parameters."""

    def __init__(self, bnn: Bayesian):
        super().__init__()
        self.bnn = bnn

    def forward(self, function: Callable[[Bayesian, Batch], T], batch: Batch) -> T:
        return function(self.bnn, batch)


class Stack(Bayesian):
    """Several networks as one: their parameters and buffers are stacked, (S, *shape).

    Its loss is the sum of theirs, so that optimizers, CUDA graphs and checkpoints need not know of it.
    """

    settings: Settings
    one: _One
    own_priors: Priors
    ready: bool
    networks: int

    @classmethod
    def of(cls, networks: Sequence[Bayesian]) -> Stack:
        """Stack copies of networks, each with its own tensors and hyperparameters."""
        stack = cls.at(networks[0], [tensors_of(network) for network in networks])
        stack._stack_priors(networks)
        return stack

    @classmethod
    def at(cls, bnn: Bayesian, starts: Sequence[Params]) -> Stack:
        """Stack copies of a network with these parameters and buffers, all by name."""
        stack: Any = copy.deepcopy(bnn)
        stack.__class__ = cls
        values = stacked([{name: tensor.detach() for name, tensor in own.items()} for own in starts])
        stacks: dict[Tensor, Tensor] = {}
        for name, tensor in tensors_of(stack).items():
            is_parameter = isinstance(tensor, nn.Parameter)
            stacks[tensor] = nn.Parameter(values[name], tensor.requires_grad) if is_parameter else values[name]
        for module in stack.modules():
            for slots in (module._parameters, module._buffers):  # all of them, since tied tensors stand in several
                slots.update({leaf: stacks[tensor] for leaf, tensor in slots.items() if tensor in stacks})
        stack._set(settings={}, one=_One(stack), own_priors=copy.copy(stack._priors), ready=False, networks=len(starts))
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

        def of_one(bnn: Bayesian, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
            objective = Bayesian.loss(bnn, batch, kl_weight=cast("float | None", kl_weight))
            assert bnn.terms is not None
            return objective, bnn.terms.nll, bnn.terms.kl

        tensors = tensors_of(self)
        if not self.ready:
            self._prepare(of_one, tensors, batch)
        objective, nll, kl = self.each(of_one, tensors, batch)
        weight = self._kl_weight_now(kl_weight)
        self._set(terms=Terms(nll.sum(), kl.sum(), weight, self.data_size()).detached())
        total: Tensor = objective.sum()
        return total

    def each(
        self, function: Callable[[Bayesian, Batch], T], tensors: Params, batch: Batch, *, shared: bool = False
    ) -> T:
        """Compute a function of every network under one `vmap`.

        Args:
            function: of a network and its batch, to tensors.
            tensors: parameters and buffers of all networks by name, (S, *shape).
            batch: of every network, (S, B, ...).
            shared: whether all networks have one batch instead, (B, ...).
        """

        def of_one(tensors: Params, settings: Settings, batch: Batch) -> T:
            return self._of_one(function, tensors, settings, batch)

        dims = (0, 0, None if shared else 0)
        try:
            with nullcontext() if torch.compiler.is_compiling() else vmapped():
                found: T = vmap(of_one, dims, randomness="different")(tensors, self.settings, batch)
                return found
        except RuntimeError as error:
            if "atching rule" not in str(error) and "vmap" not in str(error):
                raise
            raise UnsupportedModel(
                f"{type(self.model).__name__} with {self.method!r} cannot run under vmap: {error} Train the "
                "networks one by one: bnn.fit for each, or DeepEnsemble(together=False)."
            ) from error

    def _kl_weight_now(self, kl_weight: float | Tensor | None) -> float | Tensor:
        schedule = getattr(self.method, "kl_schedule", None)
        if kl_weight is None:
            kl_weight = 1.0 if schedule is None else self.scheduled(schedule)
        return kl_weight * getattr(self.method, "temperature", 1.0)

    def _of_one(self, function: Callable[[Bayesian, Batch], T], tensors: Params, settings: Settings, batch: Batch) -> T:
        """Compute a function of one network, with its tensors in place of the stack's."""
        stacked_priors, own = self._priors, self.own_priors
        made: dict[int, Prior] = {}
        for prior in stacked_priors.given.values():
            if id(prior) in settings and id(prior) not in made:
                made[id(prior)] = cast("Learnable", prior).with_settings(settings[id(prior)])
        own.given = {name: made.get(id(prior), prior) for name, prior in stacked_priors.given.items()}
        self._set(_priors=own)
        try:
            named = {f"bnn.{name}": tensor for name, tensor in tensors.items()}
            found: T = functional_call(self.one, named, (function, batch))
            return found
        finally:
            self._set(_priors=stacked_priors)
            own.given = stacked_priors.given

    def _prepare(self, function: Callable[[Bayesian, Batch], object], tensors: Params, batch: Any) -> None:
        """Call a function of the first network: it settles which layers are noisy."""
        first = {name: tensor.detach()[0].clone() for name, tensor in tensors.items()}
        settings = {key: {name: value[0] for name, value in own.items()} for key, own in self.settings.items()}
        with torch.no_grad(), kept_random_state():
            self._of_one(function, first, settings, _first(batch))
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


class AbreastLoader:
    """S passes over loaders at once, their batches stacked.

    Args:
        loaders: of every network, of equal sizes; several may be one loader, which each passes over in an order of its
            own. Other attributes are those of the first.
    """

    def __init__(self, loaders: Sequence[Any]):
        self.loaders = list(loaders)

    def __len__(self) -> int:
        return len(self.loaders[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loaders[0], name)

    def repeated(self, count: int) -> AbreastLoader:
        """Pass over every loader `count` times: for several networks in the place of each."""
        return AbreastLoader([loader for loader in self.loaders for _ in range(count)])

    def __iter__(self) -> Iterator[Any]:
        first = self.loaders[0]
        if type(first) is Loader and all(loader is first for loader in self.loaders):
            return first.side_by_side(len(self.loaders))
        passes = [iter(loader) for loader in self.loaders]
        if len({id(one) for one in passes}) < len(passes):
            raise TypeError(
                f"{type(first).__name__} cannot be iterated {len(passes)} times at once "
                "(persistent_workers). Use one that can, or train the networks one by one, as "
                "DeepEnsemble(together=False) does."
            )
        return (_side_by_side(batches) for batches in zip(*passes, strict=True))


def _side_by_side(parts: tuple[Any, ...]) -> Any:
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: _side_by_side(tuple(part[key] for part in parts)) for key in first}
    if type(first) in (tuple, list):
        return tuple(_side_by_side(values) for values in zip(*parts, strict=True))
    if not isinstance(first, Tensor) or any(part.shape != first.shape for part in parts):
        given = ", ".join(str(tuple(getattr(part, "shape", ()))) for part in parts)
        raise ShapeMismatch(
            f"Training together stacks one batch of every network, which must be tensors of one shape. Got {given}. "
            "Train the networks one by one, as DeepEnsemble(together=False) does."
        )
    return torch.stack(parts)
