"""The journal of a Hamiltonian chain: its state on disk after every iteration, to go on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.errors import CorruptFile
from bayeslim.io.storage import INDEX, read_folder, write_folder
from bayeslim.methods.shared.hamiltonian import Walk
from bayeslim.train.checkpoints import (
    check_random,
    check_same_run,
    pack,
    random_states,
    restore_random,
    settings_of,
    unpack,
)
from bayeslim.train.fingerprint import fingerprint
from bayeslim.types import Params


class Journal:
    """The state of a chain after every iteration, so that resuming is exact.

    The networks it keeps are written beside it (`KeptNetworks`), each before the state that follows it. A network that
    was written after the last state is drawn and written again, with the same values.
    """

    def __init__(self, folder: Path, bnn: Bayesian, loader: Any):
        self.folder, self.loader, self.settings = folder, loader, settings_of(bnn, fingerprint(loader))

    def write(self, walk: Walk) -> None:
        """Save a chain after an iteration."""
        tensors: Params = {}
        config = {
            "settings": self.settings,
            "walk": pack(walk.state(), "walk", tensors),
            "random": pack(random_states(self.loader), "random", tensors),
        }
        write_folder(self.folder, "hmc", config, tensors)

    def read(self, like: Tensor) -> Walk | None:
        """Read an interrupted chain and restore the generators; None if there is none."""
        if not (self.folder / INDEX).is_file():
            return None
        _, config, tensors = read_folder(self.folder, ("hmc",))
        check_same_run(self.folder, config.get("settings"), self.settings)
        try:
            walk, states = Walk.restore(unpack(config["walk"], tensors), like), unpack(config["random"], tensors)
            check_random(states)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CorruptFile(f"{self.folder} is not a complete checkpoint: {error!r}.") from error
        restore_random(self.loader, states)
        return walk
