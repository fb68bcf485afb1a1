"""From curvature to posterior: the Gaussian of each structure at a network's present weights.

A diagonal is a Kronecker posterior without layers: it keeps curvature and prior apart, so that the prior can be changed
afterwards. A `Diagonal` holds standard deviations and could not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from bayeslim import curvature
from bayeslim.bayesian import Bayesian
from bayeslim.curvature.columns import Columns
from bayeslim.curvature.diag import Kind
from bayeslim.curvature.layers import matrix_layer
from bayeslim.curvature.sweep import evaluation_replica
from bayeslim.errors import BayeslimError, NoSiteMatched, NotFitted, UnsupportedModel
from bayeslim.likelihoods import Likelihood
from bayeslim.methods.subnetwork import Subnetwork
from bayeslim.posteriors import Conditioned, Dense, Gaussian, Kronecker, LowRank, Posterior
from bayeslim.posteriors import prior_precision as precisions
from bayeslim.sites import matcher, owner
from bayeslim.train.loaders import size_of_data
from bayeslim.train.seeding import ordered_by
from bayeslim.types import Params, call, device_of, split_batch, to_device

if TYPE_CHECKING:
    from bayeslim.methods.laplace import Laplace

Structure = Literal["auto", "kron", "diag", "full", "lowrank"]
Curvature = Literal["auto", "signs", "exact", "sampled", "empirical", "kfra", "hutchinson"]

MAX_EXACT_PASSES = 2**14
"""With curvature="auto", the most backward passes of one example: outputs times examples."""

DIAGONAL_OF: dict[str, Kind] = {
    "signs": "signs",
    "exact": "ggn",
    "sampled": "fisher",
    "empirical": "empirical",
    "kfra": "ggn",
    "hutchinson": "hutchinson",
}
"""The diagonal that goes with each curvature."""

MAX_DENSE_WEIGHTS = 40_000
"""The most weights with a full covariance: its matrix takes 6.4 GB in single precision."""


@dataclass(frozen=True)
class Measured:
    """The result of a pass over the data.

    Attributes:
        posterior: the Gaussian at the network's weights.
        points: sites that the structure could not express and that stay points, with the reason.
        curvature: the kind of curvature that was measured.
        diagonal_factors: weights with a Kronecker factor so large that only its diagonal is kept, with the reason.
    """

    posterior: Gaussian
    points: Mapping[str, str]
    curvature: str = "exact"
    diagonal_factors: Mapping[str, str] = field(default_factory=dict)


def measured(
    bnn: Bayesian,
    method: Laplace,
    loader: Iterable[Any],
    *,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Measured:
    """Measure the curvature and build the posterior, in `dtype`, at least float32.

    The posterior of a pruned network is conditioned on its zeros. The seed is that of random signs or samples.
    """
    empty = [name for name, p in bnn.model.named_parameters() if not p.numel()]
    if empty:
        raise UnsupportedModel(f'Laplace needs layers with weights. "{empty[0]}" is empty: leave out its layer.')
    method = replace(method, curvature=chosen_curvature(bnn, method, loader))
    names = random_names(bnn, method, loader)
    mean = {name: bnn.model.get_parameter(name).detach().clone() for name in names}
    options: dict[str, Any] = {"dtype": dtype, "seed": seed, "progress": progress}
    at = _At(bnn, method, loader, mean, options)
    build = {"kron": at.kronecker, "diag": at.diagonal, "full": at.full, "lowrank": at.low_rank}[method.kind]
    found = replace(build(), curvature=method.curvature)
    own = {name: mask for name, mask in bnn.masks.items() if name in found.posterior.mean}
    return replace(found, posterior=found.posterior.condition(own)) if own else found


def chosen_curvature(bnn: Bayesian, method: Laplace, loader: Iterable[Any]) -> Curvature:
    """Choose for "auto": "exact" for few outputs and data, else "signs"."""
    if method.curvature != "auto":
        return method.curvature
    size = size_of_data(loader)
    if not size or size > MAX_EXACT_PASSES:
        return "signs"
    with torch.no_grad(), ordered_by(loader, 0):
        inputs, _ = split_batch(to_device(next(iter(loader)), device_of(bnn.model)))
        outputs = call(evaluation_replica(bnn.model, inputs), inputs)
    return "exact" if outputs[0].numel() * size <= MAX_EXACT_PASSES else "signs"


def random_names(bnn: Bayesian, method: Laplace, loader: Iterable[Any]) -> tuple[str, ...]:
    """List the sites that the method's subset makes random."""
    subset = method.subset
    if subset == "all" or isinstance(subset, Subnetwork):
        return bnn.sites.names
    if subset == "last-layer":
        first = to_device(next(iter(loader)), device_of(bnn.model))
        subset = last_layer(bnn.model, split_batch(first)[0])
    matches = matcher(subset)
    found = tuple(n for n in bnn.sites.names if matches(n, bnn.model.get_parameter(n), owner(bnn.model, n)[0]))
    if not found:
        raise NoSiteMatched(
            f"subset={method.subset!r} matched none of the {len(bnn.sites.names)} random parameters: "
            f"{', '.join(bnn.sites.names[:3])}, ... Print bnn.sites to see them all."
        )
    return found


