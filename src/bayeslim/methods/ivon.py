"""IVON: variational inference by natural gradients, in the place of an optimizer.

    q(w) = Π N(wᵢ | mᵢ, σᵢ²)          maximise  L = E_q[log p(D|w)] − KL(q ‖ p)

the optimum of `Variational` by another way: steps are scaled by the posterior's own variances, as Newton's are by the
curvature, and the variances follow the curvature that draws of the weights show (`bayeslim.methods.natural_gradient`).
It is the method `Variational` with another optimizer, so all it can do, this one can: any prior with a KL, local
reparametrisation, pruning. The draws of the paper are the shared ones, one for a minibatch.

Shen, Daheim, Cong, Nickl, Marconi, Bazan, Yokota, Gurevych, Cremers, Khan & Möllenhoff 2024, arXiv:2402.17641
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from bayeslim.families import DiagonalGaussian
from bayeslim.io.registry import register
from bayeslim.methods.natural_gradient import NaturalGradient
from bayeslim.methods.variational import Variational
from bayeslim.results import Fit

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian


@register("method")
@dataclass(frozen=True)
class IVON(Variational):
    """Variational inference by natural gradients; further settings as in `Variational`.

    Attributes:
        estimator: how noise is drawn in training; the paper's is "shared", one draw for a minibatch.
        momentum: β₁, of the means' gradients.
        memory: β₂, of the curvature: it is averaged over about 1 / (1 − β₂) steps.
        curvature: what the loss is taken to be curved by at the start, so that σ = 1 / √(N · curvature). Smaller
            explores wider.
    """

    estimator: Literal["auto", "local", "shared", "flipout", "mean"] = "shared"
    momentum: float = 0.9
    memory: float = 0.999
    curvature: float = 1.0

    name: ClassVar[str] = "ivon"
    default_sites: ClassVar[str] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        trains_spreads = isinstance(self.family, DiagonalGaussian) and self.family.suffix == DiagonalGaussian.suffix
        if not trains_spreads or self.renyi != 1 or self.gates is not None or self.estimator == "mean":
            raise ValueError(
                "IVON is for independent Gaussians, the ELBO and noise: use family=DiagonalGaussian() and renyi=1, no "
                f"gates, or bl.Variational. Got family={self.family!r}, renyi={self.renyi:g}, gates={self.gates!r}, "
                f"estimator={self.estimator!r}."
            )
        for setting in ("momentum", "memory"):
            if not 0 <= getattr(self, setting) < 1:
                raise ValueError(f"{setting} must be in [0, 1). Got {getattr(self, setting)}.")
        if not self.curvature > 0:
            raise ValueError(f"curvature must be positive. Got {self.curvature}.")

    def default_lr(self, bnn: Bayesian) -> float:
        """That of gradient descent with momentum."""
        return 0.1

    def optimizer(self, bnn: Bayesian, lr: float) -> torch.optim.Optimizer:
        """Natural gradients; before the first step, spreads are set by the curvature to start from."""
        assert isinstance(self.family, DiagonalGaussian)
        means = [bnn.model.get_parameter(name) for name in bnn.sites.names]
        log_stds = [self.family.log_std(bnn.model, name) for name in bnn.sites.names]
        random = {id(p) for p in (*means, *log_stds)}
        points = [p for p in bnn.parameters() if p.requires_grad and id(p) not in random]
        num_data = bnn.data_size() / self.temperature
        if bnn.step == 0:
            with torch.no_grad():
                for log_std in log_stds:
                    start = -0.5 * math.log(num_data * self.curvature)
                    log_std.copy_(torch.where(log_std.isinf(), log_std, torch.full_like(log_std, start)))
        betas = (self.momentum, self.memory)
        return NaturalGradient(means, log_stds, points, lr, num_data=num_data, curvature=self.curvature, betas=betas)

    def fit(self, bnn: Bayesian, loader: Any, **options: Any) -> Fit:
        """Train.

        Args:
            bnn: the network.
            loader: batches of inputs and targets.
            **options: those of `bayeslim.train.fit`.
        """
        if options.get("optimizer") is not None:
            raise TypeError("IVON is an optimizer itself and takes no other. Use bl.Variational() to train with one.")
        return super().fit(bnn, loader, **options)
