"""Stein variational gradient descent: particles that descend the loss together and repel each other.

    w_i ← w_i + lr φ(w_i),    φ(x_i) = (1/n) Σ_j [ k(x_j, x_i) ∇ log p(x_j|D) + ∇_{x_j} k(x_j, x_i) ]

with k(x, x') = exp(−‖x − x'‖² / h) and ∇ log p(w|D) = −N ∇L(w) from a minibatch. The first term pulls particles to
where the density is high, along the gradients of their neighbours; the second keeps them apart. The bandwidth is
h = med² / log n, with med the median distance between two particles, so that Σ_j k(x_j, x_i) is about n · (1/n) = 1 and
a particle's own gradient balances its neighbours'. One particle finds the most probable weights. The step is made by an
optimizer on −φ / N, in the scale of the library's loss.

Networks with very different weights may be the same function, and networks far apart may fit alike.
With `function_space` the kernel compares their outputs f on the minibatch, and so does the direction,

    φ(f_i) = (1/n) Σ_j [ k(f_j, f_i) ∇_f log p(y|f_j) + ∇_{f_j} k(f_j, f_i) ],        w_i ← w_i + lr · J_iᵀ φ(f_i)

The prior stays on the weights: each particle's own ∇ log p(w_i), scaled by (1/n) Σ_j k(f_j, f_i) as the data term is.

Liu & Wang 2016, arXiv:1608.04471 · Wang, Ren, Zhu & Zhang 2019, arXiv:1902.09754
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, UnsupportedModel
from bayeslim.io.registry import register
from bayeslim.methods.base import Terms
from bayeslim.methods.shared.abreast import Stack
from bayeslim.methods.shared.particle_method import ParticleMethod, set_tensors, snapshot
from bayeslim.methods.shared.particle_stack import ParticleStack
from bayeslim.methods.shared.reinitialise import (
    OptimizerOf,
    check_optimizer_of,
    check_resettable,
    reinitialise_,
    trainable,
)
from bayeslim.posteriors import Particles
from bayeslim.results import Fit, Prediction
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.fit import fit
from bayeslim.train.loaders import training_set_size
from bayeslim.train.options import check_names
from bayeslim.train.seeding import seeded
from bayeslim.types import Batch, Batches, Params, call, device_of, flattened, split_batch


@register("method")
@dataclass(frozen=True)
class SVGD(ParticleMethod):
    """Particles by Stein's method.

    The network itself is set to the last, as their mean is not a useful network.

    Attributes:
        particles: number of networks. Few particles in many dimensions lie too close together: 20 have 0.56, 0.32 and
            0.21 of the variance of a Gaussian posterior in 4, 8 and 16 dimensions (Zhuo et al. 2018, arXiv:1711.04425,
            say why). Use them as an ensemble; for calibrated variances use a sampler, such as `bl.SGHMC`.
        bandwidth: h of the kernel; from the median distance if not given.
        function_space: whether networks are compared by their outputs instead of their weights.
    """

    particles: int = 20
    bandwidth: float | None = None
    function_space: bool = False

    name: ClassVar[str] = "svgd"
    stands_at: ClassVar[Literal["mean", "last"]] = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.particles) is not int or self.particles < 1:
            raise ValueError(f"particles must be a whole number, at least 1. Got {self.particles!r}.")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(f"bandwidth must be positive, or None for the median rule. Got {self.bandwidth}.")

    def loss(self, bnn: Bayesian, batch: Batch, kl_weight: float | None) -> Terms:
        """Compute the MAP loss of one network, or the sum over a stack."""
        stack = bnn.model
        if not isinstance(stack, ParticleStack):
            return super().loss(bnn, batch, kl_weight)
        inputs, targets = split_batch(batch)
        outputs, weight = call(stack, inputs), 1.0 if kl_weight is None else kl_weight

        def nll(of: Tensor) -> Tensor:
            wanted = targets.expand(stack.members, *targets.shape).flatten(0, 1)
            return -stack.members * bnn.likelihood.log_prob(of.flatten(0, 1), wanted).mean()

        if not self.function_space:
            return Terms(nll(outputs), -bnn.log_prior(), weight, bnn.data_size())
        with torch.enable_grad():
            own = outputs.detach().requires_grad_()
            value = nll(own)
            (gradients,) = torch.autograd.grad(value, own, retain_graph=True)
        points = _rows(own.detach())
        direction, closeness = descent(points, _rows(gradients), bnn.data_size(), self.bandwidth)
        steered = (outputs.flatten(1) * direction.to(outputs.dtype)).sum()
        prior = torch.zeros((), device=outputs.device)
        for name, each in bnn.priors.items():
            log_prob = flattened(each.log_prob(stack.get_parameter(name)), 1).sum(1)
            prior = prior - (log_prob * closeness.to(log_prob)).sum()
        # `value` has the gradients of the likelihood's own parameters, `steered` those of the weights
        return Terms(
            value + _only_gradient(steered), -bnn.log_prior().detach() + _only_gradient(prior), weight, bnn.data_size()
        )

    def fit(
        self,
        bnn: Bayesian,
        loader: Any,
        *,
        start: Callable[[], nn.Module] | None = None,
        optimizer: OptimizerOf | None = None,
        seed: int | None = None,
        **training: Any,
    ) -> Fit:
        """Train all particles together from random starts, or continue a fit.

        Args:
            bnn: the network; frozen parameters are the same in every particle.
            loader: batches of inputs and targets; all particles see the same batches.
            start: a function that makes a new network, for modules that cannot draw new random weights themselves.
            optimizer: a function that makes an optimizer of the parameters; Adam if not given.
            seed: makes the run repeatable, and leaves the global random state unchanged.
            **training: options of `bayeslim.train.fit`. `validate` measures the average prediction of the
                particles; callbacks see all particles stacked in one network.

        Returns:
            the history, with means over the particles.
        """
        check_names("SVGD", training, fit)
        check_optimizer_of(optimizer, "The particles are stacked in their own parameters.")
        if bnn.anchor is not None:
            raise BayeslimError("SVGD does not support continual learning. Use bl.Laplace() for that.")
        num_data = training_set_size(bnn, loader)
        with seeded(seed, rank_and_world()[0], loader):
            together = self._together(bnn, start, num_data)
            made = None
            if optimizer is not None:
                made = self._steered(optimizer(trainable(together)), together)
            result = fit(together, loader, optimizer=made, **training)
        self._gather(bnn, together)
        return result.averaged_over(self.posterior(bnn).count)

    def fit_stack(self, stack: Any, networks: Sequence[Bayesian], loader: Any, **options: Any) -> Fit:
        """Train the particles of all networks at once."""
        if self.function_space:
            raise UnsupportedModel("SVGD(function_space=True) trains one network at a time. Use bnn.fit for each.")
        each = [self._together(network, None, stack.num_data) for network in networks]
        every = Stack.of(each)
        every.seed = stack.seed
        result = fit(every, loader, **options)
        for one in each:
            one.to(device_of(every.model))
        every.unstack(each)
        for network, one in zip(networks, each, strict=True):
            self._gather(network, one)
        return result.averaged_over(self.posterior(networks[0]).count)

    def _together(self, bnn: Bayesian, start: Callable[[], nn.Module] | None, num_data: int) -> Bayesian:
        """Make one network of all particles at their starts."""
        if bnn.state.get("posterior") is None and start is None:
            check_resettable(bnn.model)
        stack = ParticleStack(bnn.model, self._starts(bnn, start))
        exact = {re.compile(re.escape(stack.path_of(name))): bnn.priors.given[name] for name in bnn.sites.names}
        together = Bayesian(stack, self, bnn.likelihood, exact, list(exact), num_data)
        together.train(bnn.training)
        together.masks = {stack.path_of(name): mask for name, mask in bnn.masks.items()}
        together.step, together.seed = bnn.step, bnn.seed
        return together

    def _gather(self, bnn: Bayesian, together: Bayesian) -> None:
        """Keep the trained particles as the posterior of their network."""
        stack = together.model
        assert isinstance(stack, ParticleStack)
        bnn.to(device_of(stack))
        bnn.step, bnn.num_data, bnn.steps_per_epoch = together.step, together.num_data, together.steps_per_epoch
        found = stack.tensors()
        own = {name: found.pop(name) for name in bnn.sites.names}
        self.keep(bnn, Particles(own, buffers=found))

    def predictive(
        self, bnn: Bayesian, batches: Batches, samples: int, how: str, generator: torch.Generator | None
    ) -> Prediction | None:
        """Predict with all networks of a stack in training, else as `ParticleMethod`."""
        if isinstance(bnn.model, ParticleStack):
            return bnn.likelihood.predict(torch.cat([call(bnn.model, inputs) for inputs in batches()], 1))
        return super().predictive(bnn, batches, samples, how, generator)

    def _starts(self, bnn: Bayesian, start: Callable[[], nn.Module] | None) -> list[Params]:
        """Collect the starts of the particles; the network is unchanged afterwards."""
        previous: Particles | None = bnn.state.get("posterior")
        if previous is not None:
            return [previous.network(k, bnn.model) for k in range(previous.count)]
        (values, rest), found = snapshot(bnn), []
        try:
            for _ in range(self.particles):
                reinitialise_(bnn.model, start)
                bnn.keep_zeros()
                own, others = snapshot(bnn)
                found.append(own | others)
        finally:
            set_tensors(bnn, values | rest)
        return found

    def optimizer(self, bnn: Bayesian, lr: float) -> torch.optim.Optimizer:
        """Make an Adam optimizer; for a stack, on Stein's direction."""
        return self._steered(super().optimizer(bnn, lr), bnn)

    def _steered(self, optimizer: torch.optim.Optimizer, bnn: Bayesian) -> torch.optim.Optimizer:
        if isinstance(bnn.model, ParticleStack) and not self.function_space:
            optimizer.register_step_pre_hook(lambda *_: self._steer(bnn))
        return optimizer

    def _steer(self, bnn: Bayesian) -> None:
        """Replace every particle's gradient by Stein's direction in its own network."""
        weights = [p for p in map(bnn.model.get_parameter, bnn.sites.names) if p.grad is not None]
        networks = list(zip(*weights, strict=True)) if isinstance(bnn, Stack) else [weights]
        gradients = [p.grad for p in weights if p.grad is not None]
        slopes = list(zip(*gradients, strict=True)) if isinstance(bnn, Stack) else [gradients]
        found = []
        for own, along in zip(networks, slopes, strict=True):
            points, downhill = (torch.cat([_rows(t.detach()) for t in tensors], 1) for tensors in (own, along))
            direction, _ = descent(points, downhill, bnn.data_size(), self.bandwidth)
            found.append(direction.split([p[0].numel() for p in own], 1))
        for p, parts in zip(weights, zip(*found, strict=True), strict=True):
            # fused optimizers need dense gradients
            p.grad = torch.cat([part.flatten() for part in parts]).view(p.shape).to(p.dtype)


