"""Aligning particles: the same networks, with their hidden units in one order.

A network computes the same function when its hidden units are permuted: the rows that make them and the columns that
read them together. Networks trained from different starts differ by such permutations at least, so that their weights
can neither be averaged nor compared one by one. Here every particle's units are matched to those of the first:

    max over permutations P of  ⟨w₁, P(w_k)⟩,   one layer at a time, the others held, until none changes.

Each layer's problem is an assignment between its units. The traced network shows which units can be
permuted (`bayeslim.compact.units`), and every aligned particle is checked to compute the same outputs as before.

Permuted copies of one network are matched exactly. Networks from different starts are not copies: their aligned
mean is far better than their unaligned mean, the more so the wider they are, but mostly worse than any of them.

Ainsworth, Hayase & Srinivasa 2023, arXiv:2209.04836
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayeslim.bayesian import Bayesian
from bayeslim.compact import UnitGraph, units
from bayeslim.compact.alike import Alike, alike
from bayeslim.errors import BayeslimError, UnsupportedModel
from bayeslim.methods.shared.particle_method import ParticleMethod
from bayeslim.posteriors.particles import Particles, stacked
from bayeslim.prune.assignment import best_assignment
from bayeslim.replica import replicate
from bayeslim.train.progress import progress
from bayeslim.types import Inputs, Params, call, device_of, to_device

MAX_SWEEPS = 100
"""The most rounds over all layers; fewer than ten are usual."""


def align(bnn: Bayesian, example: Inputs, *, average: bool = False) -> Bayesian:
    """Permute the hidden units of all particles to match the first one's, in a copy.

    Each particle computes the same function as before. Scores across particles then compare corresponding weights, and
    their mean is closer to a network: use it before pruning an ensemble, or before averaging it.

    Args:
        bnn: a fitted network whose posterior is made of particles.
        example: inputs of the network, to find its units and to check every particle on.
        average: whether the mean of the aligned particles is to be the one network that stands for them, which
            `mean_network`, `compact` and `predict(how="mean")` take; else it is one of them, as before.

    Raises:
        UnsupportedModel: if the network cannot be traced, or units that look alike are not.
        BayeslimError: if the network is pruned.
    """
    if not isinstance(bnn, Bayesian) or not isinstance(bnn.method, ParticleMethod):
        what = bnn.method.name if isinstance(bnn, Bayesian) else type(bnn).__name__
        raise TypeError(f"align is for posteriors made of particles, such as that of bl.DeepEnsemble(). Got {what}.")
    if bnn.masks:
        raise BayeslimError(
            "align puts units into another order, and the zeros of a pruned network have their places. "
            "Align before you prune: bl.prune(bl.align(bnn, example), ...)."
        )
    posterior = bnn.method.posterior(bnn)
    example = to_device(example, device_of(bnn.model))
    layers = _layers(units(bnn.mean_network(), example), posterior)
    first = posterior.particle(0) | posterior.buffers_of(0)
    found = [first]
    for k in progress(range(1, posterior.count), "aligning"):
        own = {name: value.clone() for name, value in (posterior.particle(k) | posterior.buffers_of(k)).items()}
        _match(first, own, layers)
        _check_same(bnn, posterior.network(k, bnn.model), own, example)
        found.append(own)
    together = stacked(found)
    aligned = copy.deepcopy(bnn)
    bnn.method.keep(
        aligned,
        Particles(
            {name: together[name] for name in posterior.values},
            buffers={name: together[name] for name in posterior.buffers},
            chains=posterior.chains,
            averaged=average,
        ),
    )
    return aligned


@dataclass(frozen=True)
class _Layer:
    """Units that can be permuted, and the names of the weights to compare them by."""

    units: Alike
    weights: frozenset[str]

    def rows(self, tensors: Params) -> Tensor:
        """Collect all weights of each unit in a row."""
        parts = []
        for (name, dim), places in self.units.places.items():
            if name in self.weights:
                parts.append(tensors[name].movedim(dim, 0)[places].flatten(1).double())
        return torch.cat(parts, 1)


def _layers(graph: UnitGraph, posterior: Particles) -> list[_Layer]:
    """Find the units all of whose parameters differ between particles."""
    carried = posterior.values.keys() | posterior.buffers.keys()
    return [
        _Layer(members, frozenset(graph.shapes))
        for members in alike(graph)
        if all(name in carried for name, _ in members.places)
    ]


def _match(first: Params, own: Params, layers: list[_Layer]) -> None:
    """Permute a particle's units in place while they come closer to the first one's."""
    for _ in range(MAX_SWEEPS):
        changed = False
        for layer in layers:
            gains = layer.rows(first) @ layer.rows(own).T
            order = best_assignment(gains)
            better = gains[torch.arange(len(order)), order].sum() - gains.trace()
            if better > 1e-9 * gains.abs().sum():
                layer.units.permute_(own, order)
                changed = True
        if not changed:
            return


def _check_same(bnn: Bayesian, before: Params, after: Params, example: Inputs) -> None:
    model: nn.Module = bnn.model
    model = replicate(model)
    with torch.no_grad():
        wanted = call(model, example, before)
        given = call(model, example, {name: value.to(before[name]) for name, value in after.items()})
    gap = float((wanted - given).abs().max() / wanted.abs().max().clamp_min(1e-12))
    if not gap < 1e-3:
        raise UnsupportedModel(
            f"Units of {bnn.sites.model} look interchangeable and are not: with the units permuted the "
            f"outputs differ by {gap:.2g} of the largest output. This network cannot be aligned."
        )
