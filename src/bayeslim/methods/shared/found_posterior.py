"""The base of methods whose `fit` finds a Gaussian around the network and keeps it in `bnn.state`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.errors import NotFitted
from bayeslim.methods.base import Method
from bayeslim.methods.shared.point_network import put_zeros
from bayeslim.posteriors import Posterior
from bayeslim.types import Inputs, call, device_of


@dataclass(frozen=True)
class FoundPosterior(Method):
    """A method whose `fit` puts the posterior into `bnn.state["posterior"]`."""

    missing: ClassVar[str]
    """The error message while there is no posterior."""

    def posterior(self, bnn: Bayesian) -> Posterior:
        """Return the posterior that `fit` found, on the network's device."""
        posterior = bnn.state.get("posterior")
        if posterior is None:
            raise NotFitted(self.missing)
        assert isinstance(posterior, Posterior)
        device = device_of(bnn.model)
        if next(iter(posterior.mean.values())).device != device:
            bnn.state["posterior"] = posterior = posterior.to(device)
        return posterior

    def draw(self, bnn: Bayesian, inputs: Inputs) -> Tensor:
        """Compute the outputs of a drawn network, or of the network itself before `fit`."""
        return super().draw(bnn, inputs) if "posterior" in bnn.state else call(bnn.model, inputs)

    def condition(self, bnn: Bayesian, masks: Mapping[str, Tensor], **options: Any) -> None:
        """Condition the random parameters on zeros, and set the others to zero."""
        random = set(bnn.posterior_.names)
        super().condition(bnn, {name: mask for name, mask in masks.items() if name in random}, **options)
        put_zeros(bnn, {name: mask for name, mask in masks.items() if name not in random})
