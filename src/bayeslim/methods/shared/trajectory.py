"""Moments of networks along training: their mean, variance and last deviations.

    θ̄ = (1/T) Σ_i θ_i        Σ_diag = (1/T) Σ_i θ_i² − θ̄²        D = [θ_i − θ̄_i],  the last K of them,

with θ̄_i the mean of the first i networks. They are updated with every network by Welford's method, which
never subtracts two large squares, and only the K deviations are kept.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError
from bayeslim.io.storage import INDEX, check_fits, read_folder, write_folder
from bayeslim.posteriors import Diagonal, LowRankCovariance
from bayeslim.types import Params, device_of

MODEL = "model."
"""The prefix of the model's parameters among all trained parameters."""


class Trajectory:
    """Running moments of networks: K deviations, or for None the mean alone.

    Parameters that are not named have only a mean.
    """

    def __init__(self, rank: int | None, names: Iterable[str]):
        self.rank = rank
        self.names = () if rank is None else tuple(MODEL + name for name in names)
        self.count = 0
        self.mean: Params = {}
        self.squares: Params = {}
        self.deviations: deque[Params] = deque(maxlen=rank or 0)

    def add(self, bnn: Bayesian) -> None:
        """Add the current weights of a network."""
        self.count += 1
        last: Params = {}
        for name, value in trained(bnn).items():
            if name not in self.mean:
                self.mean[name] = torch.zeros_like(value)
            before = value - self.mean[name]
            self.mean[name].add_(before, alpha=1 / self.count)
            if name in self.names:
                after = value - self.mean[name]
                self.squares.setdefault(name, torch.zeros_like(value)).addcmul_(before, after)
                last[name] = after
        self.deviations.append(last)

    def of(self, place: int) -> Trajectory:
        """Take the moments of one network out of those of a stack."""
        own = copy.copy(self)
        own.mean, own.squares = ({n: t[place] for n, t in part.items()} for part in (self.mean, self.squares))
        own.deviations = deque(({n: t[place] for n, t in each.items()} for each in self.deviations), self.rank or 0)
        return own

    def variance(self, name: str) -> Tensor:
        """Compute Σ_diag of a parameter."""
        return self.squares[MODEL + name].clamp_min(0) / self.count

    def gaussian(self, scale: float) -> Diagonal | LowRankCovariance:
        """Build N(θ̄, scale · (Σ_diag + D Dᵀ / (K − 1))); without D for K = 0."""
        if self.count < 2:
            raise BayeslimError(
                f"A variance needs at least two networks. Got {self.count}. Train for more epochs, start earlier "
                "(start=0.5), or average more often (every=10, in steps)."
            )
        names = [name.removeprefix(MODEL) for name in self.names]
        mean = {name: self.mean[MODEL + name].clone() for name in names}
        std = {name: (scale * self.variance(name)).sqrt() for name in names}
        if len(self.deviations) < 2:
            return Diagonal(mean, std)
        share = (scale / (len(self.deviations) - 1)) ** 0.5
        # A weight whose variance is zero or underflows has no deviations.
        factor = {
            name: torch.stack([share * each[MODEL + name] for each in self.deviations]) * (std[name] > 0)
            for name in names
        }
        return LowRankCovariance(mean, std, factor)

    def write(self, folder: Path, first: int, step: int) -> None:
        """Write the moments beside a checkpoint."""
        tensors = {f"mean:{n}": t for n, t in self.mean.items()} | {f"squares:{n}": t for n, t in self.squares.items()}
        for index, each in enumerate(self.deviations):
            tensors |= {f"deviation-{index}:{name}": value for name, value in each.items()}
        config = {"first": first, "step": step, "count": self.count, "deviations": len(self.deviations)}
        write_folder(folder, "trajectory", config, tensors)

    def read(self, folders: Iterable[Path], step: int, bnn: Bayesian) -> int:
        """Load the moments at a step; return the step at which training began."""
        now = trained(bnn)
        for folder in folders:
            if not (folder / INDEX).is_file():
                continue
            _, config, tensors = read_folder(folder, ("trajectory",))
            if config.get("step") != step:
                continue
            parts: dict[str, Params] = {}
            for key, tensor in tensors.items():
                part, _, name = key.partition(":")
                parts.setdefault(part, {})[name] = tensor.to(device_of(bnn.model))
            spread = {name: now[name] for name in self.names}
            self.count = int(config["count"])
            self.mean, self.squares = parts.get("mean", {}), parts.get("squares", {})
            kept = [parts.get(f"deviation-{index}", {}) for index in range(int(config["deviations"]))]
            self.deviations.extend(kept)
            if self.count:
                check_fits(now, self.mean, "the trained parameters")
                for each in (self.squares, *(kept if self.rank else ())):
                    check_fits(spread, each, "the random parameters")
            return int(config["first"])
        raise BayeslimError(
            f"Training was resumed at step {step}, but the averages up to that step are not beside the checkpoint. "
            "Use another folder to start again."
        )


def trained(bnn: Bayesian) -> Mapping[str, Tensor]:
    """Collect all trained parameters, at least in single precision."""
    return {
        name: p.detach().to(torch.promote_types(p.dtype, torch.float32))
        for name, p in bnn.named_parameters()
        if p.requires_grad
    }
