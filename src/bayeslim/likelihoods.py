"""Likelihoods p(y | f): what a network's outputs say about the targets.

Each one turns outputs f into per-example log-probabilities, summarises draws of outputs into a `Prediction`, and, for
curvature methods, gives the Hessian of −log p(y|f) in the outputs as a square root: columns s_k with H = Σ_k s_k s_kᵀ.

Examples are the first dimension. Whatever follows (positions in a sequence, several targets) belongs to the same
example and is summed, so that one example counts once in `num_data`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeslim.errors import BayeslimError, ShapeMismatch
from bayeslim.results import Prediction


class Likelihood(nn.Module):
    """The base of all likelihoods."""

    name: ClassVar[str]

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log p(yₙ | fₙ) of each example, (B,)."""
        raise NotImplementedError

    def mean_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over examples of −log p(yₙ | fₙ)."""
        return -self.log_prob(outputs, targets).mean()

    def check_targets(self, targets: Tensor) -> None:
        """Raise a `ShapeMismatch` for targets that cannot be; looked at in the first batch of a run."""

    def predict(self, outputs: Tensor) -> Prediction:
        """Summarise draws of the outputs, (S, B, ...), as a `Prediction`."""
        raise NotImplementedError

    def sqrt_hessian(self, outputs: Tensor) -> Tensor:
        """Columns s_k, (K, *outputs.shape), with Σ_k s_k s_kᵀ = −∇²_f log p(y|f); the generalised Gauss-Newton uses it.

        The Hessian is block-diagonal over all but the last dimension, and the columns are those of every block at once.
        """
        raise NotImplementedError

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets from p(y | f)."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, for saving."""
        return {}

    def extra_repr(self) -> str:
        """The arguments, shown in the repr."""
        return ", ".join(f"{k}={v!r}" for k, v in self.config().items())


def _per_example(values: Tensor) -> Tensor:
    return values.flatten(1).sum(1) if values.ndim > 1 else values


def _single(outputs: Tensor) -> Tensor:
    """In single precision at least: half precision is for networks, not for their log-probabilities and averages."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def _moments_over_draws(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over the first dimension, in passes that run along memory."""
    mean = values.mean(0)
    return mean, (values - mean).square().mean(0)