def last_layer(model: nn.Module, inputs: Any) -> str:
    """Find the name of the last layer with a weight matrix that runs."""
    order: list[str] = []
    twin = evaluation_replica(model, inputs)
    for path, module in twin.named_modules():
        if matrix_layer(module) is not None:
            module.register_forward_hook(lambda *_, path=path: order.append(path))
    with torch.no_grad():
        call(twin, inputs)
    if not order:
        raise UnsupportedModel(
            f"No linear or convolutional layer of {type(model).__name__} ran, so there is no last one. "
            'Name the parameters instead, subset="head".'
        )
    return order[-1] or r"[^.]*"


def prior_precisions(bnn: Bayesian, names: Iterable[str], scale: float = 1.0) -> dict[str, float | Tensor]:
    """Compute prior precisions δ = 1/std² by name, times a factor."""
    found: dict[str, float | Tensor] = {}
    for name in names:
        std = cast("float | Tensor", bnn.priors[name].config()["std"])
        found[name] = scale * std**-2 if isinstance(std, Tensor) else scale * float(std) ** -2
    return found


def current(bnn: Bayesian) -> Gaussian:
    """Return the posterior, if it belongs to the network's present weights."""
    posterior = cast("Gaussian", bnn.posterior_)
    for name, value in posterior.mean.items():
        if not torch.equal(bnn.model.get_parameter(name).detach().to(value.dtype), value):
            raise NotFitted(
                f'"{name}" has changed since the posterior was measured, which describes the network as it was then. '
                "Call bnn.fit(loader) again."
            )
    return posterior


def diagonal_factors(posterior: Posterior) -> dict[str, str]:
    """List weights with a factor kept as a diagonal, other than that of embeddings."""
    base = posterior.base if isinstance(posterior, Conditioned) else posterior
    found = {}
    for factors in base.factors if isinstance(base, Kronecker) else ():
        embedding = factors.transposed and base.mean[factors.weight].ndim == 2
        sides = [("inputs", factors.inputs, not embedding), ("outputs", factors.outputs, True)]
        diagonal = [f"{factor.size:,} {side}" for side, factor, counts in sides if counts and factor.vectors is None]
        if diagonal:
            found[factors.weight] = f"correlations between its {' and '.join(diagonal)} are left out"
    return found


def examples_in(loader: Any) -> int:
    """Count the examples of a loader."""
    size = size_of_data(loader)
    return sum(len(split_batch(batch)[1]) for batch in loader) if size is None else size


