"""IVON's step as an optimizer: natural gradients for the means and spreads of independent Gaussians.

For q(w) = N(m, σ²) and the loss L = E_q[mean NLL] + KL(q ‖ p) / N let u = 1 / (N σ²), which at the optimum is the
curvature of the loss, and û the curvature that a draw shows. Improved variational online Newton is

    g ← β₁ g + (1 − β₁) ∂L/∂m                                     m ← m − lr · g / u
    u ← β₂ u + (1 − β₂) û + ½ (1 − β₂)² (u − û)² / u

and u stays positive whatever û is. By the reparametrisation w = m + σ ε the gradient of the loss in log σ is
∂L/∂log σ = (û − u) σ² (for the shared draw of the paper, û = ĝ ε / σ + δ, with δ the prior's precision over N). So all
that is needed are two ordinary gradients, by any estimator of them, and with x = (1 − β₂) N ∂L/∂log σ the last line is

    log σ ← log σ − ½ log(1 + x + ½ x²).

`lr` is as of gradient descent with momentum while u is what it was at the start. Unlike in the paper the prior's part
of ∂L/∂m has momentum too, which changes no optimum.

Shen et al. 2024, arXiv:2402.17641
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

POINT_RATE = 0.01
"""The learning rate of parameters without a spread, which are trained by Adam, in parts of the others'."""


class NaturalGradient(torch.optim.Optimizer):
    """Natural gradients for Gaussians, and Adam for what has no spread.

    Args:
        means: m, parameters.
        log_stds: log σ of each.
        points: further parameters.
        lr: the learning rate.
        num_data: N, over the temperature.
        curvature: u at the start.
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
        settings = {"num_data": num_data, "curvature": curvature, "beta1": betas[0], "beta2": betas[1], "steps": 0}
        groups = [{"params": [*means, *log_stds], "lr": lr, "spread": True, **settings}]
        if points:
            groups.append({"params": list(points), "lr": POINT_RATE * lr, "spread": False, "steps": 0})
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move means, spreads and points.

        Args:
            closure: computes the loss again and returns it; not needed where gradients are there.
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
        # 1 / u = N σ², of the spread before it changes
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


def _gradients(params: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]
