"""Networks from the folders that `bl.save` and `bayeslim fit` write, and the settings they were fitted with.

The settings in a folder are data, and may come from anyone. A network or a data set that they name is looked up in the
library's own tables. Code that they name (`package.module:name`) is neither imported nor quoted as a command: the user
names it on the command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bayeslim.app.cli.calls import BadSetting, parse
from bayeslim.app.cli.config import FILE as COMPRESSED
from bayeslim.app.cli.fitting import FILE, RULES, FitSettings
from bayeslim.app.cli.sources import NETWORK, model_by_name, network_in
from bayeslim.app.data.tables import TableRules
from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, CorruptFile
from bayeslim.io.saving import load
from bayeslim.io.storage import INDEX

FACTORY = "package.module:name"
"""How code is named; the words stand for themselves."""

MAX_RULES_BYTES = 64 << 20


def saved_network(folder: Path, model: str | None) -> Any:
    """Read the network in a folder that `bl.save` or `bayeslim fit` wrote.

    `model` names its architecture, if it is not in the zoo.
    """
    place = network_in(folder)
    if not (place / INDEX).is_file() and (folder / FILE).is_file():
        raise BadSetting(
            f"{folder} holds a fit that is not finished. To finish it, run the `bayeslim fit` command that began it."
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
        raise BadSetting(
            f"{place} holds the weights of a network that is not in the zoo, and not its code: name its factory with "
            f"--model {FACTORY}."
        ) from error


def saved_bayesian(folder: Path, model: str | None, command: str, device: torch.device) -> Bayesian:
    """Read the Bayesian network in a folder that a command needs, onto a device."""
    found = saved_network(folder, model)
    if not isinstance(found, Bayesian):
        raise BadSetting(f"{folder} holds a plain network. {command} needs a fitted Bayesian one, saved with bl.save.")
    return found.to(device)


def fit_settings(folder: Path) -> FitSettings | None:
    """Read the settings of the `bayeslim fit` that wrote a folder; None without any."""
    file = _beside(folder, FILE)
    return None if file is None else FitSettings.read(file, {})


def _beside(folder: Path, name: str) -> Path | None:
    """Find a file of `bayeslim fit`, in its folder or beside that of the network."""
    places = (folder, folder.parent) if folder.name == NETWORK else (folder,)
    return next((place / name for place in places if (place / name).is_file()), None)


def rules_in(folder: Path) -> TableRules | None:
    """Read the rules of the table that a network was fitted to; None without any."""
    file = _beside(folder, RULES)
    if file is None:
        return None
    if file.stat().st_size > MAX_RULES_BYTES:
        raise CorruptFile(f"{file} is larger than any that bayeslim writes.")
    return TableRules.from_json(file.read_text(encoding="utf-8"))


def needed_rules(folder: Path) -> TableRules:
    """Read the rules of a table, or raise an error that says how to make some."""
    rules = rules_in(folder)
    if rules is None:
        raise BadSetting(
            f"The network in {folder} was not fitted to a table. Pass --inputs FILE.npy, or fit one with "
            "bayeslim fit --data FILE.csv --target NAME."
        )
    return rules


def data_name(folder: Path, given: str | None) -> str | None:
    """Choose the data of a command: those given, or else those of the fit.

    Data that code gives must be named by the user.
    """
    settings = fit_settings(folder)
    if given is None and settings is not None and settings.target is not None:
        raise BadSetting(f"The network in {folder} was fitted to a table. Name a table with --data FILE.csv.")
    return given if settings is None else of_folder("data", given, settings.data, folder)


def of_folder(setting: str, given: str | None, stored: str, folder: Path) -> str:
    """Choose a setting, "model" or "data": the user's, or else the folder's.

    The folder's may not name code, or a place for files.
    """
    if given is not None:
        return given
    call = parse(stored, setting)
    if call.module:
        raise BadSetting(
            f"The settings in {folder} name code for the {setting}, and code that a folder names is not run. If you "
            f"know it, name it with --{setting} {FACTORY}."
        )
    if "root" in (call.kwargs or {}):
        raise BadSetting(
            f"The settings in {folder} name a place for the files of the {setting}, which a folder may not choose. "
            f"Name the {setting} with --{setting}."
        )
    return stored
