"""`fine_tune`: train the means of the weights that a cut has left.

The noise of a variational posterior helps to find the weights to cut, and then costs the last tenths of a per cent: few
weights are left, and the mean network is deployed. So the means are trained as points, without noise and without the
KL. Weights that were cut stay zero; spreads and gates stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bayeslim import stochastic
from bayeslim.bayesian import Bayesian
from bayeslim.families import DiagonalGaussian
from bayeslim.methods.shared import gating
from bayeslim.methods.variational import Variational
from bayeslim.prune.prune import Refresh
from bayeslim.train.fit import fit


def fine_tune(pruned: Bayesian, loader: Any, **options: Any) -> Bayesian:
    """Train the means of a pruned network further, in a copy, with zeros kept at zero.

    A variational posterior of independent weights keeps its spreads. Other posteriors are found again: Laplace's
    curvature after training, that of correlated weights together with their means.

    Args:
        pruned: a network from `bayeslim.prune`.
        loader: training data.
        options: of `bayeslim.train.fit`, such as epochs=10, lr=5e-4, lr_schedule="cosine".
    """
    if not isinstance(pruned, Bayesian):
        raise TypeError(
            f"fine_tune takes a Bayesian network, such as bl.prune returns. Got {type(pruned).__name__}. Train a "
            "plain network with your own loop."
        )
    tuned = copy.deepcopy(pruned)
    method = tuned.method
    if not isinstance(method, Variational) or not method.mean_field:
        return Refresh(loader, options)(tuned)
    with means_alone(tuned):
        fit(tuned, loader, **options)
    return tuned


@contextmanager
def means_alone(bnn: Bayesian) -> Iterator[None]:
    """Train the means alone inside this context, without noise and without the KL."""
    method = bnn.method
    assert isinstance(method, Variational)
    means = {name for name, _ in bnn.mean_network().named_parameters()}
    spreads = [p for name, p in bnn.model.named_parameters() if name not in means and p.requires_grad]
    bnn.method = Variational(
        method.family, estimator="mean", temperature=0.0, gates=method.gates, gate_at=method.gate_at
    )
    # Activation checkpointing runs layers again in the backward pass, where the loss does not turn noise off.
    noisy = [layer for layer in bnn.model.modules() if stochastic.is_noisy(layer)]
    for layer in noisy:
        stochastic.make_plain(layer)
    for parameter in spreads:
        parameter.requires_grad_(False)
    try:
        with gating.still(bnn.model):
            yield
    finally:
        bnn.method = method
        for layer in noisy:
            assert isinstance(method.family, DiagonalGaussian)
            stochastic.make_noisy(layer, method.noise_at, method.family)
        for parameter in spreads:
            parameter.requires_grad_(True)
