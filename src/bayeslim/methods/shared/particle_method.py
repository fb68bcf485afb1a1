"""The base of methods whose posterior is a set of networks, `Particles`, gathered in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bayeslim.bayesian import Bayesian
from bayeslim.errors import NotFitted
from bayeslim.methods.base import Method
from bayeslim.methods.shared.batch_norms import norms_of
from bayeslim.methods.shared.point_network import put_zeros
from bayeslim.noise import current_generator
from bayeslim.posteriors.particles import Particles, stacked, tensors_of
from bayeslim.results import Fit, Prediction
from bayeslim.types import Batches, Inputs, Params, call


@dataclass(frozen=True)
class ParticleMethod(Method):
    """A method whose posterior is `Particles`, in `bnn.state["posterior"]`."""

    stands_at: ClassVar[Literal["mean", "last"]] = "mean"
    """The weights of the network itself after `fit`: the mean of the particles, or, where their mean is not a useful
    network, the last particle."""

    def posterior(self, bnn: Bayesian) -> Particles:
        """Return the particles that `fit` gathered."""
        posterior = bnn.state.get("posterior")
        if posterior is None:
            raise NotFitted(f"The posterior of {self.name} is gathered in training: call bnn.fit(loader, ...) first.")
        assert isinstance(posterior, Particles)
        return posterior

    def keep(self, bnn: Bayesian, posterior: Particles) -> None:
        """Store particles as the posterior, and set the network's own weights from them."""
        bnn.state["posterior"] = posterior
        self.place(bnn, posterior)

    def place(self, bnn: Bayesian, posterior: Particles) -> None:
        """Set the network to the mean of the particles, or to the last with its buffers."""
        self.stand(bnn, posterior, at_mean=self.stands_at == "mean")

    def stand(self, bnn: Bayesian, posterior: Particles, at_mean: bool) -> None:
        """Set the network to the mean, or to the last particle.

        Averaged particles come with averaged buffers. Otherwise a network with batch norms is set to the last particle:
        there are no statistics for the mean weights.
        """
        last = posterior.count - 1
        at_mean = at_mean and not norms_of(bnn.model)
        if posterior.averaged:
            set_tensors(bnn, posterior.mean | posterior.mean_buffers)
        else:
            set_tensors(bnn, posterior.mean if at_mean else posterior.particle(last) | posterior.buffers_of(last))

    def fit_stack(self, stack: Any, networks: Sequence[Bayesian], loader: Any, **options: Any) -> Fit:
        """Gather the particles of all networks at once, and give each its own."""
        result = self.fit(stack, loader, **options)
        stack.unstack(networks)
        posterior = self.posterior(stack)
        for place, network in enumerate(networks):
            values, buffers = (
                {name: tensor[:, place].clone() for name, tensor in part.items()}
                for part in (posterior.values, posterior.buffers)
            )
            self.keep(network, Particles(values, buffers=buffers))
        return result

    def one_network(self, bnn: Bayesian) -> Params:
        """Return no changes: the network itself already stands for the particles."""
        self.posterior(bnn)
        return {}

    def draw(self, bnn: Bayesian, inputs: Inputs) -> Tensor:
        """Compute the outputs of a random particle, or of the network itself before `fit`."""
        posterior = bnn.state.get("posterior")
        if posterior is None:
            return call(bnn.model, inputs)
        k = int(torch.randint(posterior.count, (), generator=current_generator()))
        return call(bnn.model, inputs, posterior.network(k, bnn.model))

    def condition(self, bnn: Bayesian, masks: Mapping[str, Tensor], **options: Any) -> None:
        """Set masked weights of every particle to zero."""
        posterior = self.posterior(bnn)
        every = {**bnn.masks, **masks}
        own = {name: mask for name, mask in every.items() if name in posterior.values or name in posterior.buffers}
        self.keep(bnn, posterior.condition(own, **options))
        put_zeros(bnn, masks)

    def predictive(
        self, bnn: Bayesian, batches: Batches, samples: int, how: str, generator: torch.Generator | None
    ) -> Prediction | None:
        """Predict with the one network before `fit`; None afterwards."""
        if how == "local":
            raise ValueError(f'how="local" needs noise per example, and {self.name} has none. Use how="sample".')
        if how not in ("mean", "map") or "posterior" in bnn.state:
            return None
        return bnn.likelihood.predict(torch.cat([call(bnn.model, x) for x in batches()]).unsqueeze(0))


def snapshot(bnn: Bayesian) -> tuple[Params, Params]:
    """Copy the random parameters, and everything else that training changes."""
    random = set(bnn.sites.names)
    tensors = {
        name: tensor.detach().clone()
        for name, tensor in tensors_of(bnn.model).items()
        if name in random or not isinstance(tensor, nn.Parameter) or tensor.requires_grad
    }
    values = {name: tensors.pop(name) for name in bnn.sites.names}
    return values, tensors


def gathered(snapshots: list[tuple[Params, Params]]) -> Particles:
    """Stack snapshots into particles."""
    return Particles(stacked([values for values, _ in snapshots]), buffers=stacked([rest for _, rest in snapshots]))


def set_tensors(bnn: Bayesian, tensors: Mapping[str, Tensor]) -> None:
    """Write values into the network's own parameters and buffers."""
    own = tensors_of(bnn.model)
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(value)
