"""The base of methods that sample by stochastic gradients: chains, and the networks they keep.

A chain is a training run whose optimizer is a sampler (`sampler.py`). The networks at some of its steps are the
particles of the posterior.

Without a learning rate, a chain chooses its own. It burns in at the usual rate of the optimizer, and watches the noise
of minibatch gradients. That noise heats the chain in proportion to the learning rate. From the middle of the burn-in
on, the rate is as low as it must be for an excess of variance of `MAX_EXCESS`, on average over the weights. (Noise of
batches drawn with replacement has this effect. Over a shuffled epoch it partly cancels, and the excess is smaller.)

Several chains run one after the other. Under `torchrun` every rank runs its own chains on
all the data, and at the end the ranks exchange the kept networks and nothing else.
"""

from __future__ import annotations

import math
import os
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import nn

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimWarning, NoSiteMatched, UnsupportedModel
from bayeslim.methods.base import Terms
from bayeslim.methods.shared.abreast import Stack
from bayeslim.methods.shared.chain_run import between_ranks, joined, prepare, run_alone
from bayeslim.methods.shared.kept_networks import KeptNetworks
from bayeslim.methods.shared.learned_noise import average_noise_, noise_of
from bayeslim.methods.shared.moving import Moving, moving_weights
from bayeslim.methods.shared.normal_prior import weight_decay
from bayeslim.methods.shared.particle_method import ParticleMethod
from bayeslim.methods.shared.refit import restored_on_failure
from bayeslim.methods.shared.reinitialise import check_resettable, reinitialise_
from bayeslim.methods.shared.sampler import Sampler
from bayeslim.methods.shared.sampling_schedule import Kind, SamplingSchedule
from bayeslim.methods.shared.steepness import flatness
from bayeslim.methods.subnetwork import Subnetwork, settled
from bayeslim.posteriors.particles import Particles
from bayeslim.results import Fit
from bayeslim.stochastic import evaluating
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.seeding import ordered_by, seed_of_chain
from bayeslim.types import Batch, call, split_batch

MAX_EXCESS = 0.05
"""The relative excess of variance by gradient noise that a chosen learning rate allows."""

MAX_HEAT = 100.0
"""The kinetic temperature above which a chain has left the posterior: it is ten times too wide."""


