"""Snapshot ensembles: one training run with a cyclical learning rate, and a network kept at the end of each cycle.

    η(t) = η₀ ½ (1 + cos(π (t mod T/C) / (T/C)))        T steps, C cycles

At the end of a cycle the network has converged to a mode; the next cycle moves it towards another. C networks cost as
much as one, but differ less than those of a deep ensemble.

Huang, Li, Pleiss, Liu, Hopcroft & Weinberger 2017, arXiv:1704.00109
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError
from bayeslim.io.registry import register
from bayeslim.io.storage import check_fits, read_folder, write_folder
from bayeslim.methods.shared.learned_noise import average_noise_, noise_of
from bayeslim.methods.shared.particle_method import ParticleMethod, gathered, snapshot
from bayeslim.methods.shared.refit import restored_on_failure
from bayeslim.results import Fit
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.fit import Epoch, fit
from bayeslim.train.options import check_names
from bayeslim.types import Params, device_of

PARTS = ("value", "rest", "noise")
"""The parts of a stored snapshot: random parameters, other tensors that change, parameters of the likelihood."""


@register("method")
@dataclass(frozen=True)
class Snapshot(ParticleMethod):
    """The networks at the ends of cycles.

    The network itself is set to the last, as their mean is not a useful network.

    Attributes:
        cycles: number of cycles of the learning rate.
        burn_in: number of first cycles whose networks are not kept.
    """

    cycles: int = 5
    burn_in: int = 0

    name: ClassVar[str] = "snapshot"
    stands_at: ClassVar[Literal["mean", "last"]] = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.cycles) is not int or self.cycles < 1:
            raise ValueError(f"cycles must be a whole number, at least 1. Got {self.cycles!r}.")
        if type(self.burn_in) is not int or not 0 <= self.burn_in < self.cycles:
            raise ValueError(f"burn_in must be at least 0 and below cycles={self.cycles}. Got {self.burn_in!r}.")

    def factor(self, done: float) -> float:
        """Return the factor on the learning rate at a fraction of training."""
        # Rounded, so that the last step before the end of a cycle counts as the start of the next.
        return 0.5 * (1 + math.cos(math.pi * (round(done * self.cycles, 9) % 1)))

    def fit(
        self,
        bnn: Bayesian,
        loader: Any,
        *,
        epochs: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        callbacks: Sequence[Any] = (),
        **training: Any,
    ) -> Fit:
        """Train through all cycles and keep a network at the end of each.

        Learned noise of the likelihood is averaged.

        Args:
            bnn: the network; training starts from where it is.
            loader: batches of inputs and targets.
            epochs: epochs of all cycles together, a multiple of their number; one per cycle if not given.
            checkpoint: a folder to save to after every epoch; an interrupted run resumes from it exactly.
            callbacks: functions of an `Epoch`, called after each one in order.
            **training: options of `bayeslim.train.fit`; `lr` is the learning rate at the start of each cycle.
        """
        epochs = self.cycles if epochs is None else epochs
        if epochs < 1 or epochs % self.cycles:
            raise ValueError(
                f"{self.cycles} cycles of equal length need a multiple of {self.cycles} epochs. Got epochs={epochs}."
            )
        reasons = {"lr_schedule": "the cycles are the schedule", "patience": "it trains through every cycle"}
        check_names("Snapshot", training, fit, reasons)
        found: dict[int, tuple[Params, Params]] = {}
        noises: dict[int, Params] = {}
        folder = None if checkpoint is None else Path(checkpoint)

        def gather(epoch: Epoch) -> None:
            cycle, within = divmod(epoch.number, epochs // self.cycles)
            if within == 0 and cycle > self.burn_in:
                found[cycle], noises[cycle] = snapshot(bnn), noise_of(bnn.likelihood)
                if folder is not None and rank_and_world()[0] == 0:
                    # before the checkpoint, so that a resumed run finds it
                    write_folder(folder / f"cycle-{cycle}", "particle", {}, _named(*found[cycle], noises[cycle]))

        with restored_on_failure(bnn):
            result = fit(
                bnn, loader, epochs=epochs, lr_schedule=self.factor, checkpoint=checkpoint,
                callbacks=[*callbacks, gather], **training,
            )  # fmt: skip
            for cycle in range(self.burn_in + 1, len(result.history) * self.cycles // epochs + 1):
                if cycle not in found:  # before training was resumed
                    assert folder is not None
                    values, rest, noises[cycle] = _read(folder / f"cycle-{cycle}", bnn)
                    found[cycle] = values, rest
            if not found:
                raise BayeslimError(
                    f"No snapshot was kept: training stopped ({result.stopped}) before the end of the first kept "
                    "cycle. Train for longer, or use more cycles."
                )
            average_noise_(bnn.likelihood, [noises[cycle] for cycle in sorted(noises)])
        self.keep(bnn, gathered([found[cycle] for cycle in sorted(found)]))
        return result


def _read(folder: Path, bnn: Bayesian) -> tuple[Params, Params, Params]:
    _, _, tensors = read_folder(folder, ("particle",))
    now = (*snapshot(bnn), noise_of(bnn.likelihood))
    check_fits(_named(*now), tensors, type(bnn.model).__name__)
    device = device_of(bnn.model)
    values, rest, noise = (
        {name: tensors[f"{part}:{name}"].to(device) for name in own} for part, own in zip(PARTS, now, strict=True)
    )
    return values, rest, noise


def _named(*parts: Params) -> Params:
    return {f"{part}:{n}": t for part, own in zip(PARTS, parts, strict=True) for n, t in own.items()}
