"""The networks that a chain keeps at chosen steps, in memory or streamed to a folder.

In memory they fill one tensor per parameter, allocated when the first is kept. On disk every network is a folder named
after its step, written whole or not at all; a resumed chain writes the same steps again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, CorruptFile
from bayeslim.io.storage import INDEX, check_fits, read_folder, write_folder
from bayeslim.posteriors.particles import Particles, tensors_of
from bayeslim.types import Params, device_of


class KeptNetworks:
    """Networks at chosen steps of a run.

    Args:
        names: the parameters that are sampled.
        others: further parameters and buffers that change, kept with each network.
        steps: the values of `bnn.step` to keep, ascending.
        dtype: the dtype to keep parameters in; their own if not given.
        folder: where to write networks, instead of holding them in memory.
    """

    def __init__(
        self,
        names: Sequence[str],
        others: Sequence[str],
        steps: Sequence[int],
        dtype: torch.dtype | None = None,
        folder: Path | None = None,
    ):
        self.names, self.others, self.steps = tuple(names), tuple(others), tuple(steps)
        self.dtype, self.folder = dtype, folder
        self._place = {step: index for index, step in enumerate(steps)}
        self._kept: set[int] = set()
        self._values: Params = {}
        self._buffers: Params = {}

    def observe(self, bnn: Bayesian) -> None:
        """Keep the network if its step is a chosen one."""
        index = self._place.get(bnn.step)
        if index is None:
            return
        values, buffers = self._now(bnn)
        if self.folder is not None:
            tensors = {f"value:{n}": t for n, t in values.items()} | {f"buffer:{n}": t for n, t in buffers.items()}
            # a tensor file keeps no order, and ranks exchange parameters in order
            write_folder(self.folder / f"{bnn.step:09d}", "sample", {"step": bnn.step, "order": list(tensors)}, tensors)
            return
        for kept, now in ((self._values, values), (self._buffers, buffers)):
            _put(kept, now, index, len(self.steps), device_of(bnn.model))
        self._kept.add(index)

    def particles(self, bnn: Bayesian) -> Particles:
        """Return the networks kept so far."""
        if self.folder is not None:
            there = [self.folder / f"{step:09d}" for step in self.steps if step <= bnn.step]
            here = _outline(*self._now(bnn))
            self._values, self._buffers = _gathered(there, here, "the network", device_of(bnn.model))
            count = len(there)
        else:
            count = len(self._kept)
        if not count:
            raise BayeslimError(
                f"No network was kept: the run ended at step {bnn.step}, the first was due at step {self.steps[0]}. "
                "Run it for longer, or use a shorter burn_in."
            )
        return Particles(
            {name: tensor[:count] for name, tensor in self._values.items()},
            buffers={name: tensor[:count] for name, tensor in self._buffers.items()},
        )

    def _now(self, bnn: Bayesian) -> tuple[Params, Params]:
        own = tensors_of(bnn.model)
        values = {name: own[name].detach() for name in self.names}
        if self.dtype is not None:
            values = {name: value.to(self.dtype) for name, value in values.items()}
        return values, {name: own[name].detach() for name in self.others}


def read(path: str | os.PathLike[str]) -> Particles:
    """Read the networks that a run has written to its folder so far, of all chains.

    Args:
        path: the `checkpoint` of the run.
    """
    folders = sorted(index.parent for index in Path(path).glob(f"chain-*/samples/*/{INDEX}"))
    if not folders:
        raise FileNotFoundError(f"{path} holds no networks of a chain: no run with checkpoint={str(path)!r} kept any.")
    first = _outline(*_read(folders[0]))
    lengths = Counter(folder.parent for folder in folders)
    chains = len(lengths) if len(set(lengths.values())) == 1 else 1  # unequal after an interrupted run
    values, buffers = _gathered(folders, first, "the other networks of the chain", torch.device("cpu"))
    return Particles(values, buffers=buffers, chains=chains)


def _gathered(
    folders: list[Path], outline: dict[str, Tensor], owner: str, device: torch.device
) -> tuple[Params, Params]:
    """Stack the networks of some folders, reading one at a time."""
    kept: tuple[Params, Params] = ({}, {})
    for index, folder in enumerate(folders):
        network = _read(folder)
        check_fits(outline, _outline(*network), owner)
        for stack, now in zip(kept, network, strict=True):
            _put(stack, now, index, len(folders), device)
    return kept


def _put(stack: Params, network: Params, index: int, count: int, device: torch.device) -> None:
    """Write a network into a stack of so many, which the first of them allocates."""
    for name, tensor in network.items():
        if name not in stack:
            stack[name] = torch.empty(count, *tensor.shape, dtype=tensor.dtype, device=device)
        stack[name][index].copy_(tensor)


def _read(folder: Path) -> tuple[Params, Params]:
    _, config, tensors = read_folder(folder, ("sample",))
    order = config.get("order")
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(tensors):
        raise CorruptFile(f"{folder} does not hold the tensors that it names.")
    parts: dict[str, Params] = {"value": {}, "buffer": {}}
    for key in order:
        part, _, name = key.partition(":")
        if part not in parts:
            raise CorruptFile(f'{folder} holds "{key}", which belongs to no network of a chain.')
        parts[part][name] = tensors[key]
    return parts["value"], parts["buffer"]


def _outline(values: Params, buffers: Params) -> dict[str, Tensor]:
    """Return meta tensors with the shapes and dtypes."""
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in (values | buffers).items()}
