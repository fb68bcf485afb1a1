"""Snapshot ensembles: one training run whose learning rate falls and restarts, a network kept at the end of each cycle.

    η(t) = η₀ ½ (1 + cos(π (t mod T/C) / (T/C)))        T steps, C cycles

At the end of a cycle the network has settled into a mode; the next start throws it out towards another. M networks for
the price of one, less different from each other than those of a deep ensemble.

Huang, Li, Pleiss, Liu, Hopcroft & Weinberger 2017, arXiv:1704.00109
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from bayeslim.errors import BayeslimError
from bayeslim.io.registry import register
from bayeslim.io.storage import check_fits, read_folder, write_folder
from bayeslim.methods.shared.learned_noise import average_noise_, noise_of
from bayeslim.methods.shared.particle_method import ParticleMethod, gathered, snapshot
from bayeslim.methods.shared.refit import restored_on_failure
from bayeslim.results import Fit
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.fit import Epoch, fit
from bayeslim.types import Params, device_of

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian

PARTS = ("value", "rest", "noise")
"""Of a snapshot in a file: random parameters, what else changes, and what the likelihood has learned."""


@register("method")
@dataclass(frozen=True)
class Snapshot(ParticleMethod):
    """The networks at the ends of cycles; the network itself is left at the last, since the mean of all is none.

    Attributes:
        cycles: how often the learning rate falls to zero.
        burn_in: how many of the first cycles are not kept.
    """

    cycles: int = 5
    burn_in: int = 0

    name: ClassVar[str] = "snapshot"
    stands_at: ClassVar[Literal["mean", "last"]] = "last"

    def __post_init__(self) -> None:
        if type(self.cycles) is not int or self.cycles < 1:
            raise ValueError(f"cycles must be a whole number, at least 1. Got {self.cycles!r}.")
        if type(self.burn_in) is not int or not 0 <= self.burn_in < self.cycles:
            raise ValueError(f"burn_in must leave at least one of {self.cycles} cycles. Got {self.burn_in!r}.")

    def factor(self, done: float) -> float:
        """What the learning rate is multiplied with when a fraction of training is done."""
        # Rounded, since a fraction just below a whole number of cycles is the start of the next one.
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
        """Train through all cycles, and keep a network at the end of each; a noise that is learned along is averaged.

        Args:
            bnn: the network; training starts from where it is.
            loader: batches of inputs and targets.
            epochs: of all cycles together, a multiple of their number; one a cycle if not given.
            checkpoint: a folder to save to after every epoch; training goes on exactly from what it holds.
            callbacks: functions of an `Epoch`, called after each one in order.
            **training: options of `bayeslim.train.fit`; `lr` is where each cycle starts.
        """
        epochs = self.cycles if epochs is None else epochs
        if epochs < 1 or epochs % self.cycles:
            raise ValueError(
                f"{self.cycles} cycles of equal length need a multiple of {self.cycles} epochs. Got epochs={epochs}."
            )
        for option, why in (
            ("lr_schedule", "the cycles are the schedule"),
            ("patience", "every cycle is gone through"),
        ):
            if training.get(option) is not None:
                raise ValueError(f"Snapshot takes no {option}: {why}.")
        found: dict[int, tuple[Params, Params]] = {}
        noises: dict[int, Params] = {}
        folder = None if checkpoint is None else Path(checkpoint)

        def gather(epoch: Epoch) -> None:
            cycle, within = divmod(epoch.number, epochs // self.cycles)
            if within == 0 and cycle > self.burn_in:
                found[cycle], noises[cycle] = snapshot(bnn), noise_of(bnn.likelihood)
                if folder is not None and rank_and_world()[0] == 0:
                    _write(folder / f"cycle-{cycle}", *found[cycle], noises[cycle])

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
                    f"Training stopped ({result.stopped}) before the first cycle that is kept had ended, so there is "
                    "no snapshot. Train longer, or use more cycles."
                )
            average_noise_(bnn.likelihood, [noises[cycle] for cycle in sorted(noises)])
        self.keep(bnn, gathered([found[cycle] for cycle in sorted(found)]))
        return result


def _write(folder: Path, values: Params, rest: Params, noise: Params) -> None:
    """Keep a snapshot beside the checkpoint of its epoch, and before it: later it could not be had again."""
    write_folder(folder, "particle", {}, _named(values, rest, noise))


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
