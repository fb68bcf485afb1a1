"""Posteriors from training that another loop runs: what each method takes along the way, and makes of it at the end.

    Variational, IVON, MCDropout, ...   nothing: the posterior is trained
    Laplace                             the curvature, at the end
    MCBatchNorm                         the statistics of minibatches, at the end
    SWA, SWAG                           moments of networks, from `start` on
    Snapshot                            the networks at the ends of cycles
    SGLD, SGHMC, ...                    networks after the burn-in; the optimizer must be `bnn.optimizer(lr)`

A checkpoint must hold what was taken so far: a run that goes on without it is refused before it trains.

Methods that train several networks, or pass over all data for each step, have a loop of their own and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, UnsupportedModel
from bayeslim.io.storage import check_fits
from bayeslim.methods.base import Method
from bayeslim.methods.deep_ensemble import DeepEnsemble
from bayeslim.methods.hmc import HMC
from bayeslim.methods.laplace import Laplace
from bayeslim.methods.mc_batch_norm import MCBatchNorm
from bayeslim.methods.multi_swag import MultiSWAG
from bayeslim.methods.shared.averaging import Averaging, move_to_mean_
from bayeslim.methods.shared.chain_method import ChainMethod
from bayeslim.methods.shared.particle_method import gathered, snapshot
from bayeslim.methods.shared.trajectory import Trajectory, trained
from bayeslim.methods.snapshot import Snapshot
from bayeslim.methods.subspace import Subspace
from bayeslim.methods.svgd import SVGD
from bayeslim.samplers import Sampler
from bayeslim.types import Params, device_of

STEPS = "steps"
"""The key of the steps whose networks were taken, among the tensors of a collector."""


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

    later: ClassVar[str] = ""
    """The setting that makes a method take networks later, for an error message."""

    def __init__(self, bnn: Bayesian, loader: Any, total: int, optimizers: Sequence[torch.optim.Optimizer]):
        self.bnn, self.loader, self.total, self.first = bnn, loader, total, bnn.step
        self.taken: list[int] = []

    def begin_(self) -> None:
        """Forget the posterior of an earlier run."""
        if self.finds_posterior:
            for key in ("posterior", "networks"):
                self.bnn.state.pop(key, None)

    @property
    def step(self) -> int:
        """Optimizer steps of this run, with those before it was resumed."""
        return self.bnn.step - self.first

    def is_due(self, step: int) -> bool:
        """Tell whether the network is taken after a step of the run."""
        return False

    def observe(self) -> None:
        """Take the network after an optimizer step if it is due."""
        if self.is_due(self.step):
            self.taken.append(self.step)
            self.take()

    def take(self) -> None:
        """Take the network as it is now."""

    def finish(self) -> None:
        """Find the posterior, after the last step."""

    def collected(self) -> Params:
        """Return what was taken so far, as tensors for a checkpoint."""
        return {STEPS: torch.tensor(self.taken, dtype=torch.int64)} | self.tensors()

    def tensors(self) -> Params:
        """Return the networks taken so far; a name is "part:parameter"."""
        return {}

    def resume(self, done: int, collected: Mapping[str, Tensor] | None) -> None:
        """Go on with a run after some of its steps.

        Args:
            done: the number of steps.
            collected: what `collected` returned after them.
        """
        self.first = self.bnn.step - done
        due = [step for step in range(1, done + 1) if self.is_due(step)]
        if not due:
            return
        have = [] if not collected else collected[STEPS].tolist()
        if have != due:
            raise BayeslimError(
                f"{type(self.bnn.method).__name__} needs the networks of {len(due)} steps from {due[0]} to {due[-1]}, "
                f"and training goes on after step {done}. The checkpoint holds networks of {len(have)} steps"
                f"{f' from {have[0]} to {have[-1]}' if have else ''}. Start the run again without the checkpoint, or "
                f"choose {self.later}, so that the first network is due after step {done}."
            )
        parts: dict[str, Params] = {}
        for key, tensor in (collected or {}).items():
            part, _, name = key.partition(":")
            parts.setdefault(part, {})[name] = tensor.to(device_of(self.bnn.model))
        self.taken = due
        self.restore(parts)

    def restore(self, parts: Mapping[str, Params]) -> None:
        """Take the networks of the steps `taken` from a checkpoint, by part and parameter."""


class Afterwards(Collector):
    """Laplace and MCBatchNorm: a pass over the data at the trained weights."""

    finds_posterior = True

    def finish(self) -> None:
        """Measure the curvature, or the statistics of minibatches."""
        self.bnn.fit(self.loader)


class Average(Collector):
    """SWA and SWAG: moments of networks along training."""

    finds_posterior = True
    later = "a larger start"

    def __init__(self, bnn: Bayesian, loader: Any, total: int, optimizers: Sequence[torch.optim.Optimizer]):
        super().__init__(bnn, loader, total, optimizers)
        method = bnn.method
        assert isinstance(method, Averaging)
        self.begin = method.first_step(total)
        self.every = (bnn.steps_per_epoch or 1) if method.every == "epoch" else method.every
        self.trajectory = Trajectory(getattr(method, "rank", None), bnn.sites.names)

    def is_due(self, step: int) -> bool:
        """Tell whether the network of a step is averaged."""
        return step > self.begin and step % self.every == 0

    def take(self) -> None:
        """Add the network to the moments."""
        self.trajectory.add(self.bnn)

    def tensors(self) -> Params:
        """Return the moments, which later steps do not change."""
        moments = self.trajectory
        found = {f"mean:{name}": tensor.clone() for name, tensor in moments.mean.items()}
        found |= {f"squares:{name}": tensor.clone() for name, tensor in moments.squares.items()}
        for index, each in enumerate(moments.deviations):
            found |= {f"deviation-{index}:{name}": tensor for name, tensor in each.items()}
        return found

    def restore(self, parts: Mapping[str, Params]) -> None:
        """Set the moments to those of a checkpoint."""
        moments, now = self.trajectory, trained(self.bnn)
        spread = {name: now[name] for name in moments.names}
        deviations = [parts.get(f"deviation-{index}", {}) for index in range(min(moments.rank or 0, len(self.taken)))]
        moments.count, moments.mean = len(self.taken), parts.get("mean", {})
        moments.squares = parts.get("squares", {})
        check_fits(now, moments.mean, "the trained parameters")
        for each in (moments.squares, *deviations):
            check_fits(spread, each, "the random parameters")
        moments.deviations.extend(deviations)

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


class Networks(Collector):
    """The base of methods whose posterior is the networks at some steps."""

    finds_posterior = True
    later = "a larger burn_in"

    def __init__(self, bnn: Bayesian, loader: Any, total: int, optimizers: Sequence[torch.optim.Optimizer]):
        super().__init__(bnn, loader, total, optimizers)
        self.due: set[int] = set()
        self.found: list[tuple[Params, Params]] = []

    def is_due(self, step: int) -> bool:
        """Tell whether the network of a step is kept."""
        return step in self.due

    def take(self) -> None:
        """Keep a copy of the network."""
        self.found.append(snapshot(self.bnn))

    def tensors(self) -> Params:
        """Return the networks kept so far."""
        return {
            f"{part}-{index}:{name}": tensor
            for index, network in enumerate(self.found)
            for part, own in zip(("values", "rest"), network, strict=True)
            for name, tensor in own.items()
        }

    def restore(self, parts: Mapping[str, Params]) -> None:
        """Keep the networks of a checkpoint."""
        now = snapshot(self.bnn)
        for index in range(len(self.taken)):
            network = parts.get(f"values-{index}", {}), parts.get(f"rest-{index}", {})
            for own, given in zip(now, network, strict=True):
                check_fits(own, given, "the network")
            values, rest = ({name: given[name] for name in own} for own, given in zip(now, network, strict=True))
            self.found.append((values, rest))

    def finish(self) -> None:
        """Keep the networks as the posterior."""
        if not self.found:
            raise BayeslimError(
                f"{type(self.bnn.method).__name__} kept no network: training ended at step {self.step}, and the first "
                f"is due at step {min(self.due, default=self.total)}. Train for longer, or use a smaller burn_in."
            )
        self.bnn.method.keep(self.bnn, gathered(self.found))  # type: ignore[attr-defined]


class Ends(Networks):
    """Snapshot: the networks at the ends of cycles.

    The learning rate must follow them: give `bnn.method.factor(step / total)` to a scheduler.
    """

    def __init__(self, bnn: Bayesian, loader: Any, total: int, optimizers: Sequence[torch.optim.Optimizer]):
        super().__init__(bnn, loader, total, optimizers)
        method = bnn.method
        assert isinstance(method, Snapshot)
        self.due = {round(cycle * total / method.cycles) for cycle in range(method.burn_in + 1, method.cycles + 1)}


class Chain(Networks):
    """Samplers: networks after the burn-in."""

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
        self.due = set(method.time.kept(total, method.samples, method.thinning))


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
