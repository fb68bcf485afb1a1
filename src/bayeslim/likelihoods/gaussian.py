"""Real values: p(y | f) = N(y | f, noise²)."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayeslim.errors import BayeslimError, ShapeMismatch, check_number
from bayeslim.io.registry import register
from bayeslim.likelihoods.base import Likelihood, aligned, diagonal_columns, moments_over_draws, per_example, single
from bayeslim.results import Prediction


@register("likelihood")
class Gaussian(Likelihood):
    """Real targets with Gaussian noise; outputs are means.

    Args:
        noise: the noise's *standard deviation* (in the targets' units); or "learned", one parameter trained with the
            network (from `initial_noise`); or "heteroscedastic", where the network's last dimension holds the means and
            then the log *variances*.
        initial_noise: the first value of a learned noise.
    """

    name = "gaussian"

    def __init__(self, noise: float | Literal["learned", "heteroscedastic"] = 0.1, *, initial_noise: float = 0.1):
        super().__init__()
        if isinstance(noise, str) and noise not in ("learned", "heteroscedastic"):
            raise ValueError(
                f'Gaussian(noise=...) must be a positive number, "learned" or "heteroscedastic". Got {noise!r}.'
            )
        if not isinstance(noise, str):
            check_number("noise", noise, above=0)
        check_number("initial_noise", initial_noise, above=0)
        self.mode = noise if isinstance(noise, str) else "fixed"
        self._config = {"noise": noise, "initial_noise": initial_noise}
        start = math.log(noise if not isinstance(noise, str) else initial_noise)
        if self.mode == "learned":
            self.log_noise = nn.Parameter(torch.tensor(start))
        elif self.mode == "fixed":
            self.register_buffer("log_noise", torch.tensor(start), persistent=False)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, for saving."""
        return dict(self._config)

    @property
    def noise(self) -> Tensor:
        """The noise's standard deviation, where it does not depend on the input."""
        if self.mode == "heteroscedastic":
            raise BayeslimError("A heteroscedastic Gaussian has a noise for each input: read it from the outputs.")
        return self.log_noise.exp()

    def _moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the mean and the log standard deviation of the targets."""
        outputs = single(outputs)
        if self.mode != "heteroscedastic":
            log_std = self.log_noise
            return outputs, log_std if log_std.dtype == outputs.dtype else log_std.to(outputs.dtype)
        if outputs.shape[-1] % 2:
            raise ShapeMismatch(
                "A heteroscedastic Gaussian reads means and log variances from the last dimension, which must be even. "
                f"Got outputs of shape {tuple(outputs.shape)}."
            )
        mean, log_variance = outputs.chunk(2, -1)
        return mean, log_variance / 2

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute log N(y | mean, noise²), summed over an example's targets, (B,)."""
        mean, log_std = self._moments(outputs)
        mean, targets = aligned(self, mean, targets)
        log_std = log_std.reshape(mean.shape) if log_std.ndim else log_std
        z = (targets.to(mean.dtype) - mean) * torch.exp(-log_std)
        return per_example(-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi))

    def predict(self, outputs: Tensor) -> Prediction:
        """Average over draws, (S, B, ...): noise is aleatoric, spread of means epistemic."""
        means, log_std = self._moments(outputs)
        mean, spread = moments_over_draws(means)
        noise = (2 * log_std).exp()
        noise = noise.mean(0) if self.mode == "heteroscedastic" else noise.expand_as(mean).clone()
        return Prediction("values", mean, outputs, aleatoric=noise, epistemic=spread)

    def sqrt_hessian(self, outputs: Tensor) -> Tensor:
        """Put 1/noise on each output's own axis, (K, *outputs.shape).

        With input-dependent noise the expected Hessian (the Fisher information) is used: 1/noise² for the mean and ½
        for the log variance.
        """
        mean, log_std = self._moments(outputs)
        if self.mode != "heteroscedastic":
            return diagonal_columns(torch.exp(-log_std).expand(outputs.shape)).to(outputs.dtype)
        scales = torch.cat([torch.exp(-log_std), torch.full_like(mean, math.sqrt(0.5))], -1)
        return diagonal_columns(scales).to(outputs.dtype)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets."""
        mean, log_std = self._moments(outputs)
        noise = torch.empty_like(mean).normal_(generator=generator)
        return mean + log_std.exp() * noise