class Categorical(Likelihood):
    """One of C classes; outputs are logits.

    Args:
        class_dim: the dimension of the outputs that holds the classes: −1 for (B, ..., C), 1 for images (B, C, H, W).
            Predicted probabilities have them last, (B, H, W, C), either way.
        ignore_index: targets with this value (padding) contribute nothing.
    """

    name = "categorical"

    def __init__(self, class_dim: int = -1, ignore_index: int = -100):
        super().__init__()
        self.class_dim = class_dim
        self.ignore_index = ignore_index

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, for saving."""
        return {"class_dim": self.class_dim, "ignore_index": self.ignore_index}

    def _logits(self, outputs: Tensor) -> Tensor:
        outputs = _single(outputs)
        return outputs if self.class_dim == -1 else outputs.movedim(self.class_dim, -1)

    @property
    def _stacked_class_dim(self) -> int:
        """Where the classes are once draws or columns are stacked in front of the outputs."""
        return self.class_dim + 1 if self.class_dim >= 0 else self.class_dim

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log softmax(f)_y, summed over positions, (B,)."""
        losses = self._cross_entropy(outputs, targets, "none")
        return -losses if targets.ndim == 1 else -_per_example(losses.view(targets.shape))

    def mean_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over examples of −log softmax(f)_y, summed over positions."""
        return self._cross_entropy(outputs, targets, "sum")

    def _cross_entropy(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Of all positions of all examples, in a row; or their sum, divided by how many examples there are."""
        logits = self._logits(outputs)
        if targets.is_floating_point():
            raise ShapeMismatch(
                f"Categorical needs integer class indices as targets. Got {targets.dtype}. "
                "Pass targets.long(), or targets.argmax(-1) for one-hot rows."
            )
        if logits.shape[:-1] != targets.shape:
            raise ShapeMismatch(
                f"Categorical needs targets of shape {tuple(logits.shape[:-1])} for outputs of shape "
                f"{tuple(outputs.shape)} with the classes in dimension {self.class_dim}. "
                f"Got targets of shape {tuple(targets.shape)}. "
                "Set Categorical(class_dim=...) if the classes are elsewhere."
            )
        share = None
        if reduction == "sum":  # class weights of 1 / B make it a mean: a division would be one more step each way
            classes, examples = logits.shape[-1], max(targets.shape[0], 1)
            share = torch.full((classes,), 1 / examples, dtype=logits.dtype, device=logits.device)
        if targets.ndim > 1:
            logits, targets = logits.flatten(0, -2), targets.flatten()
        try:
            return F.cross_entropy(logits, targets.long(), share, ignore_index=self.ignore_index, reduction=reduction)
        except IndexError:
            raise ShapeMismatch(
                f"Categorical needs targets from 0 to {logits.shape[-1] - 1}, as the network has {logits.shape[-1]} "
                f"outputs. Got {int(targets.min())} to {int(targets.max())}. Give the network as many outputs as there "
                "are classes (for one output there is likelihoods.Bernoulli()), or count classes from 0."
            ) from None

    def predict(self, outputs: Tensor) -> Prediction:
        """Average the class probabilities over draws, (S, B, ..., C)."""
        probs = self._stacked_logits(outputs).softmax(-1)
        mean, spread = _moments_over_draws(probs)
        aleatoric = torch.special.entr(probs).sum(-1).mean(0)
        epistemic = (torch.special.entr(mean).sum(-1) - aleatoric).clamp_min(0)
        return Prediction("classes", mean, outputs, aleatoric, epistemic, probs=mean, spread=spread)

    def _stacked_logits(self, outputs: Tensor) -> Tensor:
        outputs = _single(outputs)
        return outputs if self.class_dim == -1 else outputs.movedim(self._stacked_class_dim, -1)

    def sqrt_hessian(self, outputs: Tensor) -> Tensor:
        """Each class against those after it: Σ_c s_c s_cᵀ = diag(p) − p pᵀ, (C − 1, *outputs.shape).

        With t_c = Σ_{k>c} p_k these are s_c = √(p_c t_c / (p_c + t_c)) (e_c − p_{>c} / t_c), the Cholesky factor, whose
        last column is zero.
        """
        probs = self._logits(outputs).softmax(-1)
        first, after = probs[..., :-1], probs[..., 1:].flip(-1).cumsum(-1).flip(-1)
        weight = (first * after / (first + after)).nan_to_num_(0.0).sqrt()
        rest = (probs.unsqueeze(-2) / after.unsqueeze(-1)).nan_to_num_(0.0).triu(1)
        columns = weight.unsqueeze(-1) * (torch.eye(*rest.shape[-2:]).to(rest) - rest)
        columns = columns.movedim(-2, 0)  # (..., c, C) -> (c, ..., C)
        return columns.movedim(-1, self._stacked_class_dim).to(outputs.dtype)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw classes."""
        probs = self._logits(outputs).softmax(-1)
        draws = torch.multinomial(probs.reshape(-1, probs.shape[-1]), 1, generator=generator)
        return draws.view(probs.shape[:-1])


def _check_range(likelihood: Likelihood, targets: Tensor, least: float, most: float) -> None:
    if targets.numel() and not (least <= float(targets.min()) and float(targets.max()) <= most):
        name = type(likelihood).__name__
        raise ShapeMismatch(
            f"{name} needs targets {f'from {least} to {most}' if most < math.inf else f'of at least {least}'}. "
            f"Got {float(targets.min()):g} to {float(targets.max()):g}."
        )


def _binary_entropy(probs: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(probs) + torch.special.entr(1 - probs)
    return entropy


class Bernoulli(Likelihood):
    """Independent yes/no targets; outputs are logits, of the targets' shape."""

    name = "bernoulli"

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Y log σ(f) + (1−y) log σ(−f), summed over the targets of an example, (B,)."""
        outputs, targets = _aligned(self, _single(outputs), targets)
        return -_per_example(F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none"))

    def check_targets(self, targets: Tensor) -> None:
        """They are probabilities: 0, 1, or between."""
        _check_range(self, targets, 0, 1)

    def predict(self, outputs: Tensor) -> Prediction:
        """Average the probabilities over draws, (S, B, ...)."""
        probs = _single(outputs).sigmoid()
        mean, spread = _moments_over_draws(probs)
        aleatoric = _binary_entropy(probs).mean(0)
        epistemic = (_binary_entropy(mean) - aleatoric).clamp_min(0)
        return Prediction("binary", mean, outputs, aleatoric, epistemic, probs=mean, spread=spread)

    def sqrt_hessian(self, outputs: Tensor) -> Tensor:
        """√(p(1−p)) on each output's own axis, (K, *outputs.shape)."""
        return _diagonal_columns((outputs.sigmoid() * (-outputs).sigmoid()).sqrt())

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw zeros and ones."""
        return torch.bernoulli(outputs.sigmoid(), generator=generator)


class Poisson(Likelihood):
    """Counts; outputs are log rates, of the targets' shape."""

    name = "poisson"

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Y f − eᶠ − log y!, summed over the targets of an example, (B,)."""
        outputs, targets = _aligned(self, _single(outputs), targets)
        counts = targets.to(outputs.dtype)
        return _per_example(counts * outputs - outputs.exp() - torch.lgamma(counts + 1))

    def check_targets(self, targets: Tensor) -> None:
        """Counts are not negative."""
        _check_range(self, targets, 0, math.inf)

    def predict(self, outputs: Tensor) -> Prediction:
        """Average the rates over draws, (S, B, ...); a count's own variance is its rate."""
        rate, spread = _moments_over_draws(_single(outputs).exp())
        return Prediction("counts", rate, outputs, aleatoric=rate.clone(), epistemic=spread)

    def sqrt_hessian(self, outputs: Tensor) -> Tensor:
        """√rate on each output's own axis, (K, *outputs.shape)."""
        return _diagonal_columns((outputs / 2).exp())

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw counts."""
        return torch.poisson(outputs.exp(), generator=generator)


class Gaussian(Likelihood):
    """Real targets with normal noise; outputs are means.

    Args:
        noise: the noise's *standard deviation* (in the targets' units); or "learned", one parameter trained with the
            network (from `initial_noise`); or "heteroscedastic", where the network's last dimension holds the means and
            then the log *variances*.
        initial_noise: where a learned noise starts.
    """

    name = "gaussian"

    def __init__(self, noise: float | Literal["learned", "heteroscedastic"] = 0.1, *, initial_noise: float = 0.1):
        super().__init__()
        if isinstance(noise, str) and noise not in ("learned", "heteroscedastic"):
            raise ValueError(
                f'Gaussian(noise=...) must be a positive number, "learned" or "heteroscedastic". Got {noise!r}.'
            )
        if not isinstance(noise, str) and not noise > 0:
            raise ValueError(f"Gaussian(noise=...) is a standard deviation and must be positive. Got {noise}.")
        if not initial_noise > 0:
            raise ValueError(f"initial_noise is a standard deviation and must be positive. Got {initial_noise}.")
        self.mode = noise if isinstance(noise, str) else "fixed"
        self._config = {"noise": noise, "initial_noise": initial_noise}
        start = math.log(noise if not isinstance(noise, str) else initial_noise)
        if self.mode == "learned":
            self.log_noise = nn.Parameter(torch.tensor(start))
        elif self.mode == "fixed":
            self.register_buffer("log_noise", torch.tensor(start), persistent=False)

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, for saving."""
        return dict(self._config)

    @property
    def noise(self) -> Tensor:
        """The noise's standard deviation, where it does not depend on the input."""
        if self.mode == "heteroscedastic":
            raise BayeslimError("A heteroscedastic Gaussian has a noise for each input: read it from the outputs.")
        return self.log_noise.exp()

    def _moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation of the targets."""
        outputs = _single(outputs)
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
        """Log N(y | mean, noise²), summed over the targets of an example, (B,)."""
        mean, log_std = self._moments(outputs)
        mean, targets = _aligned(self, mean, targets)
        log_std = log_std.reshape(mean.shape) if log_std.ndim else log_std
        z = (targets.to(mean.dtype) - mean) * torch.exp(-log_std)
        return _per_example(-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi))

    def predict(self, outputs: Tensor) -> Prediction:
        """Mean over draws, (S, B, ...); the noise is aleatoric, the spread of the means epistemic."""
        means, log_std = self._moments(outputs)
        mean, spread = _moments_over_draws(means)
        noise = (2 * log_std).exp()
        noise = noise.mean(0) if self.mode == "heteroscedastic" else noise.expand_as(mean).clone()
        return Prediction("values", mean, outputs, aleatoric=noise, epistemic=spread)

    def sqrt_hessian(self, outputs: Tensor) -> Tensor:
        """1/noise on each output's own axis, (K, *outputs.shape).

        With input-dependent noise the expected Hessian (the Fisher information) is used: 1/noise² for the mean and ½
        for the log variance.
        """
        mean, log_std = self._moments(outputs)
        if self.mode != "heteroscedastic":
            return _diagonal_columns(torch.exp(-log_std).expand(outputs.shape)).to(outputs.dtype)
        scales = torch.cat([torch.exp(-log_std), torch.full_like(mean, math.sqrt(0.5))], -1)
        return _diagonal_columns(scales).to(outputs.dtype)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets."""
        mean, log_std = self._moments(outputs)
        noise = torch.empty_like(mean).normal_(generator=generator)
        return mean + log_std.exp() * noise


def _diagonal_columns(scale: Tensor) -> Tensor:
    """Columns with one non-zero each, on the last dimension, (K, *scale.shape)."""
    if scale.ndim == 1:
        return scale.unsqueeze(0)
    return torch.diag_embed(scale).movedim(-2, 0)


def _aligned(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets of one shape; a trailing dimension of one may be missing on either side, nothing else."""
    if outputs.shape != targets.shape:
        if outputs.shape == (*targets.shape, 1):
            targets = targets.unsqueeze(-1)
        elif targets.shape == (*outputs.shape, 1):
            outputs = outputs.unsqueeze(-1)
        else:
            raise ShapeMismatch(
                f"{type(likelihood).__name__} needs targets of the outputs' shape {tuple(outputs.shape)}. "
                f"Got {tuple(targets.shape)}."
            )
    return outputs, targets


LIKELIHOODS: dict[str, type[Likelihood]] = {c.name: c for c in (Categorical, Bernoulli, Poisson, Gaussian)}
"""Likelihoods by the name they are saved under; a new one is added here."""
