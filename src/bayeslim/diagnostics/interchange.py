"""Chains in ArviZ's own form, for its plots and tables."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.diagnostics import traces
from bayeslim.errors import MissingExtra
from bayeslim.likelihoods.base import single
from bayeslim.posteriors import Particles
from bayeslim.results import as_array
from bayeslim.types import Inputs


def to_arviz(
    source: Bayesian | Particles,
    x: Inputs = None,
    *,
    chains: int | None = None,
    energy: Tensor | Sequence[Any] | None = None,
) -> Any:
    """Convert chains to ArviZ.

    Weights are in the group `posterior`, under the user's own parameter names.

    Args:
        source: a network whose posterior was sampled, or its particles.
        x: inputs; every network's predictions for them go to `posterior_predictive`, as "outputs".
        chains: the number of chains; by default that of the particles.
        energy: the Hamiltonian at every draw, (chains, draws); goes to `sample_stats`.

    Returns:
        an `arviz.InferenceData`, or an `xarray.DataTree` from ArviZ 1.0 on.

    Raises:
        MissingExtra: if ArviZ is not installed.
    """
    particles = traces.particles_of(source)
    chains = particles.chains if chains is None else chains
    groups = {"posterior": {name: as_array(single(trace)) for name, trace in traces.weights(particles, chains).items()}}
    if x is not None:
        groups["posterior_predictive"] = {"outputs": as_array(single(traces.outputs(source, x, chains)))}
    if energy is not None:
        found = traces.energies(energy, chains, particles.count // chains)
        groups["sample_stats"] = {"energy": as_array(single(found))}
    arviz = _arviz()
    with warnings.catch_warnings():
        # many short chains are meant; ArviZ asks whether the two were swapped
        warnings.filterwarnings("ignore", message="More chains", category=UserWarning)
        if int(arviz.__version__.partition(".")[0]) >= 1:
            return arviz.from_dict(groups)
        return arviz.from_dict(**groups)


def _arviz() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it announces its next version when it is imported
            import arviz
    except ImportError as error:
        raise MissingExtra("ArviZ", "diagnostics", "to_arviz") from error
    return arviz
