"""The weights that a sampler moves: all sites, some parameters, or single weights of them.

A subset is chosen as for `Laplace`. Weights outside a `Subnetwork` are held by a mask, as pruned weights are. Unlike in
`Laplace`, the prior of a subnetwork is unchanged: the target is the posterior given the fixed weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bayeslim import curvature
from bayeslim.bayesian import Bayesian
from bayeslim.errors import UnsupportedModel
from bayeslim.methods.shared.curvature_posterior import prior_precisions, random_names
from bayeslim.methods.subnetwork import Subnetwork
from bayeslim.posteriors import prior_precision as precisions
from bayeslim.posteriors.particles import tensors_of
from bayeslim.priors import Normal
from bayeslim.train.seeding import ordered_by
from bayeslim.types import Params, device_of


@dataclass(frozen=True)
class Moving:
    """The weights that are sampled.

    Attributes:
        names: their parameters.
        everything: whether these are all sites; then other trainable parameters are optimised.
        masks: by name, which weights of a parameter move (True); all weights of a parameter without a mask move.
    """

    names: tuple[str, ...]
    everything: bool = True
    masks: Params = field(default_factory=dict)

    @classmethod
    def all_of(cls, bnn: Bayesian) -> Moving:
        """Choose all sites; in a pruned network, the weights that are left."""
        return cls(bnn.sites.names, True, {n: m for n, m in bnn.masks.items() if n in bnn.sites.names})

    def parameters(self, bnn: Bayesian) -> list[nn.Parameter]:
        """List the parameters that are sampled."""
        return [bnn.model.get_parameter(name) for name in self.names]

    def points(self, bnn: Bayesian) -> list[nn.Parameter]:
        """List the parameters that are optimised instead of sampled."""
        random = {id(p) for p in self.parameters(bnn)}
        rest = [p for p in bnn.parameters() if p.requires_grad and id(p) not in random]
        return rest if self.everything else []

    def masks_of(self, bnn: Bayesian) -> dict[Tensor, Tensor]:
        """Return the masks by parameter."""
        found = {bnn.model.get_parameter(name): mask for name, mask in self.masks.items()}
        return {parameter: mask.to(parameter.device) for parameter, mask in found.items()}

    def others(self, bnn: Bayesian) -> tuple[str, ...]:
        """List the names of buffers and optimised parameters."""
        if not self.everything:
            return ()
        return tuple(
            name
            for name, tensor in tensors_of(bnn.model).items()
            if name not in self.names and (not isinstance(tensor, nn.Parameter) or tensor.requires_grad)
        )

    @contextmanager
    def alone(self, bnn: Bayesian) -> Iterator[None]:
        """Compute no gradients for fixed parameters inside."""
        moving = {id(p) for p in self.parameters(bnn)}
        with frozen([p for p in bnn.parameters() if p.requires_grad and id(p) not in moving and not self.everything]):
            yield


@contextmanager
def frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Set `requires_grad` of parameters to False inside."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def moving_weights(bnn: Bayesian, method: Any, loader: Any, seed: int | None) -> Moving:
    """Choose the weights that a method's `subset` names.

    All randomness of the choice, the order of the data too, follows from the seed (0 if None), because a resumed run
    must choose the same weights.
    """
    if method.subset == "all":
        return Moving.all_of(bnn)
    names = random_names(bnn, method, loader)
    pruned = {name: mask for name, mask in bnn.masks.items() if name in names}
    if not isinstance(method.subset, Subnetwork):
        return Moving(names, False, pruned)
    mean = {name: bnn.model.get_parameter(name).detach() for name in names}
    masks = {name: torch.zeros_like(mean[name], dtype=torch.bool) for name in names}
    with ordered_by(loader, 0 if seed is None else seed):
        found = _chosen(bnn, method.subset, mean, loader)
    for name, indices in found.items():
        masks[name].view(-1)[indices.to(masks[name].device)] = True
    chosen = {name: mask for name, mask in masks.items() if bool(mask.any())}
    return Moving(tuple(chosen), False, chosen)


def _chosen(bnn: Bayesian, subset: Subnetwork, mean: Params, loader: Any) -> Params:
    """Choose the flat indices of a subnetwork's weights, by name."""
    if subset.by == "random":
        return subset.choose(mean, {}, {}, bnn.masks)
    for name in mean:
        if not isinstance(bnn.priors[name], Normal):
            raise UnsupportedModel(
                f"A subnetwork is chosen by marginal variances, which need a Normal prior. "
                f'"{name}" has {type(bnn.priors[name]).__name__}. Use Subnetwork(by="random").'
            )
    resolved = precisions.resolve(prior_precisions(bnn, mean), mean)
    like = torch.empty((), dtype=torch.float64, device=device_of(bnn.model))
    found = curvature.diag(bnn.model, loader, bnn.likelihood, "signs", names=list(mean))
    return subset.choose(mean, found, precisions.diagonal(resolved, mean, like), bnn.masks)
