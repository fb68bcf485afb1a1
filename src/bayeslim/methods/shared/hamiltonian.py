"""Hamiltonian Monte Carlo on a vector, with the equations of `methods/hmc.py`: leapfrog steps and warm-up.

In the warm-up, dual averaging (Hoffman & Gelman 2014, arXiv:1111.4246) sets the step size for a target acceptance rate,
and the variances of the chain so far set the diagonal of M⁻¹, over windows that double in length (Stan Development
Team).

A chain is a generator: it asks for U and its gradient at a vector by yielding the vector, and is sent the answer. One
text serves a chain that runs alone and several whose questions are answered at once (`chains_abreast.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from bayeslim.errors import NonFiniteLoss

Potential = Callable[[Tensor], tuple[float, Tensor]]
"""A function from a vector q to U(q) and its gradient."""

T = TypeVar("T")
Asking: TypeAlias = Generator[Tensor, tuple[float, Tensor], T]
"""A computation that yields vectors q, and is sent U(q) and its gradient for each."""

DIVERGENCE_ENERGY_ERROR = 1000.0
"""A trajectory with a larger error of the energy, in nats, has diverged."""


@dataclass
class Walk:
    """The state of a chain between two iterations, without generators; at the end, its result.

    Attributes:
        q: the weights.
        energy: U(q).
        gradient: of U at q.
        inverse_mass: the diagonal of M⁻¹.
        averaging: the state of the step size adaptation.
        variances: the running variances of the current warm-up window.
        iteration: number of iterations done.
        potentials: U of every draw so far.
        energies: H of every draw so far: at the end of its trajectory, or at the start of one that was rejected.
        accepted: the sum of acceptance probabilities after the warm-up.
        divergences: number of trajectories after the warm-up that diverged.
        kept: the draws; of a resumed chain, those since it was resumed.
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
    kept: list[Tensor] = field(default_factory=list)

    @property
    def draws(self) -> Tensor:
        """The draws kept, (S, D)."""
        return torch.stack(self.kept) if self.kept else self.q.new_empty(0, len(self.q))

    @property
    def acceptance(self) -> float:
        """The mean acceptance probability of the draws."""
        return self.accepted / max(1, len(self.potentials))

    @property
    def step_size(self) -> float:
        """ε, set in the warm-up."""
        return self.averaging.settled

    @classmethod
    def begin(cls, start: Tensor, target_acceptance: float, who: str) -> Asking[Self]:
        """Start a chain at a vector."""
        q = start.detach().clone()
        energy, gradient = yield q
        if not math.isfinite(energy):
            raise NonFiniteLoss(
                f"{who} needs a start of finite density. Got U = {energy}. Look for inputs, targets and weights "
                "that are not finite, and for a prior that is zero at the start."
            )
        walk = cls(q, energy, gradient, torch.ones_like(q), _DualAveraging(target_acceptance), _RunningVariance.of(q))
        walk.averaging.restart((yield from _first_step_size(q, energy, gradient, walk.inverse_mass)))
        return walk

    def state(self) -> dict[str, Any]:
        """Return the state without the draws, as numbers, lists and tensors."""
        own = {name: value for name, value in vars(self).items() if name != "kept"}
        return own | {"averaging": dict(vars(self.averaging)), "variances": dict(vars(self.variances))}

    @classmethod
    def restore(cls, state: dict[str, Any], like: Tensor) -> Self:
        """Rebuild a chain from `state` on the device of a vector."""

        def placed(values: dict[str, Any]) -> dict[str, Any]:
            if any(isinstance(v, Tensor) and (v.shape, v.dtype) != (like.shape, like.dtype) for v in values.values()):
                raise ValueError(f"the chain is not one of {like.numel()} weights in {like.dtype}")
            return {key: v.to(like.device) if isinstance(v, Tensor) else v for key, v in values.items()}

        averaging, variances = _DualAveraging(**state["averaging"]), _RunningVariance(**placed(state["variances"]))
        return cls(**placed(state) | {"averaging": averaging, "variances": variances})


def hamiltonian_monte_carlo(potential: Potential, start: Tensor, **settings: Any) -> Walk:
    """Draw from a density by one chain, with the settings of `hamiltonian_chain`."""
    return answered(hamiltonian_chain(start, **settings), potential)


