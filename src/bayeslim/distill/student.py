"""A student: one network that learns the predictive distribution of another; `bayeslim.distill` makes it.

With `outputs="dirichlet"` its outputs are log α of a distribution over class probabilities (a prior network), so that
one pass separates aleatoric from epistemic uncertainty of the teacher:

    p ~ Dir(α),   α = exp(f(x))         E[p] = softmax(f(x))
    total = H(E[p])      aleatoric = E[H(p)] = Σ_c E[p_c] (ψ(α₀ + 1) − ψ(α_c + 1))      epistemic = their difference

Malinin & Gales 2018, arXiv:1802.10501 · Malinin, Mlodozeniec & Gales 2020, arXiv:1905.00076
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from bayeslim.distill import divergences
from bayeslim.errors import ShapeMismatch, UnsupportedModel
from bayeslim.io.registry import register
from bayeslim.likelihoods import Categorical
from bayeslim.methods.base import Terms
from bayeslim.methods.shared.point_network import PointNetwork
from bayeslim.noise import current_generator
from bayeslim.predict.links import dirichlet_prediction
from bayeslim.results import Prediction
from bayeslim.types import Batch, Batches, call, split_batch

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian


@register("method")
@dataclass(frozen=True)
class Student(PointNetwork):
    """One network that imitates a teacher. `distill/targets` makes its targets from the teacher's predictions.

    Attributes:
        outputs: the meaning of the outputs: "probs" (the likelihood's own parameters) or "dirichlet" (log α).
        temperature: the temperature of the probabilities in training.
    """

    outputs: Literal["probs", "dirichlet"] = "probs"
    temperature: float = 1.0

    name: ClassVar[str] = "student"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outputs not in ("probs", "dirichlet"):
            raise ValueError(f'outputs must be "probs" or "dirichlet". Got {self.outputs!r}.')
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive. Got {self.temperature}.")
        if self.outputs == "dirichlet" and self.temperature != 1:
            raise ValueError(f'temperature must be 1 with outputs="dirichlet". Got {self.temperature}.')

    def convert(self, bnn: Bayesian) -> None:
        """Raise if the outputs are a Dirichlet and the likelihood is not categorical."""
        if self.outputs == "dirichlet" and not isinstance(bnn.likelihood, Categorical):
            raise UnsupportedModel(
                f"A Dirichlet is over classes, and the likelihood is {bnn.likelihood.name}. Use Student() instead."
            )

    def loss(self, bnn: Bayesian, batch: Batch, kl_weight: float | None) -> Terms:
        """Compute the divergence from the teacher, whose posterior holds the prior."""
        inputs, teacher = split_batch(batch)
        if not teacher.is_floating_point():
            raise ShapeMismatch(
                "A student needs a teacher's predictions as targets. Got labels. Use bl.distill(teacher, loader)."
            )
        outputs = call(bnn.model, inputs)
        if self.outputs == "dirichlet":
            assert isinstance(bnn.likelihood, Categorical)
            distance = divergences.dirichlet_divergence(bnn.likelihood, outputs, teacher)
        else:
            distance = divergences.divergence(bnn.likelihood, outputs, teacher, self.temperature)
        return Terms(distance.mean(), outputs.new_zeros(()), 0.0, 1)

    def predictive(
        self, bnn: Bayesian, batches: Batches, samples: int, how: str, generator: torch.Generator | None
    ) -> Prediction | None:
        """Predict with the student; for a Dirichlet in closed form, with draws as samples.

        With how="sample" the prediction of a Dirichlet uses the draws alone.
        """
        if how not in ("auto", "sample", "mean", "map"):
            return None
        outputs = torch.cat([call(bnn.model, x) for x in batches()])
        if self.outputs != "dirichlet" or how in ("mean", "map"):
            return bnn.likelihood.predict(outputs.unsqueeze(0))
        assert isinstance(bnn.likelihood, Categorical)
        where = bnn.likelihood.class_dim
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        tiny = torch.finfo(outputs.dtype).tiny
        alpha = outputs.movedim(where, -1).exp().clamp_min(tiny)
        gammas = torch._standard_gamma(alpha.expand(samples, *alpha.shape), generator=current_generator(alpha.device))
        probs = (gammas / gammas.sum(-1, keepdim=True)).nan_to_num(tiny).clamp_min(tiny)
        sampled = bnn.likelihood.predict(probs.log().movedim(-1, where + 1 if where >= 0 else where))
        return sampled if how == "sample" else dirichlet_prediction(sampled, alpha)
