"""Posteriors from training that another loop runs: what each method takes along the way, and makes of it at the end.

    Variational, IVON, MCDropout, ...   nothing: the posterior is trained
    Laplace                             the curvature, at the end
    MCBatchNorm                         the statistics of minibatches, at the end
    SWA, SWAG                           moments of networks, from `start` on
    Snapshot                            the networks at the ends of cycles
    SGLD, SGHMC, ...                    networks after the burn-in; the optimizer must be `bnn.optimizer(lr)`

Methods that train several networks, or pass over all data for each step, have a loop of their own and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any, ClassVar

import torch

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, UnsupportedModel
from bayeslim.methods.base import Method
from bayeslim.methods.deep_ensemble import DeepEnsemble
from bayeslim.methods.hmc import HMC
from bayeslim.methods.laplace import Laplace
from bayeslim.methods.mc_batch_norm import MCBatchNorm
from bayeslim.methods.multi_swag import MultiSWAG
from bayeslim.methods.shared.averaging import Averaging, move_to_mean_
from bayeslim.methods.shared.chain_method import ChainMethod
from bayeslim.methods.shared.kept_networks import KeptNetworks
from bayeslim.methods.shared.moving import moving_weights
from bayeslim.methods.shared.particle_method import gathered, snapshot
from bayeslim.methods.shared.trajectory import Trajectory
from bayeslim.methods.snapshot import Snapshot
from bayeslim.methods.subspace import Subspace
from bayeslim.methods.svgd import SVGD
from bayeslim.samplers import Sampler


class Collector:
    """The base: a method whose posterior is trained, and needs nothing else.

    Args:
        bnn: the network.
        loader: training data.
        total: the number of optimizer steps of the run.
        optimizers: those of the run.
    """

    finds_posterior: ClassVar[bool] = False
    """Whether the posterior is found at the end; one of an earlier run does not describe the weights that move now."""

    def __init__(self, bnn: Bayesian, loader: Any, total: int, optimizers: Sequence[torch.optim.Optimizer]):
        self.bnn, self.loader, self.total, self.first = bnn, loader, total, bnn.step

    def begin_(self) -> None:
        """Forget the posterior of an earlier run."""
        if self.finds_posterior:
            for key in ("posterior", "networks"):
                self.bnn.state.pop(key, None)

    @property
    def step(self) -> int:
        """Optimizer steps of this run."""
        return self.bnn.step - self.first

    def observe(self) -> None:
        """Look at the network after an optimizer step."""

    def finish(self) -> None:
        """Find the posterior, after the last step."""


class Afterwards(Collector):
    """Laplace and MCBatchNorm: a pass over the data at the trained weights."""

    finds_posterior = True

    def finish(self) -> None:
        """Measure the curvature, or the statistics of minibatches."""
        self.bnn.fit(self.loader)


class Average(Collector):
    """SWA and SWAG: moments of networks along training."""

    finds_posterior = True

    def __init__(self, bnn: Bayesian, loader: Any, total: int, optimizers: Sequence[torch.optim.Optimizer]):
        super().__init__(bnn, loader, total, optimizers)
        method = bnn.method
        assert isinstance(method, Averaging)
        self.begin = method.first_step(total)
        self.every = (bnn.steps_per_epoch or 1) if method.every == "epoch" else method.every
        self.trajectory = Trajectory(getattr(method, "rank", None), bnn.sites.names)

    def observe(self) -> None:
        """Take the network if its step is due."""
        if self.step > self.begin and self.step % self.every == 0:
            self.trajectory.add(self.bnn)

    def finish(self) -> None:
        """Set the network to the mean, and build the posterior around it."""
        bnn = self.bnn
        method: Any = bnn.method
        if self.trajectory.count < method.min_networks:
            raise BayeslimError(
                f"{type(method).__name__} took {self.trajectory.count} networks, one every {self.every} steps after "
                f"step {self.begin}: too few. Train for more steps, start earlier (start=0.5), or take one more often "
                "(every=10, in steps)."
            )
        move_to_mean_(bnn, self.trajectory)
        bnn.state.update(method.found(bnn, self.trajectory, self.loader))


class Ends(Collector):
    """Snapshot: the networks at the ends of cycles.

    The learning rate must follow them: give `bnn.method.factor(step / total)` to a scheduler.
    """

    finds_posterior = True

    def __init__(self, bnn: Bayesian, loader: Any, total: int, optimizers: Sequence[torch.optim.Optimizer]):
        super().__init__(bnn, loader, total, optimizers)
        method = bnn.method
        assert isinstance(method, Snapshot)
        self.due = {round(cycle * total / method.cycles) for cycle in range(method.burn_in + 1, method.cycles + 1)}
        self.found: list[Any] = []

    def observe(self) -> None:
        """Keep the network at the end of a cycle."""
        if self.step in self.due:
            self.found.append(snapshot(self.bnn))

    def finish(self) -> None:
        """Keep the networks as the posterior."""
        if not self.found:
            raise BayeslimError("No snapshot was kept: training stopped before the end of the first kept cycle.")
        self.bnn.method.keep(self.bnn, gathered(self.found))  # type: ignore[attr-defined]


class Chain(Collector):
    """Samplers: networks after the burn-in."""

    finds_posterior = True

    def __init__(self, bnn: Bayesian, loader: Any, total: int, optimizers: Sequence[torch.optim.Optimizer]):
        super().__init__(bnn, loader, total, optimizers)
        method = bnn.method
        assert isinstance(method, ChainMethod)
        if not any(isinstance(optimizer, Sampler) for optimizer in optimizers):
            raise BayeslimError(
                f"{type(method).__name__} samples by its own optimizer. Train with bnn.optimizer(lr). "
                f"Got {', '.join(type(optimizer).__name__ for optimizer in optimizers)}."
            )
        if method.chains > 1 or method.subset != "all":
            raise UnsupportedModel(
                "In another training loop there is one chain of all weights. Use chains=1 and subset='all', or "
                "bnn.fit(loader)."
            )
        moving = moving_weights(bnn, method, loader, None)
        steps = [self.first + step for step in method.time.kept(total, method.samples, method.thinning)]
        self.kept = KeptNetworks(moving.names, moving.others(bnn), steps)

    def observe(self) -> None:
        """Keep the network if its step is due."""
        self.kept.observe(self.bnn)

    def finish(self) -> None:
        """Keep the networks as the posterior."""
        self.bnn.method.keep(self.bnn, self.kept.particles(self.bnn))  # type: ignore[attr-defined]


@singledispatch
def collector(
    method: Method, bnn: Bayesian, loader: Any, total: int, optimizers: Sequence[torch.optim.Optimizer]
) -> Collector:
    """Choose the collector of a method; register a method's type to change it."""
    return Collector(bnn, loader, total, optimizers)


collector.register(Laplace, lambda method, *run: Afterwards(*run))
collector.register(MCBatchNorm, lambda method, *run: Afterwards(*run))
collector.register(Averaging, lambda method, *run: Average(*run))
collector.register(Snapshot, lambda method, *run: Ends(*run))
collector.register(ChainMethod, lambda method, *run: Chain(*run))


@collector.register(DeepEnsemble)
@collector.register(MultiSWAG)
@collector.register(SVGD)
@collector.register(HMC)
@collector.register(Subspace)
def _(method: Method, bnn: Bayesian, loader: Any, total: int, optimizers: Sequence[torch.optim.Optimizer]) -> Collector:
    raise UnsupportedModel(
        f"{type(method).__name__} trains several networks, or on all data at once, in a loop of its own: call "
        "bnn.fit(loader, ...). In another training loop use Variational, IVON, Laplace, SWAG, Snapshot, SGLD, SGHMC or "
        "MCDropout."
    )
