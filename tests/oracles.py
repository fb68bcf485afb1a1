"""Slow, exact answers to compare the library with: one derivative at a time, dense matrices, double loops."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import bayeslim as bl
from bayeslim.posteriors import Particles


def flat(params: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    """Join the named tensors into one vector, in the order of `names`."""
    return torch.cat([params[name].reshape(-1) for name in names])


def unflat(vector: Tensor, model: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """Invert `flat`."""
    shapes = [dict(model.named_parameters())[name].shape for name in names]
    parts = vector.split([math.prod(shape) for shape in shapes])
    return {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}


def parameter_names(model: nn.Module) -> list[str]:
    """List the names of all parameters, tied ones once."""
    return [name for name, _ in model.named_parameters()]


def outputs_of(model: nn.Module, names: Sequence[str], x):
    """The model's outputs as a function of the named parameters, as one vector; in eval mode."""
    model.eval()
    args = x if isinstance(x, tuple) else () if isinstance(x, dict) else (x,)
    kwargs = x if isinstance(x, dict) else {}
    return lambda vector: functional_call(model, unflat(vector, model, names), args, kwargs)


def jacobian(model: nn.Module, x, names: Sequence[str] | None = None) -> Tensor:
    """Compute the Jacobian of the outputs, (B, outputs, P), one backward pass per entry."""
    names = names or parameter_names(model)
    start = flat(dict(model.named_parameters()), names).detach()
    J = torch.autograd.functional.jacobian(outputs_of(model, names, x), start)
    return J.reshape(J.shape[0], -1, len(start))


def output_hessian(likelihood: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
    """−∇²_f log p(y|f) of every example, (B, outputs, outputs)."""
    blocks = []
    for f, y in zip(outputs.detach(), targets, strict=True):
        H = torch.autograd.functional.hessian(
            lambda v, f=f, y=y: -likelihood.log_prob(v.view(1, *f.shape), y.unsqueeze(0)).sum(), f.reshape(-1)
        )
        blocks.append(H)
    return torch.stack(blocks)


def ggn(model: nn.Module, batches: Iterable, likelihood: nn.Module, names: Sequence[str] | None = None) -> Tensor:
    """Compute the generalised Gauss-Newton Σ_n Jᵀ H J as a dense matrix."""
    total = torch.zeros(())
    for x, y in batches:
        J = jacobian(model, x, names)
        f = outputs_of(model, names or parameter_names(model), x)(
            flat(dict(model.named_parameters()), names or parameter_names(model)).detach()
        )
        H = output_hessian(likelihood, f, y)
        total = total + torch.einsum("nop,noq,nqr->pr", J, H, J)
    return total


def hessian(model: nn.Module, batches: Iterable, likelihood: nn.Module, names: Sequence[str] | None = None) -> Tensor:
    """Compute the Hessian of −Σ_n log p(yₙ|xₙ) in the parameters as a dense matrix."""
    names = names or parameter_names(model)
    start = flat(dict(model.named_parameters()), names).detach()
    total = torch.zeros(())
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        for x, y in batches:
            f = outputs_of(model, names, x)
            total = total + torch.autograd.functional.hessian(
                lambda v, f=f, y=y: -likelihood.log_prob(f(v), y).sum(), start
            )
    return total


def example_gradients(
    model: nn.Module, batches: Iterable, likelihood: nn.Module, names: Sequence[str] | None = None
) -> Tensor:
    """Compute the gradient of −log p(yₙ|xₙ) for every example, (N, P)."""
    names = names or parameter_names(model)
    start = flat(dict(model.named_parameters()), names).detach()
    rows = []
    for x, y in batches:
        f = outputs_of(model, names, x)
        rows.append(torch.autograd.functional.jacobian(lambda v, f=f, y=y: -likelihood.log_prob(f(v), y), start))
    return torch.cat(rows)


def linear_regression(
    X: Tensor, y: Tensor, noise: float, prior_precision: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Exact Bayesian linear regression y = X w + N(0, noise²), w ~ N(0, 1/prior_precision).

    Returns:
        the posterior's mean (D,) and covariance (D, D), and log p(y | X).
    """
    N, D = X.shape
    prior = torch.as_tensor(prior_precision, dtype=X.dtype).expand(D)
    covariance = torch.linalg.inv(X.T @ X / noise**2 + torch.diag(prior))
    mean = covariance @ X.T @ y / noise**2
    marginal = noise**2 * torch.eye(N, dtype=X.dtype) + X @ torch.diag(1 / prior) @ X.T
    evidence = torch.distributions.MultivariateNormal(torch.zeros(N, dtype=X.dtype), marginal).log_prob(y)
    return mean, covariance, evidence


def gaussian_kl(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> Tensor:
    """KL(N(mean, covariance) ‖ N(other_mean, other_covariance)) of dense Gaussians."""
    return torch.distributions.kl_divergence(
        torch.distributions.MultivariateNormal(mean, covariance),
        torch.distributions.MultivariateNormal(other_mean, other_covariance),
    )


class Residual(nn.Module):
    """A convolution and a norm beside a shortcut, of images with one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Two numbers for each image."""
        h = self.norm(self.conv(x)).relu()
        return self.head((x + h).mean((2, 3)))


def particles_of(model: nn.Module, members: int = 4) -> Particles:
    """Draw particles with random weights and statistics, the same ones each time."""
    generator = torch.Generator().manual_seed(1)

    def several(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.stack([tensor] * members)
        return torch.rand(members, *tensor.shape, generator=generator).to(tensor) + 0.1

    values = {name: several(p.detach()) for name, p in model.named_parameters()}
    return Particles(values, buffers={name: several(b) for name, b in model.named_buffers()})


def alone(model: nn.Module, particles: Particles, k: int, x: Tensor) -> Tensor:
    """Compute the outputs of a copy of the network with the tensors of particle k."""
    twin = copy.deepcopy(model).eval()
    tensors = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    with torch.no_grad():
        for name, value in (particles.values | particles.buffers).items():
            tensors[name].copy_(value[k])
        outputs: Tensor = twin(_fitting(x, twin))
        return outputs


def _fitting(x: Tensor, model: nn.Module) -> Tensor:
    """Move inputs to a network's device, floating-point ones to its precision."""
    own = next(model.parameters())
    return x.to(own) if x.is_floating_point() else x.to(own.device)


def checked_ensemble(model: nn.Module, x: Tensor, members: int = 4) -> tuple[bl.Bayesian, Callable[..., None]]:
    """Make an ensemble, and a check that `predict` gives the outputs of each particle."""
    bnn = bl.bayesianize(model, bl.DeepEnsemble(members), likelihood=bl.likelihoods.Gaussian())
    bnn.state["posterior"] = particles_of(bnn.model, members)

    def check(samples: int | None = None) -> None:
        particles = bnn.posterior_
        assert isinstance(particles, Particles)
        outputs = bl.predict(bnn, _fitting(x, bnn.model), samples).samples
        for k, found in zip(particles.spread(samples or members), outputs, strict=True):
            torch.testing.assert_close(found, alone(bnn.model, particles, k, x), rtol=1e-4, atol=1e-4)

    return bnn, check