def kernel(points: Tensor, bandwidth: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute K (n, n) of all points (n, D), and h, by the median rule if not given."""
    n = len(points)
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
    if bandwidth is not None:
        h = distances.new_tensor(bandwidth)
    elif n == 1:
        h = distances.new_ones(())
    else:
        apart = distances[~torch.eye(n, dtype=torch.bool, device=points.device)]
        h = apart.median() / math.log(n)
    h = h.clamp_min(torch.finfo(points.dtype).tiny * 1e4)  # all points in one place
    return (-distances / h).exp(), h


def descent(points: Tensor, gradients: Tensor, num_data: int, bandwidth: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute −φ / N, and (1/n) Σ_j k(x_j, x_i), of all points (n, D).

    The gradients, (n, D), are those of each point's own loss, −log p / N.
    """
    k, h = kernel(points, bandwidth)
    total = k.sum(1, keepdim=True)
    apart = (k @ points - total * points) * (2 / (h * num_data))
    return (k @ gradients + apart) / len(points), total[:, 0] / len(points)


def _rows(values: Tensor) -> Tensor:
    """Flatten values to one row per particle, at least in single precision."""
    return flattened(values, 1).to(torch.promote_types(values.dtype, torch.float32))


def _only_gradient(value: Tensor) -> Tensor:
    """Return zero with the gradient of a value."""
    return value - value.detach()
