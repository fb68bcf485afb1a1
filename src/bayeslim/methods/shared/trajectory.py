"""The moments of a stretch of training: the mean of its networks, their spread, and their last deviations.

    θ̄ = (1/T) Σ_i θ_i        Σ_diag = (1/T) Σ_i θ_i² − θ̄²        D = [θ_i − θ̄_i],  the last K of them,

with θ̄_i the mean of the first i networks. They are updated with every network (Welford), so that the small difference
of large squares is never taken, and nothing but the K deviations is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayeslim.errors import BayeslimError
from bayeslim.io.storage import INDEX, check_fits, read_folder, write_folder
from bayeslim.posteriors import Diagonal, LowRankCovariance
from bayeslim.types import Params, device_of

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian

MODEL = "model."
"""What comes before a parameter's own name among all that is trained."""


class Trajectory:
    """Running moments of networks.

    Args:
        rank: K, how many deviations to keep; None for the mean alone.
        names: the parameters with a spread; of the others only the mean is kept.
    """

    def __init__(self, rank: int | None, names: Iterable[str]):
        self.rank = rank
        self.names = () if rank is None else tuple(MODEL + name for name in names)
        self.count = 0
        self.mean: Params = {}
        self.squares: Params = {}
        self.deviations: deque[Params] = deque(maxlen=rank or 0)

    def add(self, bnn: Bayesian) -> None:
        """Take in the network as it is now."""
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

    def variance(self, name: str) -> Tensor:
        """Σ_diag of a parameter."""
        return self.squares[MODEL + name].clamp_min(0) / self.count

    def gaussian(self, scale: float) -> Diagonal | LowRankCovariance:
        """N(θ̄, scale · (Σ_diag + D Dᵀ / (K − 1))), with as many deviations as there are; no D for K = 0."""
        if self.count < 2:
            raise BayeslimError(
                f"A spread needs at least two networks, and {self.count} was averaged. Train for more epochs, start "
                "earlier (start=0.5), or take a network more often (every=10, in steps)."
            )
        names = [name.removeprefix(MODEL) for name in self.names]
        mean = {name: self.mean[MODEL + name].clone() for name in names}
        std = {name: (scale * self.variance(name)).sqrt() for name in names}
        if len(self.deviations) < 2:
            return Diagonal(mean, std)
        share = (scale / (len(self.deviations) - 1)) ** 0.5
        # A weight that did not move has no deviations; one whose variance underflows is taken for one of these.
        factor = {
            name: torch.stack([share * each[MODEL + name] for each in self.deviations]) * (std[name] > 0)
            for name in names
        }
        return LowRankCovariance(mean, std, factor)

    def write(self, folder: Path, first: int, step: int) -> None:
        """Keep it beside a checkpoint, with the steps at which training began and at which it is."""
        tensors = {f"mean:{n}": t for n, t in self.mean.items()} | {f"squares:{n}": t for n, t in self.squares.items()}
        for index, each in enumerate(self.deviations):
            tensors |= {f"deviation-{index}:{name}": value for name, value in each.items()}
        config = {"first": first, "step": step, "count": self.count, "deviations": len(self.deviations)}
        write_folder(folder, "trajectory", config, tensors)

    def read(self, folders: Iterable[Path], step: int, bnn: Bayesian) -> int:
        """Go on from where it was at a step; returns the one at which training began."""
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
                check_fits(now, self.mean, "what is trained")
                for each in (self.squares, *(kept if self.rank else ())):
                    check_fits(spread, each, "what is random")
            return int(config["first"])
        raise BayeslimError(
            f"Training was resumed at step {step}, and the averages until there are not beside the checkpoint. "
            "Use another folder to start anew."
        )


def trained(bnn: Bayesian) -> Mapping[str, Tensor]:
    """All that is trained, at least in single precision: of the network, the likelihood and the priors."""
    return {
        name: p.detach().to(torch.promote_types(p.dtype, torch.float32))
        for name, p in bnn.named_parameters()
        if p.requires_grad
    }
