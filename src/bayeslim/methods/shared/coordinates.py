"""A network as a function of a few coordinates, w = ŵ + P z: a small model that any method can make Bayesian.

Its prior is that of the weights on the subspace, p(ŵ + P z). Where all priors are Normal, N(m, s²), it is a Gaussian in
z. In coordinates that diagonalise its precision A = Pᵀ diag(1/s²) P, its components are independent:
    a = eigenvalues of A          z ~ N(Pᵀ diag(1/s²) (m − ŵ) / a, 1/a)
A rotation of z leaves the covariance of the path that P comes from at one.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError
from bayeslim.methods.shared.full_batch import FullBatch
from bayeslim.methods.shared.moving import Moving
from bayeslim.posteriors.particles import Particles
from bayeslim.priors import Normal, Prior
from bayeslim.train.distributed import rank_and_world
from bayeslim.types import Params, call_with, flattened


class Coordinates(nn.Module):
    """The network of `bnn` as a module whose only parameter is z; it is never changed itself.

    Args:
        bnn: the network, no submodule.
        moving: the weights that move.
        centre: ŵ of the weights that move, flattened, (D,).
        directions: P, (D, K).
    """

    def __init__(self, bnn: Bayesian, moving: Moving, centre: Tensor, directions: Tensor):
        super().__init__()
        self.z = nn.Parameter(centre.new_zeros(directions.shape[1]))
        self.centre, self.directions, self.moving = centre, directions, moving
        self.owner = (bnn,)  # in a tuple, so that it is not registered as a submodule

    def reset_parameters(self) -> None:
        """Draw z ~ N(0, I), which is as far from ŵ as the path was."""
        nn.init.normal_(self.z)

    def weights(self, z: Tensor) -> Params:
        """Compute the weights by name at one z (K,), or at several (S, K)."""
        (bnn,) = self.owner
        parts = (self.centre + z @ self.directions.T).split(sizes(bnn, self.moving), dim=-1)
        found: Params = {}
        for name, parameter, part in zip(self.moving.names, self.moving.parameters(bnn), parts, strict=True):
            shape = (*z.shape[:-1], *parameter.shape)
            if name in self.moving.masks:
                mask = self.moving.masks[name].to(part.device).expand(shape)
                found[name] = parameter.detach().expand(shape).masked_scatter(mask, part)
            else:
                found[name] = part.reshape(shape)
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the network at z."""
        (bnn,) = self.owner
        points = {name: parameter.detach() for name, parameter in bnn.model.named_parameters()}
        return call_with(bnn.model, points | self.weights(self.z), args, kwargs)

    def particles(self, draws: Tensor, dtype: torch.dtype | None, chains: int) -> Particles:
        """Build the networks at draws of z (S, K), with current buffers."""
        values = {name: value.to(dtype or value.dtype) for name, value in self.weights(draws).items()}
        buffers = {n: b.detach().clone().expand(len(draws), *b.shape) for n, b in self.owner[0].model.named_buffers()}
        return Particles(values, buffers=buffers, chains=chains)


class OnSubspace(Prior):
    """The unnormalised density that the priors of a network give to coordinates."""

    name: ClassVar[str] = "on-subspace"

    def __init__(self, coordinates: Coordinates):
        self.coordinates = coordinates

    def log_prob(self, weight: Tensor) -> Tensor:
        """Compute log p(ŵ + P z), spread equally over the coordinates."""
        whole = self.coordinates.owner[0].log_prior(self.coordinates.weights(weight))
        return (whole / weight.numel()).expand(weight.shape)

    def __repr__(self) -> str:
        return "OnSubspace()"


def principal_directions(networks: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Compute mean and principal directions (D, rank) of networks (S, D).

    The third result is the share of the variance along these directions.
    """
    rank = min(rank, len(networks) - 1)
    if rank < 1:
        raise BayeslimError(
            "A subspace needs at least two networks. Got one. Train for more epochs, or use a smaller burn_in."
        )
    centre = networks.mean(0)
    _, sizes, vectors = torch.linalg.svd((networks - centre) / (len(networks) - 1) ** 0.5, full_matrices=False)
    if not float(sizes[0]) > 0:
        raise BayeslimError("Gradient descent did not move, so there is no subspace. Use a larger lr.")
    count = (sizes[:rank] > 1e-6 * sizes[0]).sum()
    if rank_and_world()[1] > 1:  # ranks exchange coordinates and need the same number
        torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MIN)
    usable = int(count)
    directions = (vectors[:usable] * sizes[:usable, None]).T.contiguous()
    variances = sizes.double().square()
    return centre, directions, float(variances[:usable].sum() / variances.sum())


def flat(moving: Moving, values: Params) -> Tensor:
    """Flatten the moving weights of networks, (S, *shape) by name, to (S, D)."""
    rows = {name: flattened(values[name], 1) for name in moving.names}
    masks = {name: mask.to(rows[name].device).flatten() for name, mask in moving.masks.items()}
    return torch.cat([row[:, masks[name]] if name in masks else row for name, row in rows.items()], dim=1)


def sizes(bnn: Bayesian, moving: Moving) -> list[int]:
    """Count the weights of each parameter that move."""
    pairs = zip(moving.names, moving.parameters(bnn), strict=True)
    return [int(moving.masks[name].sum()) if name in moving.masks else p.numel() for name, p in pairs]


def with_normal_prior(coordinates: Coordinates) -> tuple[Coordinates, Normal]:
    """Rotate coordinates to be independent under Normal priors; return both."""
    (bnn,), moving = coordinates.owner, coordinates.moving
    if bnn.anchor is not None:
        raise BayeslimError("Continual learning has no independent prior. Use a sampler as inner.")
    wide = {name: p.detach().double()[None] for name, p in zip(moving.names, moving.parameters(bnn), strict=True)}
    settings = {name: bnn.priors[name].config() for name in moving.names}

    def of(setting: str) -> Tensor:
        full = {n: torch.as_tensor(settings[n][setting]).to(value).expand_as(value) for n, value in wide.items()}
        return flat(moving, full)[0]

    precision, centre = of("std") ** -2, coordinates.centre.double()
    directions = coordinates.directions.double()
    strengths, rotation = torch.linalg.eigh(directions.T @ (precision[:, None] * directions))
    directions = directions @ rotation
    mean = directions.T @ (precision * (of("mean") - centre)) / strengths
    like = coordinates.centre
    rotated = Coordinates(bnn, moving, like, directions.to(like).contiguous())
    return rotated, Normal(strengths.rsqrt().to(like), mean.to(like))


def to_mode_(bnn: Bayesian, loader: Any) -> None:
    """Move coordinates to the mode of their posterior, by L-BFGS on all the data."""
    potential, num_data = FullBatch(bnn, Moving.all_of(bnn), loader), bnn.data_size()
    z = potential.parameters[0]
    optimizer = torch.optim.LBFGS(
        [z], max_iter=200, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        energy, gradient = potential(z.detach().clone())
        z.grad = gradient / num_data
        return energy / num_data

    optimizer.step(closure)
    z.grad = None