def answered(asking: Asking[T], potential: Potential) -> T:
    """Answer all questions by a potential, and return the result."""
    answer: Any = None  # the first is sent before there is a question
    while True:
        try:
            q = asking.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        answer = potential(q)


def hamiltonian_chain(
    start: Tensor,
    *,
    samples: int,
    warmup: int,
    leapfrog: int = 20,
    target_acceptance: float = 0.8,
    watch: Callable[[Iterable[int]], Iterable[int]] = iter,
    resume: Walk | None = None,
    after: Callable[[Walk], object] = lambda walk: None,
    who: str = "The chain",
) -> Asking[Walk]:
    """Run a chain of Hamiltonian Monte Carlo, with torch's global generator.

    Args:
        start: where to begin, (D,).
        samples: number of draws to keep.
        warmup: iterations before the first draw.
        leapfrog: the largest number of steps of a trajectory; each draws a number from 1 to this.
        target_acceptance: the wanted acceptance rate.
        watch: wraps the iterations, such as a progress bar.
        resume: a chain to continue.
        after: called after every iteration.
        who: the chain, in errors.
    """
    walk = (yield from Walk.begin(start, target_acceptance, who)) if resume is None else resume
    averaging = walk.averaging
    windows = [window for window in _windows(warmup) if window[1] > walk.iteration]
    for iteration in watch(range(walk.iteration, warmup + samples)):
        warming = iteration < warmup
        step_size = averaging.now if warming else averaging.settled
        momentum = torch.randn_like(walk.q) / walk.inverse_mass.sqrt()
        before = walk.energy + _kinetic(momentum, walk.inverse_mass)
        steps = int(torch.randint(1, leapfrog + 1, ()))
        new_q, new_p, new_energy, new_gradient = yield from _trajectory(
            walk.q, momentum, walk.gradient, step_size, steps, walk.inverse_mass
        )
        error = new_energy + _kinetic(new_p, walk.inverse_mass) - before
        probability = math.exp(min(0.0, -error)) if math.isfinite(error) else 0.0
        if float(torch.rand((), dtype=torch.float64)) < probability:
            walk.q, walk.energy, walk.gradient = new_q, new_energy, new_gradient
            before += error
        if not warming:
            walk.kept.append(walk.q)
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
                first = yield from _first_step_size(walk.q, walk.energy, walk.gradient, walk.inverse_mass)
                averaging.restart(first)
        walk.iteration = iteration + 1
        after(walk)
    return walk


def _trajectory(
    q: Tensor, p: Tensor, gradient: Tensor, step_size: float, steps: int, inverse_mass: Tensor
) -> Asking[tuple[Tensor, Tensor, float, Tensor]]:
    """Make leapfrog steps; return position and momentum, and U and its gradient there."""
    energy = math.nan
    p = p - 0.5 * step_size * gradient
    for step in range(steps):
        q = q + step_size * inverse_mass * p
        energy, gradient = yield q
        if not math.isfinite(energy):
            break
        p = p - (step_size if step < steps - 1 else 0.5 * step_size) * gradient
    return q, p, energy, gradient


def _kinetic(p: Tensor, inverse_mass: Tensor) -> float:
    return 0.5 * float((p.double().square() * inverse_mass.double()).sum())


def _first_step_size(q: Tensor, energy: float, gradient: Tensor, inverse_mass: Tensor) -> Asking[float]:
    """Find a step size at which a single step is accepted half of the time."""
    p = torch.randn_like(q) / inverse_mass.sqrt()
    before = energy + _kinetic(p, inverse_mass)

    def is_accepted(step_size: float) -> Asking[bool]:
        _, end, value, _ = yield from _trajectory(q, p, gradient, step_size, 1, inverse_mass)
        error = value + _kinetic(end, inverse_mass) - before
        return math.isfinite(error) and error < math.log(2)

    step_size = 0.1
    grows = yield from is_accepted(step_size)
    for _ in range(50):
        step_size *= 2.0 if grows else 0.5
        if (yield from is_accepted(step_size)) != grows:
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
