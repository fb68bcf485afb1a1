"""Hamiltonian Monte Carlo with full-batch gradients: the reference for small networks.

    H(w, p) = U(w) + ½ pᵀ M⁻¹ p          U(w) = −log p(D|w) − log p(w)

Each iteration draws p ~ N(0, M), follows the dynamics for a random number of leapfrog steps
    p ← p − ½ε ∇U(w),   w ← w + ε M⁻¹ p,   p ← p − ½ε ∇U(w)
and accepts the end point with probability min(1, e^(H − H')). In the warm-up, dual averaging sets the step size ε for a
target acceptance rate, and the variances of the chain so far set the diagonal of M⁻¹, over windows that double in
length; then both are fixed. The draws have no error from minibatches or finite steps. Every draw takes up to `leapfrog`
passes over the data.

Neal 1995, 2011, arXiv:1206.1901 · Hoffman & Gelman 2014, arXiv:1111.4246 · Izmailov et al. 2021, arXiv:2104.14421 ·
Stan Development Team for the windows
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bayeslim.bayesian import Bayesian
from bayeslim.errors import CorruptFile, NonFiniteLoss
from bayeslim.io.registry import register
from bayeslim.io.storage import INDEX, read_folder, write_folder
from bayeslim.methods.shared.chain_run import between_ranks, check_whole, joined
from bayeslim.methods.shared.full_batch import FullBatch
from bayeslim.methods.shared.kept_networks import KeptNetworks
from bayeslim.methods.shared.moving import frozen, moving_weights
from bayeslim.methods.shared.particle_method import ParticleMethod
from bayeslim.methods.shared.refit import restored_on_failure
from bayeslim.methods.shared.reinitialise import check_resettable, reinitialise_
from bayeslim.methods.subnetwork import Subnetwork, settled
from bayeslim.posteriors.particles import Particles
from bayeslim.results import Fit
from bayeslim.stochastic import evaluating
from bayeslim.train import fit as train
from bayeslim.train.checkpoints import (
    check_random,
    check_same_run,
    pack,
    random_states,
    restore_random,
    settings_of,
    unpack,
)
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.loaders import training_set_size
from bayeslim.train.options import check_names
from bayeslim.train.progress import progress as progress_bar
from bayeslim.train.seeding import ordered_by, seed_of_chain
from bayeslim.types import Params

Potential = Callable[[Tensor], tuple[float, Tensor]]
"""A function from a vector q to U(q) and its gradient."""

DIVERGENCE_ENERGY_ERROR = 1000.0
"""A trajectory with a larger error of the energy, in nats, has diverged."""


@register("method")
@dataclass(frozen=True)
class HMC(ParticleMethod):
    """Hamiltonian Monte Carlo.

    Attributes:
        samples: number of networks each chain keeps.
        warmup: iterations before the first of them, in which step size and masses are set.
        leapfrog: the largest number of steps of a trajectory.
        target_acceptance: the wanted acceptance rate.
        temperature: T of the target p(w|D)^(1/T).
        chains: number of chains on every rank. All but the first start from new random weights, unless only a subset is
            sampled.
        subset: which of the sites are sampled, as in `Laplace`; the others stay fixed.
    """

    samples: int = 100
    warmup: int = 200
    leapfrog: int = 20
    target_acceptance: float = 0.8
    temperature: float = 1.0
    chains: int = 1
    subset: str | tuple[str, ...] | Subnetwork = "all"

    name: ClassVar[str] = "hmc"

    def __post_init__(self) -> None:
        object.__setattr__(self, "subset", settled(self.subset))
        for setting, least in (("samples", 1), ("warmup", 0), ("leapfrog", 1), ("chains", 1)):
            if not isinstance(getattr(self, setting), int) or getattr(self, setting) < least:
                raise ValueError(f"{setting} must be a whole number, at least {least}. Got {getattr(self, setting)!r}.")
        if not 0 < self.target_acceptance < 1:
            raise ValueError(f"target_acceptance must be in (0, 1). Got {self.target_acceptance}.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite. Got {self.temperature}.")

    def fit(
        self,
        bnn: Bayesian,
        loader: Any,
        *,
        epochs: int | None = None,
        start: Callable[[], nn.Module] | None = None,
        dtype: torch.dtype | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        progress: bool = True,
        **training: Any,
    ) -> Fit:
        """Run the chains; train the network first if `epochs` is given.

        The network is in evaluation mode: dropout is off, and batch norms keep their statistics.

        Args:
            bnn: the network; the first chain starts from its weights.
            loader: batches of inputs and targets, all held in memory.
            epochs: train the MAP estimate this long first.
            start: a function that makes a new network, for modules that cannot draw new random weights themselves.
            dtype: the dtype to keep the networks in; their own if not given.
            checkpoint: a folder for every kept network and for the state of the run after every iteration. An
                interrupted run resumes from it exactly; `samplers.read` reads the networks so far.
            seed: makes the run repeatable; drawn if not given.
            progress: show a progress bar.
            **training: options of `bayeslim.train.fit`, with `epochs`.

        Returns:
            the result, with `details` of every chain on this rank: acceptance, divergences, step size, energies.
        """
        if epochs is None and training:
            raise TypeError(
                f"{', '.join(training)} are options of training. Pass epochs=... to train first, or leave them out."
            )
        check_names("HMC", training, train.fit)
        check_whole(loader)
        rank, world = rank_and_world()
        if self.chains * world > 1 and self.subset == "all" and start is None:
            check_resettable(bnn.model)
        step = bnn.step
        begun, found, traces = time.monotonic(), [], []
        result = Fit()
        with restored_on_failure(bnn):
            try:
                if epochs is not None:
                    if checkpoint is not None:
                        training["checkpoint"] = Path(checkpoint) / "training"
                    result = train.fit(bnn, loader, epochs=epochs, seed=seed, progress=progress, **training)
                    step = bnn.step
                bnn.num_data = training_set_size(bnn, loader)
                base = int(torch.randint(2**62, ())) if seed is None else seed
                moving = moving_weights(bnn, self, loader, seed)
                begin = {name: value.clone() for name, value in bnn.model.state_dict().items()}
                with evaluating(bnn):
                    for index in range(rank * self.chains, (rank + 1) * self.chains):
                        folder = None if checkpoint is None else Path(checkpoint) / f"chain-{index + 1:03d}"
                        with ordered_by(loader, seed_of_chain(base, index)):
                            bnn.model.load_state_dict(begin)
                            if index and self.subset == "all":
                                with frozen(moving.points(bnn)):
                                    reinitialise_(bnn.model, start)
                                bnn.keep_zeros()
                            potential = FullBatch(bnn, moving, loader, self.temperature)
                            kept = self._kept(potential, dtype, folder)
                            journal = None if folder is None else Journal(folder, bnn, loader)
                            traces.append(self._chain(potential, kept, journal, progress and rank == 0))
                            found.append(kept.particles(bnn))
            finally:
                bnn.step = step
        self.keep(bnn, between_ranks(joined(found)))
        result.details.update(chains=self.chains * world, **_facts(traces))
        result.seconds = time.monotonic() - begun
        return result

    def place(self, bnn: Bayesian, posterior: Particles) -> None:
        """Set the network to the mean of one chain, or to the last network of several."""
        several = self.chains * rank_and_world()[1] > 1
        self.stand(bnn, posterior, at_mean=not several)

    def _kept(self, potential: FullBatch, dtype: torch.dtype | None, folder: Path | None) -> KeptNetworks:
        """Make the store for the networks of a chain."""
        moving = potential.moving
        buffers = [name for name, _ in potential.bnn.model.named_buffers()] if moving.everything else []
        steps = range(self.warmup + 1, self.warmup + self.samples + 1)
        return KeptNetworks(moving.names, buffers, steps, dtype, None if folder is None else folder / "samples")

    def _chain(self, potential: FullBatch, kept: KeptNetworks, journal: Journal | None, shown: bool) -> Trace:
        start = potential.vector()

        def after(walk: Walk) -> None:
            potential.bnn.step = walk.iteration
            if walk.iteration > self.warmup:
                potential.put(walk.q)
                kept.observe(potential.bnn)
            if journal is not None:
                journal.write(walk)

        walk = None if journal is None else journal.read(start)
        potential.bnn.step = 0 if walk is None else walk.iteration
        return hamiltonian_monte_carlo(
            potential,
            start,
            samples=self.samples,
            warmup=self.warmup,
            leapfrog=self.leapfrog,
            target_acceptance=self.target_acceptance,
            watch=lambda iterations: progress_bar(iterations, "hmc", enabled=shown),
            resume=walk,
            after=after,
        )


@dataclass
class Trace:
    """The result of a chain.

    Attributes:
        draws: (S, D), after the warm-up; of a resumed chain, those since it was resumed.
        potentials: U of every draw.
        energies: H of every draw: at the end of its trajectory, or at the start of one that was rejected.
        acceptance: the mean acceptance probability of the draws.
        divergences: number of trajectories after the warm-up that diverged.
        step_size: ε, set in the warm-up.
        inverse_mass: the diagonal of M⁻¹, (D,), set in the warm-up.
    """

    draws: Tensor
    potentials: list[float]
    energies: list[float]
    acceptance: float
    divergences: int
    step_size: float
    inverse_mass: Tensor


@dataclass
class Walk:
    """The state of a chain between two iterations, without generators.

    Attributes:
        q: the weights.
        energy: U(q).
        gradient: of U at q.
        inverse_mass: the diagonal of M⁻¹.
        averaging: the state of the step size adaptation.
        variances: the running variances of the current warm-up window.
        iteration: number of iterations done.
        potentials: U of every draw so far.
        energies: H of every draw so far.
        accepted: the sum of acceptance probabilities.
        divergences: number of trajectories that diverged.
    """

    q: Tensor
    energy: float
    gradient: Tensor
    inverse_mass: Tensor
    averaging: _DualAveraging
    variances: _RunningVariance
    iteration: int = 0
    potentials: list[float] = field(default_factory=list)
    energies: list[float] = field(default_factory=list)
    accepted: float = 0.0
    divergences: int = 0

    @classmethod
    def begin(cls, potential: Potential, start: Tensor, target_acceptance: float) -> Self:
        """Start a chain at a vector."""
        q = start.detach().clone()
        energy, gradient = potential(q)
        if not math.isfinite(energy):
            raise NonFiniteLoss(
                f"The chain needs a start of finite density. Got U = {energy}. Look for inputs, targets and weights "
                "that are not finite, and for a prior that is zero at the start."
            )
        walk = cls(q, energy, gradient, torch.ones_like(q), _DualAveraging(target_acceptance), _RunningVariance.of(q))
        walk.averaging.restart(_first_step_size(potential, q, energy, gradient, walk.inverse_mass))
        return walk

    def state(self) -> dict[str, Any]:
        """Return the state as numbers, lists and tensors."""
        return {**vars(self), "averaging": dict(vars(self.averaging)), "variances": dict(vars(self.variances))}

    @classmethod
    def restore(cls, state: dict[str, Any], like: Tensor) -> Self:
        """Rebuild a chain from `state` on the device of a vector."""

        def placed(values: dict[str, Any]) -> dict[str, Any]:
            if any(isinstance(v, Tensor) and (v.shape, v.dtype) != (like.shape, like.dtype) for v in values.values()):
                raise ValueError(f"the chain is not one of {like.numel()} weights in {like.dtype}")
            return {key: v.to(like.device) if isinstance(v, Tensor) else v for key, v in values.items()}

        averaging, variances = _DualAveraging(**state["averaging"]), _RunningVariance(**placed(state["variances"]))
        return cls(**placed(state) | {"averaging": averaging, "variances": variances})


def hamiltonian_monte_carlo(
    potential: Potential,
    start: Tensor,
    *,
    samples: int,
    warmup: int,
    leapfrog: int = 20,
    target_acceptance: float = 0.8,
    watch: Callable[[Iterable[int]], Iterable[int]] = iter,
    resume: Walk | None = None,
    after: Callable[[Walk], object] = lambda walk: None,
) -> Trace:
    """Draw from a density by Hamiltonian Monte Carlo, with torch's global generator.

    Args:
        potential: U and its gradient.
        start: where to begin, (D,).
        samples: number of draws to keep.
        warmup: iterations before the first draw.
        leapfrog: the largest number of steps of a trajectory; each draws a number from 1 to this.
        target_acceptance: the wanted acceptance rate.
        watch: wraps the iterations, such as a progress bar.
        resume: a chain to continue.
        after: called after every iteration.
    """
    walk = Walk.begin(potential, start, target_acceptance) if resume is None else resume
    averaging, draws = walk.averaging, []
    windows = [window for window in _windows(warmup) if window[1] > walk.iteration]
    for iteration in watch(range(walk.iteration, warmup + samples)):
        warming = iteration < warmup
        step_size = averaging.now if warming else averaging.settled
        momentum = torch.randn_like(walk.q) / walk.inverse_mass.sqrt()
        before = walk.energy + _kinetic(momentum, walk.inverse_mass)
        steps = int(torch.randint(1, leapfrog + 1, ()))
        new_q, new_p, new_energy, new_gradient = _trajectory(
            potential, walk.q, momentum, walk.gradient, step_size, steps, walk.inverse_mass
        )
        error = new_energy + _kinetic(new_p, walk.inverse_mass) - before
        probability = math.exp(min(0.0, -error)) if math.isfinite(error) else 0.0
        if float(torch.rand((), dtype=torch.float64)) < probability:
            walk.q, walk.energy, walk.gradient = new_q, new_energy, new_gradient
            before += error
        if not warming:
            draws.append(walk.q)
            walk.potentials.append(walk.energy)
            walk.energies.append(before)
            walk.accepted += probability
            walk.divergences += not error < DIVERGENCE_ENERGY_ERROR
        else:
            averaging.update(probability)
            if windows and windows[0][0] <= iteration < windows[0][1]:
                walk.variances.add(walk.q)
            if windows and iteration == windows[0][1] - 1:
                walk.inverse_mass = walk.variances.regularised()
                walk.variances = _RunningVariance.of(walk.q)
                windows = windows[1:]
                averaging.restart(_first_step_size(potential, walk.q, walk.energy, walk.gradient, walk.inverse_mass))
        walk.iteration = iteration + 1
        after(walk)
    return Trace(
        torch.stack(draws) if draws else walk.q.new_empty(0, len(walk.q)),
        walk.potentials,
        walk.energies,
        walk.accepted / samples,
        walk.divergences,
        averaging.settled,
        walk.inverse_mass,
    )


def _trajectory(
    potential: Potential, q: Tensor, p: Tensor, gradient: Tensor, step_size: float, steps: int, inverse_mass: Tensor
) -> tuple[Tensor, Tensor, float, Tensor]:
    """Make leapfrog steps; return position and momentum, and U and its gradient there."""
    energy = math.nan
    p = p - 0.5 * step_size * gradient
    for step in range(steps):
        q = q + step_size * inverse_mass * p
        energy, gradient = potential(q)
        if not math.isfinite(energy):
            break
        p = p - (step_size if step < steps - 1 else 0.5 * step_size) * gradient
    return q, p, energy, gradient


def _kinetic(p: Tensor, inverse_mass: Tensor) -> float:
    return 0.5 * float((p.double().square() * inverse_mass.double()).sum())


def _first_step_size(potential: Potential, q: Tensor, energy: float, gradient: Tensor, inverse_mass: Tensor) -> float:
    """Find a step size at which a single step is accepted half of the time."""
    p = torch.randn_like(q) / inverse_mass.sqrt()
    before = energy + _kinetic(p, inverse_mass)

    def is_accepted(step_size: float) -> bool:
        _, end, value, _ = _trajectory(potential, q, p, gradient, step_size, 1, inverse_mass)
        error = value + _kinetic(end, inverse_mass) - before
        return math.isfinite(error) and error < math.log(2)

    step_size = 0.1
    grows = is_accepted(step_size)
    for _ in range(50):
        step_size *= 2.0 if grows else 0.5
        if is_accepted(step_size) != grows:
            break
    return step_size / 2 if grows else step_size


def _windows(warmup: int) -> list[tuple[int, int]]:
    """List the windows of iterations in which variances are measured.

    Each is twice as long as the last.

    The iterations after the last window, fifty or half of a short warm-up, let the step size settle.
    """
    first, last = int(0.15 * warmup), warmup - max(warmup // 10, min(50, warmup // 2))
    found, start, length = [], first, max(10, warmup // 20)
    while start + length <= last:
        end = start + length if start + 3 * length <= last else last
        found.append((start, end))
        start, length = end, 2 * length
    return found


@dataclass
class _DualAveraging:
    """Dual averaging of the log step size towards a target acceptance rate."""

    target: float
    centre: float = 0.0
    log: float = 0.0
    average: float = 0.0
    error: float = 0.0
    count: int = 0

    def restart(self, step_size: float) -> None:
        self.log, self.centre = math.log(step_size), math.log(10 * step_size)
        self.average, self.error, self.count = self.log, 0.0, 0

    def update(self, acceptance: float) -> None:
        self.count += 1
        share = 1 / (self.count + 10)
        self.error = (1 - share) * self.error + share * (self.target - acceptance)
        self.log = self.centre - math.sqrt(self.count) / 0.05 * self.error
        weight = self.count**-0.75
        self.average = weight * self.log + (1 - weight) * self.average

    @property
    def now(self) -> float:
        return math.exp(self.log)

    @property
    def settled(self) -> float:
        return math.exp(self.average)


@dataclass
class _RunningVariance:
    """Running variances of vectors."""

    mean: Tensor
    total: Tensor
    count: int = 0

    @classmethod
    def of(cls, like: Tensor) -> Self:
        return cls(torch.zeros_like(like), torch.zeros_like(like))

    def add(self, q: Tensor) -> None:
        self.count += 1
        off = q - self.mean
        self.mean = self.mean + off / self.count
        self.total = self.total + off * (q - self.mean)

    def regularised(self) -> Tensor:
        """Return the variances, shrunk towards 1e-3 because there are few draws."""
        variance = self.total / max(1, self.count - 1)
        return (self.count * variance + 5e-3) / (self.count + 5)


class Journal:
    """The state of a chain after every iteration, so that resuming is exact.

    The networks it keeps are written beside it (`KeptNetworks`), each before the state that follows it. A network that
    was written after the last state is drawn and written again, with the same values.

    Args:
        folder: where to write.
        bnn: the network.
        loader: the data; its state is part of the run.
    """

    def __init__(self, folder: Path, bnn: Bayesian, loader: Any):
        self.folder, self.loader, self.settings = folder, loader, settings_of(bnn)

    def write(self, walk: Walk) -> None:
        """Save a chain after an iteration."""
        tensors: Params = {}
        config = {
            "settings": self.settings,
            "walk": pack(walk.state(), "walk", tensors),
            "random": pack(random_states(self.loader), "random", tensors),
        }
        write_folder(self.folder, "hmc", config, tensors)

    def read(self, like: Tensor) -> Walk | None:
        """Read an interrupted chain and restore the generators; None if there is no chain.

        Args:
            like: a vector of the weights, for shape and device.
        """
        if not (self.folder / INDEX).is_file():
            return None
        _, config, tensors = read_folder(self.folder, ("hmc",))
        check_same_run(self.folder, config.get("settings"), self.settings)
        try:
            walk, states = Walk.restore(unpack(config["walk"], tensors), like), unpack(config["random"], tensors)
            check_random(states)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CorruptFile(f"{self.folder} is not a complete checkpoint: {error!r}.") from error
        restore_random(self.loader, states)
        return walk


def _facts(traces: list[Trace]) -> dict[str, Any]:
    return {
        "acceptance": [trace.acceptance for trace in traces],
        "divergences": [trace.divergences for trace in traces],
        "step_size": [trace.step_size for trace in traces],
        "energies": [trace.energies for trace in traces],
    }
