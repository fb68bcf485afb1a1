"""IVON: variational inference by natural gradients, as an optimizer.

    q(w) = Π N(wᵢ | mᵢ, σᵢ²)          maximise  L = E_q[log p(D|w)] − KL(q ‖ p)

This is the objective of `Variational` with another optimizer. Steps are scaled by the posterior's own variances, as
Newton's are by the curvature, and the variances follow the curvature that draws of the weights show. Everything
`Variational` can do also works here: any prior with a KL, local reparametrisation, pruning. The paper shares one draw
of the weights between the examples of a minibatch.

For the loss E_q[mean NLL] + KL(q ‖ p) / N let u = 1 / (N σ²), which at the optimum is the curvature of the loss, and û
the curvature that a draw shows. Improved variational online Newton is

    g ← β₁ g + (1 − β₁) ∂L/∂m                                     m ← m − lr · g / u
    u ← β₂ u + (1 − β₂) û + ½ (1 − β₂)² (u − û)² / u

and u stays positive for any û. With the reparametrisation w = m + σ ε, the gradient of the loss in log σ is
∂L/∂log σ = (û − u) σ² (for the paper's shared draw, û = ĝ ε / σ + δ, with δ the prior's precision over N). So two
ordinary gradients, from any estimator, are enough. With x = (1 − β₂) N ∂L/∂log σ the last line is

    log σ ← log σ − ½ log(1 + x + ½ x²).

`lr` is as in gradient descent with momentum while u has its initial value. Unlike in the paper, the prior's part of
∂L/∂m has momentum too, which does not change the optimum.

Shen, Daheim, Cong, Nickl, Marconi, Bazan, Yokota, Gurevych, Cremers, Khan & Möllenhoff 2024, arXiv:2402.17641
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimWarning
from bayeslim.families import DiagonalGaussian, ZeroMean
from bayeslim.io.registry import register
from bayeslim.methods.shared.steepness import flatness
from bayeslim.methods.variational import Variational
from bayeslim.results import Fit

MAX_STEP = 1e30
"""The largest lr · curvature · N; the step multiplies it with σ² and a gradient in single precision."""

POINT_RATE = 0.01
"""The learning rate of parameters without a variance, trained by Adam, as a fraction of the rate of the others."""

MIN_SHARE = 0.1
"""Below this share of the steps over which the curvature is averaged, σ has hardly moved."""


class NaturalGradient(torch.optim.Optimizer):
    """Natural gradients for Gaussians, and Adam for parameters without a variance.

    Args:
        means: m, parameters.
        log_stds: log σ of each.
        points: parameters without a variance.
        lr: the learning rate.
        num_data: N divided by the temperature.
        curvature: the initial u.
        betas: β₁ and β₂.
    """

    def __init__(
        self,
        means: Sequence[Tensor],
        log_stds: Sequence[Tensor],
        points: Sequence[Tensor],
        lr: float,
        *,
        num_data: float,
        curvature: float,
        betas: tuple[float, float],
    ):
        if not lr > 0:
            raise ValueError(f"lr must be positive. Got {lr}.")
        if lr * curvature * num_data > MAX_STEP:
            raise ValueError(f"lr={lr:g} is too large for {num_data:g} examples. A usual rate of IVON is 0.1.")
        settings = {"num_data": num_data, "curvature": curvature, "beta1": betas[0], "beta2": betas[1], "steps": 0}
        groups = [{"params": [*means, *log_stds], "lr": lr, "spread": True, **settings}]
        if points:
            groups.append({"params": list(points), "lr": POINT_RATE * lr, "spread": False, "steps": 0})
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step for means, standard deviations and points.

        Args:
            closure: recomputes the loss and returns it; not needed if the gradients are there.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["steps"] += 1
            if group["spread"]:
                self._natural(group)
            else:
                self._adam(group)
        return loss

    def _natural(self, group: dict[str, Any]) -> None:
        half = len(group["params"]) // 2
        pairs = [
            (mean, log_std)
            for mean, log_std in zip(group["params"][:half], group["params"][half:], strict=True)
            if mean.grad is not None and log_std.grad is not None
        ]
        if not pairs:
            return
        means, log_stds = [mean for mean, _ in pairs], [log_std for _, log_std in pairs]
        momentum = self._buffers(means, "momentum")
        torch._foreach_lerp_(momentum, _gradients(means), 1 - group["beta1"])
        # 1 / u = N σ², with σ from before this step
        inverse = torch._foreach_exp(torch._foreach_mul(log_stds, 2.0))
        rate = group["lr"] * group["curvature"] * group["num_data"] / (1 - group["beta1"] ** group["steps"])
        torch._foreach_mul_(inverse, momentum)
        torch._foreach_add_(means, inverse, alpha=-rate)
        x = torch._foreach_mul(_gradients(log_stds), (1 - group["beta2"]) * group["num_data"])
        torch._foreach_addcmul_(x, x, x, value=0.5)
        torch._foreach_log1p_(x)
        torch._foreach_add_(log_stds, x, alpha=-0.5)

    def _adam(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        gradients, momentum = _gradients(params), self._buffers(params, "momentum")
        square = self._buffers(params, "square")
        torch._foreach_lerp_(momentum, gradients, 0.1)
        torch._foreach_lerp_(square, torch._foreach_mul(gradients, gradients), 0.001)
        roots = torch._foreach_sqrt(torch._foreach_div(square, 1 - 0.999 ** group["steps"]))
        torch._foreach_add_(roots, 1e-8)
        torch._foreach_addcdiv_(params, momentum, roots, value=-group["lr"] / (1 - 0.9 ** group["steps"]))

    def _buffers(self, params: list[Tensor], name: str) -> list[Tensor]:
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p)
        return [self.state[p][name] for p in params]


@register("method")
@dataclass(frozen=True)
class IVON(Variational):
    """Variational inference by natural gradients; more settings in `Variational`.

    Attributes:
        estimator: how noise is drawn in training; the paper uses "shared", one draw for a minibatch.
        momentum: β₁, for the gradients of the means.
        memory: β₂, for the curvature, which is averaged over about 1 / (1 − β₂) steps. They should be many epochs:
            with fewer, the curvature of a weight that few examples read decays until the next of them throws it far
            off. The default is for large data; with a few steps an epoch 0.99 is enough.
        curvature: the assumed curvature of the loss at the start, so that σ = 1 / √(N · curvature); with Gaussian noise
            s < 1 it is 1/s² times as large. A smaller value explores more widely. In training much shorter than the
            memory, σ stays near this start, and `fit` warns.
    """

    estimator: Literal["auto", "local", "shared", "flipout", "mean"] = "shared"
    momentum: float = 0.9
    memory: float = 0.99999
    curvature: float = 1.0

    name: ClassVar[str] = "ivon"
    default_sites: ClassVar[str] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        trains_spreads = isinstance(self.family, DiagonalGaussian) and self.family.suffix == DiagonalGaussian.suffix
        trains_spreads = trains_spreads and not isinstance(self.family, ZeroMean)
        if not trains_spreads or self.renyi != 1 or self.gates is not None or self.estimator == "mean":
            raise ValueError(
                "IVON needs independent Gaussians, the ELBO and noise: use family=DiagonalGaussian(), renyi=1 and no "
                f"gates, or bl.Variational. Got family={self.family!r}, renyi={self.renyi:g}, gates={self.gates!r}, "
                f"estimator={self.estimator!r}."
            )
        for setting in ("momentum", "memory"):
            if not 0 <= getattr(self, setting) < 1:
                raise ValueError(f"{setting} must be in [0, 1). Got {getattr(self, setting)}.")
        if not self.curvature > 0:
            raise ValueError(f"curvature must be positive. Got {self.curvature}.")

    @property
    def trains_plain_stds(self) -> bool:
        """False: the natural gradient scales the steps of σ itself."""
        return False

    def default_lr(self, bnn: Bayesian) -> float:
        """Return the usual rate of gradient descent with momentum."""
        return 0.1

    def optimizer(self, bnn: Bayesian, lr: float) -> torch.optim.Optimizer:
        """Make the optimizer; before the first step, set σ from the curvature."""
        assert isinstance(self.family, DiagonalGaussian)
        means = [bnn.model.get_parameter(name) for name in bnn.sites.names]
        log_stds = [self.family.log_std(bnn.model, name) for name in bnn.sites.names]
        random = {id(p) for p in (*means, *log_stds)}
        points = [p for p in bnn.parameters() if p.requires_grad and id(p) not in random]
        num_data = bnn.data_size() / self.temperature
        if bnn.step == 0:
            with torch.no_grad():
                for log_std in log_stds:
                    start = -0.5 * math.log(num_data * self.curvature / flatness(bnn.likelihood))
                    log_std.copy_(torch.where(log_std.isinf(), log_std, torch.full_like(log_std, start)))
        betas = (self.momentum, self.memory)
        return NaturalGradient(means, log_stds, points, lr, num_data=num_data, curvature=self.curvature, betas=betas)

    def fit(self, bnn: Bayesian, loader: Any, **options: Any) -> Fit:
        """Train, and warn if σ is still near its start.

        The options are those of `bayeslim.train.fit`, but for an optimizer.
        """
        if options.get("optimizer") is not None:
            raise TypeError(
                "IVON is itself an optimizer and takes no optimizer=. Use bl.Variational() to train with another one."
            )
        result = super().fit(bnn, loader, **options)
        averaged = 1 / (1 - self.memory)
        if bnn.step < MIN_SHARE * averaged:
            warnings.warn(
                "Standard deviations are still near their start: IVON averages the curvature over about "
                f"{averaged:.0f} steps, and training had {bnn.step}. Use IVON(memory={1 - 1 / max(2, bnn.step):.6g}) "
                "to average over the whole training, or choose the start by IVON(curvature=...).",
                BayeslimWarning,
                stacklevel=3,
            )
        return result


def _gradients(params: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]
