"""Dropout as a posterior: every mask is a network drawn from it, at test time as in training.

    p(y|x, D) ≈ (1/S) Σ_s p(y|x, w ∘ z_s)        z_s ~ Bernoulli(1 − p) / (1 − p) for what each dropout layer drops

Training is plain training with dropout and the prior as weight decay, so any network that was trained with dropout will
do as it is. Batch norms and all else are in evaluation mode.

`predict` draws one mask for a network and shares it between all inputs, so that a sample is a function; with
`how="local"` every example has masks of its own, as they come (see `bayeslim.methods.dropout_masks`). The two have the
same marginals.

Gal & Ghahramani 2016, arXiv:1506.02142
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from bayeslim.errors import UnsupportedModel
from bayeslim.io.registry import register
from bayeslim.methods.dropout_masks import dropping_out, drops_out, masks_of, mentions_dropout, one_probe_each
from bayeslim.methods.shared.noisy_network import NoisyNetwork, random_seed
from bayeslim.results import Prediction
from bayeslim.types import Batches, Inputs, call

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian

_NONE = (
    "{} has no dropout, so there is nothing random about it: put nn.Dropout(p) with p > 0 between its layers and train "
    "it so, or use another method, such as bl.Laplace(), which needs none."
)


@register("method")
@dataclass(frozen=True)
class MCDropout(NoisyNetwork):
    """Dropout at test time, on any network with dropout layers."""

    name: ClassVar[str] = "mc-dropout"

    def convert(self, bnn: Bayesian) -> None:
        """Refuse a network without dropout."""
        if not any(drops_out(module) or mentions_dropout(module) for module in bnn.model.modules()):
            raise UnsupportedModel(_NONE.format(type(bnn.model).__name__))

    def predictive(
        self, bnn: Bayesian, batches: Batches, samples: int, how: str, generator: torch.Generator | None
    ) -> Prediction | None:
        """From draws of masks; by "mean" and "map" without any."""
        with one_probe_each():
            return super().predictive(bnn, batches, samples, how, generator)

    def noisy_pass(self, bnn: Bayesian, batches: list[Inputs], local: bool) -> Tensor:
        """The outputs of one network, or of one for every example."""
        seed = None if local else random_seed()
        outputs = []
        with dropping_out(bnn.model) as dropout:
            for inputs in batches:
                with masks_of(seed, bnn.model, inputs):
                    outputs.append(call(bnn.model, inputs))
        if not dropout.seen and not any(drops_out(module) for module in bnn.model.modules()):
            raise UnsupportedModel(_NONE.format(type(bnn.model).__name__))
        return torch.cat(outputs)
