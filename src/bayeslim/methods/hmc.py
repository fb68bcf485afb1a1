"""Hamiltonian Monte Carlo with the gradient of all the data: the reference for small networks.

    H(w, p) = −log p(D|w) − log p(w) + ½ pᵀ M⁻¹ p

Its draws are from the posterior itself, without the errors of minibatches and finite steps
(`bayeslim.samplers.leapfrog` says how). Every draw takes up to `leapfrog` passes over the data.

Neal 1995, 2011, arXiv:1206.1901 · Izmailov et al. 2021, arXiv:2104.14421
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from bayeslim.io.registry import register
from bayeslim.methods.shared.full_batch import FullBatch
from bayeslim.methods.shared.moving import frozen, moving_weights
from bayeslim.methods.shared.particle_method import ParticleMethod
from bayeslim.methods.shared.refit import restored_on_failure
from bayeslim.methods.shared.reinitialise import check_resettable, start_afresh_
from bayeslim.methods.subnetwork import Subnetwork, settled
from bayeslim.posteriors.particles import Particles
from bayeslim.results import Fit
from bayeslim.samplers.chain import Chain
from bayeslim.samplers.journal import Journal
from bayeslim.samplers.leapfrog import Trace, Walk, hamiltonian_monte_carlo
from bayeslim.samplers.run import between_ranks, check_whole, joined, ordered_by, rank_and_world, seed_of_chain
from bayeslim.stochastic import evaluating
from bayeslim.train.progress import progress as progress_bar

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian


@register("method")
@dataclass(frozen=True)
class HMC(ParticleMethod):
    """Hamiltonian Monte Carlo.

    Attributes:
        samples: how many networks each chain keeps.
        warmup: iterations before the first of them, in which step size and masses are set.
        leapfrog: the most steps of a trajectory.
        target_acceptance: the part of proposals to take.
        temperature: T of the target p(w|D)^(1/T).
        chains: how many chains, on every rank; all but the first start from new random weights, if all are sampled.
        subset: which of the sites are sampled, as in `Laplace`; the rest stays as it is.
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
            loader: batches of inputs and targets, all of which are held.
            epochs: train the MAP estimate this long first.
            start: a function that makes a new network, for networks with modules that cannot draw their weights anew.
            dtype: to keep the networks in; the network's own if not given.
            checkpoint: a folder that every network is written to as it is kept, and the state of the run after every
                iteration. A run that was cut short goes on from there, exactly; `samplers.read` reads what is there.
            seed: makes the run repeat; drawn if not given.
            progress: show a progress bar.
            **training: options of `bayeslim.train.fit`, with `epochs`.

        Returns:
            with `details`, of every chain on this rank: acceptance, divergences, step size, and energies of the draws.
        """
        from bayeslim.train import fit as train

        if epochs is None and training:
            raise TypeError(f"{', '.join(training)} are options of training, which is only done with epochs=...")
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
                bnn.num_data = train._num_data(bnn, loader)
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
                                    start_afresh_(bnn.model, start)
                                bnn.keep_zeros()
                            potential = FullBatch(bnn, moving, loader, self.temperature)
                            chain = self._kept(potential, dtype, folder)
                            journal = None if folder is None else Journal(folder, bnn, loader)
                            traces.append(self._chain(potential, chain, journal, progress and rank == 0))
                            found.append(chain.particles(bnn))
            finally:
                bnn.step = step
        self.keep(bnn, between_ranks(joined(found)))
        result.details.update(chains=self.chains * world, **_facts(traces))
        result.seconds = time.monotonic() - begun
        return result

    def place(self, bnn: Bayesian, posterior: Particles) -> None:
        """Put the network to the mean of one chain, or to the last network of several."""
        several = self.chains * rank_and_world()[1] > 1
        self.stand(bnn, posterior, at_mean=not several)

    def _kept(self, potential: FullBatch, dtype: torch.dtype | None, folder: Path | None) -> Chain:
        """Room for the networks of a chain, by iterations; with buffers, which belong to the weights."""
        moving = potential.moving
        buffers = [name for name, _ in potential.bnn.model.named_buffers()] if moving.everything else []
        steps = range(self.warmup + 1, self.warmup + self.samples + 1)
        return Chain(moving.names, buffers, steps, dtype, None if folder is None else folder / "samples")

    def _chain(self, potential: FullBatch, chain: Chain, journal: Journal | None, shown: bool) -> Trace:
        start = potential.vector()

        def after(walk: Walk) -> None:
            potential.bnn.step = walk.iteration
            if walk.iteration > self.warmup:
                potential.put(walk.q)
                chain.observe(potential.bnn)
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


def _facts(traces: list[Trace]) -> dict[str, Any]:
    return {
        "acceptance": [trace.acceptance for trace in traces],
        "divergences": [trace.divergences for trace in traces],
        "step_size": [trace.step_size for trace in traces],
        "energies": [trace.energies for trace in traces],
    }
