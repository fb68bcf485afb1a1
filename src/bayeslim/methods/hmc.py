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

import copy
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from bayeslim.bayesian import Bayesian
from bayeslim.io.registry import register
from bayeslim.methods.shared.abreast import Stack
from bayeslim.methods.shared.chain_run import between_ranks, check_whole, joined
from bayeslim.methods.shared.chains_abreast import answered_together
from bayeslim.methods.shared.full_batch import FlatWeights, FullBatch, FullBatches, check_leaves_none_out
from bayeslim.methods.shared.hamiltonian import Asking, Walk, answered, hamiltonian_chain
from bayeslim.methods.shared.journal import Journal
from bayeslim.methods.shared.kept_networks import KeptNetworks
from bayeslim.methods.shared.moving import Moving, frozen, moving_weights
from bayeslim.methods.shared.particle_method import ParticleMethod
from bayeslim.methods.shared.refit import restored_on_failure
from bayeslim.methods.shared.reinitialise import check_resettable, reinitialise_
from bayeslim.methods.subnetwork import Subnetwork, settled
from bayeslim.noise import RandomStream
from bayeslim.posteriors.particles import Particles
from bayeslim.results import Fit
from bayeslim.stochastic import evaluating
from bayeslim.train import fit as train
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.loaders import training_set_size
from bayeslim.train.options import check_names
from bayeslim.train.progress import progress as progress_bar
from bayeslim.train.seeding import ordered_by, seed_of_chain, seeded
from bayeslim.types import device_of

