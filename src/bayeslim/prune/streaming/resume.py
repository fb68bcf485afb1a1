"""Checkpoints of a cut block by block: one folder for each finished block.

A block's folder holds its parameters after the cut, its masks as bits, and how its layers were solved for. It is
written under other names and renamed, so that after a kill a block is there or not. The outputs of finished blocks are
not stored: they follow from the weights, by one forward pass of each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayeslim.errors import CorruptFile
from bayeslim.io.storage import INDEX, check_fits, read_folder, write_folder
from bayeslim.posteriors.conjugate import Solve
from bayeslim.train.checkpoints import check_same_run
from bayeslim.types import Params


@dataclass(frozen=True, eq=False)
class BlockCut:
    """The cut of one block.

    Attributes:
        weights: its parameters that were changed, in the network's dtypes.
        masks: True = kept, by parameter name, on the CPU.
        unread: weights that go because their unit is not read any more, True by parameter name, on the CPU.
        left: why parameters were left alone.
        solves: how the survivors of each layer were solved for, by the weight's name.
    """

    weights: Params
    masks: Params
    unread: Params
    left: dict[str, str]
    solves: dict[str, Solve]


class Checkpoint:
    """A folder with the finished blocks of one run.

    Args:
        path: the folder; None keeps nothing.
        settings: whatever must be equal for a block to belong to the run, as JSON.
    """

    def __init__(self, path: str | os.PathLike[str] | None, settings: Mapping[str, Any]):
        self.path = None if path is None else Path(path)
        self.settings = dict(settings)

    def write(self, place: int, cut: BlockCut) -> None:
        """Store a finished block."""
        if self.path is None:
            return
        tensors = {f"weight:{name}": value for name, value in cut.weights.items()}
        shapes: dict[str, dict[str, list[int]]] = {"mask": {}, "unread": {}}
        for kind, masks in (("mask", cut.masks), ("unread", cut.unread)):
            for name, mask in masks.items():
                tensors[f"{kind}:{name}"] = torch.from_numpy(np.packbits(mask.numpy()))
                shapes[kind][name] = list(mask.shape)
        config = {
            "settings": self.settings,
            "left": cut.left,
            "solves": {name: asdict(solve) for name, solve in cut.solves.items()},
            "shapes": shapes,
        }
        write_folder(self._folder(place), "pruned block", config, tensors)

    def finished(self, blocks: int) -> int:
        """Count the first blocks that are there."""
        if self.path is None:
            return 0
        there = [(self._folder(place) / INDEX).is_file() for place in range(blocks)]
        return there.index(False) if False in there else blocks

    def read(self, place: int, model: nn.Module) -> BlockCut:
        """Read a finished block.

        Raises:
            BayeslimError: for a block of another run.
            CorruptFile: for a damaged one.
        """
        assert self.path is not None
        _, config, tensors = read_folder(self._folder(place), ("pruned block",))
        check_same_run(self.path, config.get("settings"), self.settings)
        weights = {n.removeprefix("weight:"): t for n, t in tensors.items() if n.startswith("weight:")}
        try:
            wanted = {name: model.get_parameter(name) for name in weights}
            solves = {name: Solve(**values) for name, values in config["solves"].items()}
            shapes, left = config["shapes"], {str(name): str(why) for name, why in config["left"].items()}
            masks, unread = (
                {name: _unpacked(tensors[f"{kind}:{name}"], shape) for name, shape in shapes[kind].items()}
                for kind in ("mask", "unread")
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CorruptFile(f"{self._folder(place)} is not a complete block: {error!r}.") from error
        check_fits(wanted, weights, type(model).__name__)
        return BlockCut(weights, masks, unread, left, solves)

    def _folder(self, place: int) -> Path:
        assert self.path is not None
        return self.path / f"block-{place:04d}"


def _unpacked(bits: Tensor, shape: Sequence[int]) -> Tensor:
    count = math.prod(shape)
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=count).astype(bool)).view(*shape)
