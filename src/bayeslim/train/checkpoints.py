"""Checkpoints of a training run: everything the next epoch depends on, so that resuming is exact.

A checkpoint holds the network, the optimizer, the history, the best epoch so far, and the state of every random number
generator on every rank: torch's, Python's, numpy's and the loader's own.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bayeslim.errors import BayeslimError, CorruptFile
from bayeslim.io.storage import INDEX, check_fits, encode, read_folder, write_folder
from bayeslim.train.fingerprint import fingerprint
from bayeslim.train.seeding import has_state
from bayeslim.types import Params

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian
    from bayeslim.train.fit import TrainingRun


class Checkpoint:
    """A folder that holds the state of a run after its last complete epoch."""

    def __init__(self, path: str | os.PathLike[str], loader: Any):
        self.path, self.data = Path(path), fingerprint(loader)

    def write(self, run: TrainingRun) -> None:
        """Save a run after an epoch; called on every rank, and written by the first."""
        states = _of_every_rank(random_states(run.loader), run.world)
        if run.rank != 0:
            return
        tensors: Params = {f"network:{k}": v for k, v in run.bnn.state_dict().items()}
        if run.best_state is not None:
            tensors.update({f"best:{k}": v for k, v in run.best_state.items()})
        config = {
            "settings": self._settings(run),
            "optimizer": pack(run.optimizer.state_dict(), "optimizer", tensors),
            "history": run.result.history,
            "best_epoch": run.result.best_epoch,
            "best_value": run.best_value,
            "stopped": run.result.stopped,
            "step": run.bnn.step,
            "random": pack(states, "random", tensors),
        }
        write_folder(self.path, "checkpoint", config, tensors)

    def resume(self, run: TrainingRun) -> bool:
        """Restore a run from the folder, if it holds one; check everything first."""
        settings = self._settings(run)
        if not (self.path / INDEX).is_file():
            return False
        _, config, tensors = read_folder(self.path, ("checkpoint",))
        check_same_run(self.path, config.get("settings"), settings)
        network = {k.removeprefix("network:"): v for k, v in tensors.items() if k.startswith("network:")}
        best = {k.removeprefix("best:"): v for k, v in tensors.items() if k.startswith("best:")}
        what = f"{type(run.bnn.model).__name__}, which was to go on from {self.path}"
        for state in (network, best) if best else (network,):
            check_fits(run.bnn.state_dict(), state, what)
        try:
            optimizer = unpack(config["optimizer"], tensors)
            states = unpack(config["random"], tensors)[run.rank]
            history, step = [dict(epoch) for epoch in config["history"]], int(config["step"])
            best_epoch, best_value, stopped = config["best_epoch"], float(config["best_value"]), str(config["stopped"])
            check_random(states)
            run.optimizer.load_state_dict(optimizer)  # checks its groups before it changes anything
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CorruptFile(f"{self.path} is not a complete checkpoint: {error!r}.") from error
        run.bnn.load_state_dict(network)
        run.bnn.step = step
        run.result.history, run.result.best_epoch, run.result.stopped = history, best_epoch, stopped
        run.best_value, run.best_state = best_value, best or None
        restore_random(run.loader, states)
        return True

    def _settings(self, run: TrainingRun) -> dict[str, Any]:
        """Collect the settings that must be equal for a checkpoint to belong to a run."""
        return settings_of(run.bnn, self.data) | {
            "batches": run.batches,
            "epochs": run.epochs,
            "optimizer": type(run.optimizer).__name__,
            "learning rate": [float(group.get("initial_lr", group["lr"])) for group in run.optimizer.param_groups],
            "accumulate": run.accumulate,
            "clip": run.clip,
            "patience": run.patience,
            "world": run.world,
        }


def settings_of(bnn: Bayesian, data: str | None) -> dict[str, Any]:
    """Collect what a checkpoint must share: settings, and the hash of the data."""
    ignored: Params = {}
    return {
        "method": encode(bnn.method, ignored),
        "likelihood": encode(bnn.likelihood, ignored),
        "priors": {name: repr(prior) for name, prior in bnn.priors.given.items()},
        "num_data": bnn.num_data,
        "data": data,
        **({} if bnn.seed is None else {"seed": bnn.seed}),
    }


def check_same_run(path: Path, saved: Any, settings: dict[str, Any]) -> None:
    """Raise if the settings of a checkpoint differ from those of the run."""
    for key, value in settings.items():
        if not isinstance(saved, dict) or saved.get(key) != value:
            raise BayeslimError(
                f"{path} holds a checkpoint of another run: its {key} differs. "
                "Use another folder, or delete this one to start again."
            )


def random_states(loader: Any) -> dict[str, Any]:
    """Collect the states of all random number generators and of the loader."""
    legacy: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": _listed(random.getstate()),
        "numpy": [legacy[0], torch.from_numpy(legacy[1].astype(np.int64)), *legacy[2:]],
    }
    if torch.cuda.is_available():
        states["cuda"] = list(torch.cuda.get_rng_state_all())
    generator = getattr(loader, "generator", None)
    if has_state(loader):
        states["loader"] = loader.state_dict()
    elif isinstance(generator, torch.Generator):
        states["generator"] = generator.get_state()
    return states


def _of_every_rank(states: dict[str, Any], world: int) -> list[dict[str, Any]]:
    if world == 1:
        return [states]
    gathered: list[Any] = [None] * world
    torch.distributed.all_gather_object(gathered, states)
    return gathered


def _python_state(states: dict[str, Any]) -> tuple[Any, ...]:
    version, internal, gauss = states["python"]
    return version, tuple(internal), gauss


def _numpy_state(states: dict[str, Any]) -> tuple[Any, ...]:
    name, keys, *rest = states["numpy"]
    return name, keys.numpy().astype(np.uint32), *rest


def check_random(states: dict[str, Any]) -> None:
    """Raise unless the generators accept these states."""
    torch.Generator().set_state(states["torch"])
    random.Random().setstate(_python_state(states))
    np.random.RandomState().set_state(_numpy_state(states))


def restore_random(loader: Any, states: dict[str, Any]) -> None:
    """Restore the states of the generators and of the loader."""
    torch.set_rng_state(states["torch"])
    random.setstate(_python_state(states))
    np.random.set_state(_numpy_state(states))  # noqa: NPY002
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
    if "loader" in states:
        loader.load_state_dict(states["loader"])
    if "generator" in states:
        loader.generator.set_state(states["generator"])


def _listed(value: Any) -> Any:
    return [_listed(v) for v in value] if isinstance(value, tuple) else value


def pack(value: Any, path: str, tensors: Params) -> Any:
    """Turn nested values into JSON; tensors go to `tensors` under their path."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"$tensor": path}
    if isinstance(value, dict):
        return {"$dict": [[key, pack(v, f"{path}/{key}", tensors)] for key, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return [pack(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise BayeslimError(f"The state of {path} holds a {type(value).__name__}, which cannot be saved without pickle.")


def unpack(value: Any, tensors: Params) -> Any:
    """Rebuild the value that `pack` was given."""
    if isinstance(value, list):
        return [unpack(v, tensors) for v in value]
    if isinstance(value, dict):
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        return {key: unpack(v, tensors) for key, v in value["$dict"]}
    return value
