"""`fine_tune`: train what a cut has left, at its means.

The noise of a variational posterior that helped to find out what may go is in the way of the last tenths of a per cent:
survivors are few, and the mean network is what will be deployed. So their means are trained as points, without noise
and without the KL. Weights that were cut stay zero; spreads and gates stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bayeslim.bayesian import Bayesian
from bayeslim.methods.variational import Variational
from bayeslim.prune.prune import refreshed
from bayeslim.train.fit import fit


def fine_tune(pruned: Bayesian, loader: Any, **options: Any) -> Bayesian:
    """A copy of a pruned network whose means were trained on, with zeros kept at zero.

    A variational posterior of independent weights keeps its spreads. Others are found again as training goes on:
    Laplace's curvature where it ends, that of correlated weights together with their means.

    Args:
        pruned: a network from `bayeslim.prune`.
        loader: training data.
        options: of `bayeslim.train.fit`, such as epochs=10, lr=5e-4, lr_schedule="cosine".
    """
    if not isinstance(pruned, Bayesian):
        raise TypeError(
            f"fine_tune takes a Bayesian network, such as bl.prune returns. Got {type(pruned).__name__}. A plain one "
            "is trained as any other."
        )
    tuned = copy.deepcopy(pruned)
    method = tuned.method
    if not isinstance(method, Variational) or not method.mean_field:
        return refreshed(tuned, loader, options, "joint")
    with means_alone(tuned):
        fit(tuned, loader, **options)
    return tuned


@contextmanager
def means_alone(bnn: Bayesian) -> Iterator[None]:
    """Training trains the means of independent weights meanwhile, as points, without noise and without the KL."""
    method = bnn.method
    assert isinstance(method, Variational)
    means = {name for name, _ in bnn.mean_network().named_parameters()}
    spreads = [p for name, p in bnn.model.named_parameters() if name not in means and p.requires_grad]
    bnn.method = Variational(
        method.family, estimator="mean", temperature=0.0, gates=method.gates, gate_at=method.gate_at
    )
    for parameter in spreads:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        bnn.method = method
        for parameter in spreads:
            parameter.requires_grad_(True)
