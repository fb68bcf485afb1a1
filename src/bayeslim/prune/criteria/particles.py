"""Units of particles: the weights of a unit as one vector in each of S networks.

Particles have no density, so each criterion that supports them defines its score across the S networks in its own file.
Scores of networks from several modes mean little before their units are matched (`bayeslim.align`): unit 3 of one
network may correspond to unit 7 of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bayeslim.posteriors.particles import Particles
from bayeslim.posteriors.saliency import Group
from bayeslim.types import flattened


def score_each_group(posterior: Particles, groups: Sequence[Group], score: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a score to the weights of every group, (S, n), and stack the results."""
    values = {name: flattened(value, 1) for name, value in posterior.values.items()}
    found = []
    for group in groups:
        parts = [values[name][:, index.to(values[name].device)].double() for name, index in group.items()]
        found.append(float(score(torch.cat(parts, 1))))
    return torch.tensor(found, dtype=torch.float64)


def normalised(vectors: Tensor) -> Tensor:
    """Scale vectors (..., n) to length one; zero vectors stay zero."""
    return F.normalize(vectors, dim=-1, eps=torch.finfo(vectors.dtype).tiny)
