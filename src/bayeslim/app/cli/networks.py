"""Networks from the folders that `bl.save` and `bayeslim fit` write, and what is known of how they were fitted.

The settings in a folder are data: a network or data set that they name is looked up in the library's own tables, and
nothing that they name is ever imported. For code of one's own, say so on the command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bayeslim.app.cli.calls import BadSetting, parse
from bayeslim.app.cli.config import FILE as COMPRESSED
from bayeslim.app.cli.fitting import FILE, FitSettings
from bayeslim.app.cli.sources import NETWORK, model_by_name, network_in
from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, CorruptFile
from bayeslim.io.saving import load
from bayeslim.io.storage import INDEX


def saved_network(folder: Path, model: str | None) -> Any:
    """The network in a folder: one that `bl.save` wrote, or a run of `bayeslim fit`.

    Args:
        folder: the folder.
        model: the network's architecture, if it is not in the zoo.
    """
    place = network_in(folder)
    if not (place / INDEX).is_file() and (folder / FILE).is_file():
        raise BadSetting(
            f"{folder} holds a fit that is not finished. Go on with it: bayeslim fit --config {folder / FILE}"
        )
    if not (place / INDEX).is_file() and (folder / COMPRESSED).is_file():
        raise BadSetting(f"{folder} is a run of compress: name a network in it, such as {folder / 'pruned'}.")
    if model is not None:
        return load(place, model_by_name(model))
    try:
        return load(place)
    except CorruptFile:
        raise
    except BayeslimError as error:
        settings = fit_settings(folder)
        own = settings.model if settings and parse(settings.model, "model").module else "package.module:factory"
        raise BadSetting(
            f'{place} holds the weights of a network of your own, and not its code: pass --model "{own}".'
        ) from error


def saved_bayesian(folder: Path, model: str | None, command: str, device: torch.device) -> Bayesian:
    """The Bayesian network in a folder, on a device.

    Args:
        folder: the folder.
        model: the network's architecture, if it is not in the zoo.
        command: what needs it, for errors.
        device: where to put it.
    """
    found = saved_network(folder, model)
    if not isinstance(found, Bayesian):
        raise BadSetting(f"{folder} holds a plain network. {command} needs a fitted Bayesian one, saved with bl.save.")
    return found.to(device)


def fit_settings(folder: Path) -> FitSettings | None:
    """How the network in a folder was fitted, if `bayeslim fit` did it."""
    file = next((f for f in (folder / FILE, folder.parent / FILE) if f.is_file()), None)
    if file is None or (file.parent != folder and folder.name != NETWORK):
        return None
    return FitSettings.read(file, {})


def data_name(folder: Path, given: str | None) -> str | None:
    """The data a command is about: what was given, or else the data set that the network was fitted to.

    Raises:
        BadSetting: if the network was fitted to data of the user's own, which must be named again.
    """
    settings = fit_settings(folder)
    if given is not None or settings is None:
        return given
    if parse(settings.data, "data").module:
        raise BadSetting(f'{folder} was fitted to data of your own: pass --data "{settings.data}".')
    return settings.data