@dataclass(frozen=True)
class ChainMethod(ParticleMethod):
    """The base of methods that sample by stochastic gradients.

    Attributes:
        samples: number of networks each chain keeps.
        burn_in: the fraction of a chain, or of every cycle, from which no network is kept.
        thinning: steps between two kept networks, counted back from the end of the chain or cycle; if not given they
            are spread evenly over the steps after the burn-in.
        temperature: T of the target p(w|D)^(1/T); below 1 it is a cold posterior.
        chains: number of chains on every rank. The first starts from the network, the others from new random weights;
            with a subset, all start from the network.
        schedule: how the learning rate changes: "constant", "polynomial" or "cyclical" (see `sampling_schedule.py`).
        cycles: number of cycles of a cyclical chain.
        subset: which of the sites are sampled, as in `Laplace`: "all", "last-layer", names, or a `Subnetwork`; all
            other parameters stay fixed then, and the network is in evaluation mode.
    """

    samples: int = 30
    burn_in: float = 0.5
    thinning: int | None = None
    temperature: float = 1.0
    chains: int = 1
    schedule: Kind = "constant"
    cycles: int = 4
    subset: str | tuple[str, ...] | Subnetwork = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "subset", settled(self.subset))
        self.time.check()
        for setting in ("samples", "chains"):
            if not isinstance(getattr(self, setting), int) or getattr(self, setting) < 1:
                raise ValueError(f"{setting} must be a whole number, at least 1. Got {getattr(self, setting)!r}.")
        if self.thinning is not None and (not isinstance(self.thinning, int) or self.thinning < 1):
            raise ValueError(f"thinning is a number of steps, at least 1. Got {self.thinning!r}.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite. Got {self.temperature}.")
        if self.samples < self.time.windows:
            raise ValueError(f"{self.cycles} cycles need a sample each. Got samples={self.samples}.")
        self.sampler([nn.Parameter(torch.zeros(1))], 1.0, None, num_data=1)  # it checks its own settings

    @property
    def time(self) -> SamplingSchedule:
        """Step sizes and kept steps of a chain."""
        return SamplingSchedule(self.schedule, self.burn_in, self.cycles)

    @property
    def measures(self) -> bool:
        """Whether scales of weights are measured during the burn-in."""
        return False

    usual_lr: ClassVar[float]
    """The learning rate for a network with classes, or with values whose noise has standard deviation one."""

    def default_lr(self, bnn: Bayesian) -> float:
        """Return the usual rate, times σ² for noise σ < 1: the loss is 1/σ² as steep."""
        return self.usual_lr * flatness(bnn.likelihood)

    @abstractmethod
    def sampler(self, params: Any, lr: float, burn_in_steps: int | None, **settings: Any) -> Sampler:
        """Make the optimizer.

        Args:
            params: groups of parameters.
            lr: the learning rate.
            burn_in_steps: number of steps in which scales may be measured; None if unknown.
            **settings: the settings of every sampler.
        """

    def optimizer(self, bnn: Bayesian, lr: float) -> torch.optim.Optimizer:
        """Make the sampler for your own loop; what is not random is optimised."""
        if self.subset != "all":
            raise NoSiteMatched(
                f"subset={self.subset!r} is chosen from the data. Use bnn.fit(loader), or bayesianize(..., sites=...) "
                "for your own loop."
            )
        return self._sampler(bnn, lr, Moving.all_of(bnn), None)

    def loss(self, bnn: Bayesian, batch: Batch, kl_weight: float | None) -> Terms:
        """Compute the negative log posterior; with a subset, in evaluation mode.

        Where the prior is the sampler's weight decay, or its weight is zero, gradients are those of the data term. With
        a zero weight the prior is only computed when `bnn.terms.kl` is read, for the weights at that time.
        """
        inputs, targets = split_batch(batch)
        with nullcontext() if self.subset == "all" else evaluating(bnn.model):
            nll = bnn.likelihood.mean_nll(call(bnn.model, inputs), targets)
        course, weight = bnn.state.get("course"), 1.0 if kl_weight is None else kl_weight
        if not weight and not torch.compiler.is_compiling():
            later: Any = weakref.proxy(bnn)  # which holds these terms
            return Terms(nll, lambda: -later.log_prior(), weight, bnn.data_size())
        with torch.set_grad_enabled(torch.is_grad_enabled() and not (course is not None and course.decays)):
            kl = -bnn.log_prior()
        return Terms(nll, kl, weight, bnn.data_size())

    def observe(self, bnn: Bayesian) -> None:
        """Keep the network if its step is a chosen one, and prepare the next step."""
        course = bnn.state.get("course")
        if course is not None:
            course.kept.observe(bnn)
            course.measure(bnn.step)
            course.advance(bnn.step)

    def fit(
        self,
        bnn: Bayesian,
        loader: Any,
        *,
        epochs: int = 1,
        lr: float | None = None,
        start: Callable[[], nn.Module] | None = None,
        dtype: torch.dtype | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        accumulate: int = 1,
        device: torch.device | str | None = None,
        seed: int | None = None,
        **training: Any,
    ) -> Fit:
        """Run the chains, and keep their networks as the posterior.

        Learned noise of the likelihood is averaged over the chains.

        Args:
            bnn: the network; the first chain starts from its weights.
            loader: batches of inputs and targets.
            epochs: the length of every chain.
            lr: the learning rate, in the scale of the loss (see the sampler's equation). If not given it is
                `default_lr` in the first half of the burn-in, then as low as the noise of minibatches requires.
            start: a function that makes a new network, for modules that cannot draw new random weights themselves.
            dtype: the dtype to keep the networks in, such as torch.bfloat16; their own if not given.
            checkpoint: a folder for every kept network and for the state of the run after every epoch. An interrupted
                run resumes from it exactly; `samplers.read` reads the networks so far.
            accumulate: batches whose gradients are averaged for one step.
            device: where to run: "auto" for a GPU if there is one, None for the device of the network.
            seed: makes the run repeatable; drawn if not given.
            **training: `validate`, `callbacks`, `clip`, `autocast`, `compile` and `progress`, as in
                `bayeslim.train.fit`.
        """
        if epochs < 1:
            raise ValueError(f"epochs must be at least 1. Got {epochs}.")
        unknown = training.keys() - {"validate", "callbacks", "clip", "autocast", "compile", "progress"}
        if unknown:
            raise TypeError(
                f"{type(self).__name__} takes no {', '.join(sorted(unknown))}. The step size follows the method's own "
                "schedule, and the optimizer is the sampler."
            )
        chosen = lr is None
        lr = self.default_lr(bnn) if lr is None else lr
        rank, world = rank_and_world()
        if self.chains * world > 1 and self.subset == "all" and start is None:
            check_resettable(bnn.model)
        total = epochs * prepare(bnn, loader, accumulate, device)
        steps = self.time.kept(total, self.samples, self.thinning)
        base = int(torch.randint(2**62, ())) if seed is None else seed
        moving = moving_weights(bnn, self, loader, seed)
        if len(steps) < self.samples:
            warnings.warn(
                f"Of {total} steps {len(steps)} networks are kept, not {self.samples}: there are no more steps after "
                "the burn-in. Train for more epochs, or ask for fewer samples.",
                BayeslimWarning,
                stacklevel=3,
            )
        begin = {name: value.clone() for name, value in bnn.model.state_dict().items()}
        noise = noise_of(bnn.likelihood)
        result, found, noises, excesses, kinetic = Fit(), [], [], [], []
        with restored_on_failure(bnn), ExitStack() as afterwards:
            afterwards.callback(bnn.state.pop, "course", None)
            for index in range(rank * self.chains, (rank + 1) * self.chains):
                folder = None if checkpoint is None else Path(checkpoint) / f"chain-{index + 1:03d}"
                with moving.alone(bnn), ordered_by(loader, seed_of_chain(base, index)):
                    bnn.step = 0
                    bnn.model.load_state_dict(begin)
                    bnn.likelihood.load_state_dict(noise)
                    if index and self.subset == "all":
                        reinitialise_(bnn.model, start)
                        bnn.keep_zeros()
                    samples = None if folder is None else folder / "samples"
                    kept_networks = KeptNetworks(moving.names, moving.others(bnn), steps, dtype, samples)
                    sampler = self._sampler(bnn, lr, moving, self.time.burn_in_steps(total))
                    decay = weight_decay(bnn) if training.get("clip") is None else None
                    if decay is not None:
                        sampler.param_groups[0]["weight_decay"] = decay
                    course = _Course(kept_networks, sampler, self, total, decay is not None, chosen)
                    course.advance(0)
                    bnn.state["course"] = course
                    done = run_alone(
                        bnn, loader, course.sampler, course.factor, epochs=epochs, checkpoint=folder,
                        accumulate=accumulate, **training,
                    )  # fmt: skip
                    found.append(kept_networks.particles(bnn))
                    noises.append(noise_of(bnn.likelihood))
                    excesses.append(course.excess(lr))
                    kinetic += sampler.param_groups[0]["kinetic_temperatures"]
                several = {"chain": index + 1} if self.chains * world > 1 else {}
                result.history += [several | epoch for epoch in done.history]
                result.seconds += done.seconds
                result.resumed_from += done.resumed_from
                result.stopped = done.stopped
            average_noise_(bnn.likelihood, noises, between_ranks=True)
        self.keep(bnn, between_ranks(joined(found)))
        bnn.state["kinetic_temperatures"] = tuple(kinetic)
        _warn_if_hot(kinetic, self.temperature)
        result.details.update(chains=self.chains * world, minibatch_excess=excesses)
        return result

    def fit_stack(self, stack: Any, networks: Sequence[Bayesian], loader: Any, **options: Any) -> Fit:
        """Run a chain of every network.

        A learning rate that is not given is chosen for all of them.
        """
        if self.chains > 1 or self.subset != "all":
            raise UnsupportedModel(
                f"Networks that train together have one chain each, of all weights. Got chains={self.chains}, "
                f"subset={self.subset!r}. Use bnn.fit for each."
            )
        result = super().fit_stack(stack, networks, loader, **options)
        for network in networks:
            network.state["kinetic_temperatures"] = stack.state["kinetic_temperatures"]  # of all chains
        return result

    def place(self, bnn: Bayesian, posterior: Particles) -> None:
        """Set the network to the mean of one chain, or to the last of several."""
        several = self.chains * rank_and_world()[1] * self.time.windows > 1
        self.stand(bnn, posterior, at_mean=not several)

    def _sampler(self, bnn: Bayesian, lr: float, moving: Moving, burn_in_steps: int | None) -> Sampler:
        groups: list[dict[str, Any]] = [{"params": moving.parameters(bnn), "temperature": self.temperature}]
        points = moving.points(bnn)
        if points:
            groups.append({"params": points, "temperature": 0.0})
        settings = {"num_data": bnn.data_size(), "masks": moving.masks_of(bnn)}
        if isinstance(bnn, Stack):
            settings["networks"] = bnn.networks
        return self.sampler(groups, lr, burn_in_steps, **settings)


