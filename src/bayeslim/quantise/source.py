"""The parameters of a network to round: those that its posterior covers, and the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bayeslim.bayesian import Bayesian
from bayeslim.errors import NoSiteMatched, closest
from bayeslim.posteriors import Mixture, Particles, Posterior
from bayeslim.posteriors.precision import precision_diagonal
from bayeslim.quantise.grids import MAX_BITS
from bayeslim.quantise.weights import Weights
from bayeslim.sites import matcher, owner
from bayeslim.types import Params

BitsSpec = int | Mapping[Any, int]
"""Bits for all parameters, or a dict from selections of parameters (as in `bayeslim.sites`) to bits.

The first selection that matches a parameter applies.
"""


@dataclass(frozen=True, eq=False)
class Source:
    """A network to round.

    Attributes:
        network: a plain copy, at the posterior mean.
        posterior: over some of its parameters.
        weights: the parameters that the posterior covers, by name.
        others: the other floating-point parameters, with precision one.
    """

    network: nn.Module
    posterior: Posterior
    weights: dict[str, Weights]
    others: dict[str, Weights]

    @property
    def kept(self) -> int:
        """Number of non-zero weights that the posterior covers."""
        return sum(len(weights) for weights in self.weights.values())


def price_of_rounding(posterior: Posterior) -> Params:
    """Compute the diagonal of the precision by name.

    Independent errors δ cost ½ Σ P_ii E δ_i² nats.
    """
    if isinstance(posterior, (Mixture, Particles)):
        raise TypeError(
            f"quantise needs a posterior around one network, and {type(posterior).__name__} holds several. Distil "
            "them into one (bl.distill), or fit bl.Laplace() around one of them."
        )
    return precision_diagonal(posterior)


def source_of(bnn: Bayesian, by_unit: bool) -> Source:
    """Collect the weights to round; zeros of the mean and of the masks stay zero."""
    posterior = bnn.posterior_
    precision = price_of_rounding(posterior)
    network = bnn.mean_network()
    weights, others = {}, {}
    for name, parameter in network.named_parameters():
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        value = parameter.detach()
        kept = value != 0
        if name in bnn.masks:
            kept &= bnn.masks[name].to(value.device)
        known = precision[name].to(value.device) if name in precision else torch.full_like(value, torch.inf)
        certain = known.isinf()
        if bool((kept & ~certain).any()):
            # A point mass gets the largest finite precision of its parameter.
            known = known.masked_fill(certain, float(known[~certain].max()))
            weights[name] = Weights.of(value, known, kept, by_unit)
        else:
            others[name] = Weights.of(value, torch.ones_like(value), kept, False)
    return Source(network, posterior, weights, others)


def widths(bits: BitsSpec, rest: int | None, source: Source) -> dict[str, int]:
    """Resolve the bits of every parameter to round.

    Raises:
        NoSiteMatched: if an entry matches no parameter, or a parameter of the posterior matches no entry.
    """
    found: dict[str, int] = {} if rest is None else dict.fromkeys(source.others, _checked(rest, "rest"))
    if not isinstance(bits, Mapping):
        return found | dict.fromkeys(source.weights, _checked(bits, "bits"))
    names = [name for name, _ in source.network.named_parameters()]
    taken: set[Any] = set()
    for name in (*source.weights, *source.others):
        module, _ = owner(source.network, name)
        parameter = source.network.get_parameter(name)
        chosen = [key for key in bits if matcher(key)(name, parameter, module)]
        taken.update(chosen)
        if chosen:
            found[name] = _checked(bits[chosen[0]], f"bits[{chosen[0]!r}]")
        elif name in source.weights:
            raise NoSiteMatched(
                f'No bits were given for "{name}": the dict has {", ".join(map(repr, bits))}. '
                'Add an entry for it, or "all" as the last key for the rest.'
            )
    for key in bits:
        if key not in taken:
            near = closest(key, names) if isinstance(key, str) else ""
            raise NoSiteMatched(
                f"bits[{key!r}] matches no parameter of {type(source.network).__name__}. "
                f"Closest names: {near or ', '.join(names[:3])}."
            )
    return found


def _checked(bits: Any, what: str) -> int:
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise TypeError(f"{what} is a number of bits per weight and must be a whole number. Got {bits!r}.")
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"{what} is a number of bits per weight and must be from 1 to {MAX_BITS}. Got {bits}.")
    return bits
