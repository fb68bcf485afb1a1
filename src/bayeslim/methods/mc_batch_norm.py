"""Batch norm as a posterior: in training, statistics depend on the random minibatch of an example.

    p(y|x, D) ≈ (1/S) Σ_s p(y|x, w, (μ_s, σ_s²))        μ_s, σ_s² the statistics of the s-th training minibatch

at every norm, given those of earlier norms on the same minibatch. The weights are a point estimate; particles differ in
the buffers of the norms only. Minibatches should have the size of those in training, which determines how much the
statistics vary.

Teye, Azizpour & Smith 2018, arXiv:1802.06455
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, UnsupportedModel
from bayeslim.io.registry import register
from bayeslim.methods.shared.batch_norms import TOO_SMALL, measured, measuring, norms_of
from bayeslim.methods.shared.batch_statistics import of_the_first_rank
from bayeslim.methods.shared.particle_method import ParticleMethod, set_tensors
from bayeslim.methods.shared.refit import restored_on_failure
from bayeslim.posteriors.particles import Particles, stacked
from bayeslim.results import Fit
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.fit import fit
from bayeslim.train.loaders import training_set_size
from bayeslim.train.options import check_names
from bayeslim.train.seeding import seeded
from bayeslim.types import Params, device_of, split_batch, to_device


@register("method")
@dataclass(frozen=True)
class MCBatchNorm(ParticleMethod):
    """One network with the batch statistics of several training minibatches.

    Attributes:
        samples: number of minibatches.
    """

    samples: int = 30

    name: ClassVar[str] = "mc-batch-norm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.samples) is not int or self.samples < 1:
            raise ValueError(f"samples must be a whole number, at least 1. Got {self.samples!r}.")

    def convert(self, bnn: Bayesian) -> None:
        """Raise if the network has no batch norms."""
        if not norms_of(bnn.model):
            raise UnsupportedModel(
                f"MCBatchNorm needs batch norms that keep statistics, and {type(bnn.model).__name__} has none. Use a "
                "method that needs none, such as bl.Laplace()."
            )

    def fit(
        self, bnn: Bayesian, loader: Any, *, epochs: int | None = None, seed: int | None = None, **training: Any
    ) -> Fit:
        """Measure the statistics of training minibatches; with `epochs`, train first.

        Args:
            bnn: the network.
            loader: batches of inputs and targets, read until there are enough. Those of one row that has no variance
                are left out.
            epochs: number of epochs to train first.
            seed: makes the run repeatable, and leaves the global random state unchanged.
            **training: options of `bayeslim.train.fit`, with `epochs`.
        """
        if epochs is None and training:
            raise TypeError(
                f"{', '.join(training)} are options of training. Pass epochs=... to train first, or leave them out."
            )
        check_names("MCBatchNorm", training, fit)
        with restored_on_failure(bnn):
            result = Fit() if epochs is None else fit(bnn, loader, epochs=epochs, seed=seed, **training)
            with seeded(seed, rank_and_world()[0], loader):
                statistics = self._measured(bnn, loader)
        if epochs is None and not bnn.num_data_given:
            bnn.num_data = training_set_size(bnn, loader)
        weights = {name: bnn.model.get_parameter(name).detach().clone() for name in bnn.sites.names}
        values = {name: value.expand(self.samples, *value.shape) for name, value in weights.items()}
        bnn.state["posterior"] = Particles(values, buffers=of_the_first_rank(stacked(statistics)))
        return result

    def fit_stack(self, stack: Any, networks: Sequence[Bayesian], loader: Any, **options: Any) -> Fit:
        """Train all networks at once, and measure the statistics of each."""
        result = fit(stack, loader, **options)
        stack.unstack(networks)
        for network, own in zip(networks, loader.loaders, strict=True):
            self.fit(network, own)
        return result

    def place(self, bnn: Bayesian, posterior: Particles) -> None:
        """Leave the network alone: it has the weights of every particle."""

    def _measured(self, bnn: Bayesian, loader: Any) -> list[Params]:
        norms, device = set(norms_of(bnn.model).values()), device_of(bnn.model)
        names = [
            f"{path}.{leaf}" if path else leaf
            for path, module in bnn.model.named_modules()
            if module in norms
            for leaf in module._buffers
        ]
        buffers = dict(bnn.model.named_buffers())
        own = {name: buffers[name].clone() for name in names}
        found: list[Params] = []
        try:
            with measuring(bnn.model, momentum=1.0):
                while len(found) < self.samples:
                    before, batches = len(found), 0
                    for batch in loader:
                        batches += 1
                        if measured(bnn.model, to_device(split_batch(batch)[0], device)):
                            found.append({name: buffers[name].clone() for name in names})
                        if len(found) == self.samples:
                            break
                    if len(found) == before:
                        empty = "The loader gave no batches: there is nothing to measure."
                        raise BayeslimError(TOO_SMALL if batches else empty)
        finally:
            with torch.no_grad():
                set_tensors(bnn, own)
        return found