def _warn_if_hot(kinetic: Sequence[float], target: float) -> None:
    heat = fmean(kinetic) if kinetic else 0.0
    if not heat <= MAX_HEAT * max(1.0, target):
        warnings.warn(
            f"The chain has left the posterior: its kinetic temperature is {heat:.3g}, and the target's is {target:g}. "
            "Use a smaller lr, or larger batches.",
            BayeslimWarning,
            stacklevel=4,
        )


@dataclass(frozen=True)
class _Course:
    """One chain while it runs.

    Attributes:
        kept: the networks kept so far.
        sampler: the optimizer.
        method: the method.
        total: the number of steps of the chain.
        decays: whether the prior is the sampler's weight decay; then gradients and their norm exclude it.
        chosen: whether the learning rate is lowered after half of the burn-in, as far as gradient noise requires.
    """

    kept: KeptNetworks
    sampler: Sampler
    method: ChainMethod
    total: int
    decays: bool
    chosen: bool

    def factor(self, done: float) -> float:
        """Return the factor on the learning rate at a fraction of the run."""
        time, group = self.method.time, self.sampler.param_groups[0]
        return time.factor(done) * (1.0 if time.explores(done) else float(group.get("shrink", 1.0)))

    def excess(self, lr: float) -> float | None:
        """Estimate the excess of variance of the samples by gradient noise."""
        group = self.sampler.param_groups[0]
        return self.sampler.excess(group, lr * float(group.get("shrink", 1.0)), self.method.temperature)

    def measure(self, step: int) -> None:
        """Record the kinetic temperature if the network of this step is kept."""
        group = self.sampler.param_groups[0]
        found = self.sampler.kinetic_temperature(group) if step in self.kept.steps else None
        if found is not None:
            group["kinetic_temperatures"] = (*group["kinetic_temperatures"], found)

    def advance(self, step: int) -> None:
        """Prepare the next step: gradient noise, learning rate and temperature."""
        half, group = self.method.time.burn_in_steps(self.total) // 2, self.sampler.param_groups[0]
        if step == half // 2:
            self.sampler.watch_noise(group, on=True)
        if step == half:
            self.sampler.watch_noise(group, on=False)
            found = self.sampler.excess(group, group["initial_lr"], self.method.temperature) if half else None
            if self.chosen and found:
                group["shrink"] = min(1.0, MAX_EXCESS / found)
        self.warm(step)

    def warm(self, step: int) -> None:
        """Set the temperature of the step that comes next.

        Scales are measured at the temperature of sampling: without noise, gradients of all the data vanish.
        """
        time = self.method.time
        measures = self.method.measures and step < time.burn_in_steps(self.total)
        explores = time.explores(step / self.total) and not measures
        self.sampler.param_groups[0]["temperature"] = 0.0 if explores else self.method.temperature