@dataclass(frozen=True)
class _At:
    """The posteriors at one setting of the weights."""

    bnn: Bayesian
    method: Laplace
    loader: Iterable[Any]
    mean: Params
    options: dict[str, Any]

    @property
    def data(self) -> tuple[nn.Module, Iterable[Any], Likelihood]:
        return self.bnn.model, self.loader, self.bnn.likelihood

    @property
    def columns(self) -> Columns:
        return cast("Columns", self.method.curvature)

    def kronecker(self) -> Measured:
        if self.method.curvature == "kfra":
            options = {key: value for key, value in self.options.items() if key != "seed"}
            factors = curvature.kfra(*self.data, names=self.mean, **options)
        else:
            factors = curvature.kfac(
                *self.data,
                names=self.mean,
                columns=self.columns,
                sharing=self.method.sharing,
                max_side=self.method.max_side,
                **self.options,
            )
        layers = factors.decompose()
        if self.method.corrected and factors.layers:
            columns = "exact" if self.method.curvature == "kfra" else self.columns
            options = {key: value for key, value in self.options.items() if key != "dtype"}
            layers = curvature.ekfac(*self.data, factors, columns=columns, **options)
        point = self.method.unsupported == "point"
        rest = [] if point else list(factors.unsupported)
        mean = {name: value for name, value in self.mean.items() if not (point and name in factors.unsupported)}
        if not mean:
            raise UnsupportedModel(
                "No parameter has Kronecker factors, and the others stay points: nothing would be random. "
                'Use unsupported="diagonal" or structure="diag".'
            )
        posterior = Kronecker(
            mean,
            list(layers.values()),
            prior_precisions(self.bnn, mean),
            rest=self._diagonal(rest) if rest else {},
            damping=self.method.damping,
        )
        points = factors.unsupported if point else {}
        return Measured(posterior, points, diagonal_factors=factors.diagonal_factors)

    def diagonal(self) -> Measured:
        prior = prior_precisions(self.bnn, self.mean)
        return Measured(Kronecker(self.mean, [], prior, rest=self._diagonal(self.mean)), {})

    def full(self) -> Measured:
        subset = self.method.subset
        if isinstance(subset, Subnetwork):
            return Measured(self._subnetwork(subset), {})
        size = sum(value.numel() for value in self.mean.values())
        if size > MAX_DENSE_WEIGHTS:
            raise BayeslimError(
                f"The full covariance of {size:,} weights takes {4 * size**2 / 1e9:,.0f} GB. "
                'Use structure="kron" or "lowrank", subset="last-layer", or a Subnetwork.'
            )
        found = curvature.ggn(*self.data, list(self.mean), columns=self.columns, **self.options)
        return Measured(Dense(self._ordered(found.weights), found.matrix, prior_precisions(self.bnn, self.mean)), {})

    def low_rank(self) -> Measured:
        size = sum(value.numel() for value in self.mean.values())
        rank = min(self.method.rank, size)
        found = curvature.lowrank(*self.data, rank, list(self.mean), columns=self.columns, **self.options)
        prior = prior_precisions(self.bnn, self.mean)
        return Measured(LowRank(self._ordered(found.weights), found.vectors, found.eigenvalues, prior), {})

    def _subnetwork(self, subset: Subnetwork) -> Dense:
        if subset.size > MAX_DENSE_WEIGHTS:
            raise BayeslimError(
                f"The full covariance of {subset.size:,} weights takes {4 * subset.size**2 / 1e9:,.0f} GB. "
                "Use a smaller subnetwork."
            )
        resolved = precisions.resolve(prior_precisions(self.bnn, self.mean), self.mean)
        like = torch.empty((), dtype=torch.float64, device=device_of(self.bnn.model))
        delta = precisions.diagonal(resolved, self.mean, like)
        diagonal = {} if subset.by == "random" else self._diagonal(self.mean)
        indices = subset.choose(self.mean, diagonal, delta, self.bnn.masks)
        found = curvature.ggn(*self.data, indices, columns=self.columns, **self.options)
        mean = self._ordered(found.weights)
        scale = subset.size / sum(value.numel() for value in self.mean.values())
        chosen = {name: index for name, index in found.weights.items() if index is not None}
        return Dense(mean, found.matrix, prior_precisions(self.bnn, mean, scale), indices=chosen)

    def _diagonal(self, names: Iterable[str]) -> Params:
        kind = DIAGONAL_OF[self.method.curvature]
        return curvature.diag(*self.data, kind, names=list(names), **self.options)

    def _ordered(self, names: Iterable[str]) -> Params:
        """Order the means as the rows of a matrix."""
        return {name: self.mean[name] for name in names}