FACTS = ("acceptance", "divergences", "step_size", "energies")
"""What is reported of a chain."""


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
        super().__post_init__()
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
        self._check_fit(bnn, loader, epochs, start, training)
        check_whole(loader)
        rank, world = rank_and_world()
        step = bnn.step
        begun, found, walks = time.monotonic(), [], []
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
                            self._begin(bnn, moving, index, start)
                            potential = FullBatch(bnn, moving, loader, self.temperature)
                            kept = self._kept(potential, dtype, folder)
                            journal = None if folder is None else Journal(folder, bnn, loader)
                            chain = self._chain(potential, kept, progress and rank == 0, journal)
                            walks.append(answered(chain, potential))
                            found.append(kept.particles(bnn))
            finally:
                bnn.step = step
        self.keep(bnn, between_ranks(joined(found)))
        result.details["chains"] = self.chains * world
        for fact in FACTS:
            result.details[fact] = [getattr(walk, fact) for walk in walks]
        result.seconds = time.monotonic() - begun
        return result

    def fit_stack(
        self,
        stack: Any,
        networks: Sequence[Bayesian],
        loader: Any,
        *,
        epochs: int | None = None,
        start: Callable[[], nn.Module] | None = None,
        dtype: torch.dtype | None = None,
        progress: bool = True,
        **training: Any,
    ) -> Fit:
        """Run the chains of all networks side by side, each as it would run alone.

        Network k has the seed `seed_of_chain(seed, k * chains)`. In `details` every fact is a list over networks, of
        what `fit` reports.
        """
        self._check_fit(networks[0], loader.loaders[0], epochs, start, training)
        begun, result = time.monotonic(), Fit()
        base = int(torch.randint(2**62, ())) if stack.seed is None else stack.seed
        if epochs is not None:
            result = train.fit(stack, loader, epochs=epochs, progress=progress, **training)
        firsts = [copy.deepcopy(network) for network in networks]
        stack.unstack(firsts)
        weights: list[FlatWeights] = []  # of every chain, in a network of its own
        streams = []
        for place, first in enumerate(firsts):
            seed = seed_of_chain(base, place * self.chains)
            moving = moving_weights(first, self, loader.loaders[place], seed)
            for index, bnn in enumerate([first, *(copy.deepcopy(first) for _ in range(1, self.chains))]):
                with seeded(seed_of_chain(seed, index), 0):
                    self._begin(bnn, moving, index, start)
                    weights.append(FlatWeights(bnn, moving))
                    streams.append(RandomStream(device_of(bnn.model)))
        kept = [self._kept(one, dtype, None) for one in weights]
        every = Stack.of([one.bnn for one in weights])
        with evaluating(every):
            loaders = loader.repeated(self.chains)
            potentials = FullBatches(every, [one.moving for one in weights], loaders, self.temperature)
            chains = [
                self._chain(one, own, progress and not k, who=f"Chain {k % self.chains} of network {k // self.chains}")
                for k, (one, own) in enumerate(zip(weights, kept, strict=True))
            ]
            walks = answered_together(chains, potentials, streams)
        stack.unstack(networks)
        found = [own.particles(one.bnn) for one, own in zip(weights, kept, strict=True)]
        shares = [slice(k, k + self.chains) for k in range(0, len(walks), self.chains)]
        for network, share in zip(networks, shares, strict=True):
            self.keep(network, joined(found[share]))
        result.details["chains"] = self.chains
        for fact in FACTS:
            result.details[fact] = [[getattr(walk, fact) for walk in walks[share]] for share in shares]
        result.seconds = time.monotonic() - begun
        return result

    def place(self, bnn: Bayesian, posterior: Particles) -> None:
        """Set the network to the mean of one chain, or to the last network of several."""
        several = self.chains * rank_and_world()[1] > 1
        self.stand(bnn, posterior, at_mean=not several)

    def _check_fit(
        self,
        bnn: Bayesian,
        loader: Any,
        epochs: int | None,
        start: Callable[[], nn.Module] | None,
        training: dict[str, Any],
    ) -> None:
        """Raise for options, data and chains that cannot work."""
        check_leaves_none_out(loader)
        if epochs is None and training:
            raise TypeError(
                f"{', '.join(training)} are options of training. Pass epochs=... to train first, or leave them out."
            )
        check_names("HMC", training, train.fit)
        if self.chains * rank_and_world()[1] > 1 and self.subset == "all" and start is None:
            check_resettable(bnn.model)

    def _begin(self, bnn: Bayesian, moving: Moving, index: int, start: Callable[[], nn.Module] | None) -> None:
        """Draw new random weights, unless this is the first chain or only a subset moves."""
        if index and self.subset == "all":
            with frozen(moving.points(bnn)):
                reinitialise_(bnn.model, start)
            bnn.keep_zeros()

    def _kept(self, weights: FlatWeights, dtype: torch.dtype | None, folder: Path | None) -> KeptNetworks:
        """Make the store for the networks of a chain."""
        moving = weights.moving
        buffers = [name for name, _ in weights.bnn.model.named_buffers()] if moving.everything else []
        steps = range(self.warmup + 1, self.warmup + self.samples + 1)
        return KeptNetworks(moving.names, buffers, steps, dtype, None if folder is None else folder / "samples")

    def _chain(
        self,
        weights: FlatWeights,
        kept: KeptNetworks,
        shown: bool,
        journal: Journal | None = None,
        who: str = "The chain",
    ) -> Asking[Walk]:
        """Begin a chain at the weights of a network, or where it was interrupted."""
        start, bnn = weights.vector(), weights.bnn

        def after(walk: Walk) -> None:
            bnn.step = walk.iteration
            if walk.iteration > self.warmup:
                weights.put(walk.q)
                kept.observe(bnn)
            if journal is not None:
                journal.write(walk)

        walk = None if journal is None else journal.read(start)
        bnn.step = 0 if walk is None else walk.iteration
        return hamiltonian_chain(
            start,
            samples=self.samples,
            warmup=self.warmup,
            leapfrog=self.leapfrog,
            target_acceptance=self.target_acceptance,
            watch=lambda iterations: progress_bar(iterations, "hmc", enabled=shown),
            resume=walk,
            after=after,
            who=who,
        )
