"""The commands prune, export and report."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bayeslim.app.cli.calls import BadSetting
from bayeslim.app.cli.config import FILE, Settings, budget
from bayeslim.app.cli.fitting import RULES
from bayeslim.app.cli.networks import of_folder, rules_in, saved_bayesian, saved_network
from bayeslim.app.cli.sources import Loaders, data_by_name, device_by_name, loaders_of, model_by_name
from bayeslim.app.compress.finished import read_finished
from bayeslim.app.compress.folder import INDEX as RUN_INDEX
from bayeslim.app.compress.job import described
from bayeslim.app.data.cells import is_table, read_table
from bayeslim.app.data.tables import TableRules
from bayeslim.app.report import report
from bayeslim.app.report.files import KNOWN_FILES
from bayeslim.bayesian import Bayesian
from bayeslim.compact.restricted import NotRestrictable
from bayeslim.errors import BayeslimWarning, UnsupportedModel
from bayeslim.export import Exported
from bayeslim.export import export as export_network
from bayeslim.io.files import write_file
from bayeslim.io.saving import save
from bayeslim.prune import Budget, Plan, compact
from bayeslim.prune import plan as make_plan
from bayeslim.prune import prune as prune_network
from bayeslim.prune.budget import MEASURED


def prune_folder(network: Path, out: Path, model: str | None, data: str | None, device: str, **given: Any) -> Plan:
    """Prune the network in a folder, and save it in another.

    With data, the posterior is found again after each cut. `given` are the flags of the budget and of the cut.
    """
    if (out / RUN_INDEX).is_file():
        raise BadSetting(f"{out} holds a run, whose network the pruned one would hide: choose another folder.")
    place = device_by_name(device)
    bnn = saved_bayesian(network, model, "prune", place)
    settings = {name: value for name, value in given.items() if value is not None}
    granularity, criterion = settings.get("granularity", "weight"), settings.get("criterion", "auto")
    goal = budget(settings, needs_none=":" in granularity)
    if data is None:
        _check_without_data(goal, granularity)
    rules = rules_in(network)
    loaders = _loaders(data, rules, settings, place)
    if goal is None:
        pruned = prune_network(bnn, make_plan(bnn, granularity=granularity, criterion=criterion))
    else:
        pruned = prune_network(
            bnn,
            goal,
            refresh=loaders.train if loaders else None,
            steps=settings.get("steps", 10 if loaders else 1),
            validate=loaders.val if loaders else None,
            example=loaders.example if loaders else None,
            granularity=granularity,
            criterion=criterion,
        )
    save(pruned, out)
    if rules is not None:
        write_file(out / RULES, rules.to_json().encode())
    plan: Plan = pruned.plan_
    return plan


def _check_without_data(goal: Budget | None, granularity: str) -> None:
    """Refuse a cut that needs data, with the flag to pass."""
    if granularity == "unit":
        raise BadSetting("--granularity unit needs inputs to run the network on. Got none: pass --data NAME.")
    if goal is not None and goal.goal in ("flops", *MEASURED):
        flag = goal.goal.replace("_", "-")
        raise BadSetting(f"--{flag} needs data to run the network on. Got none: pass --data NAME.")


def export_folder(
    network: Path,
    to: Path,
    model: str | None,
    data: str | None,
    shape: str | None,
    samples: int | None,
    sparse: bool,
    int8: bool,
    device: str,
) -> Exported:
    """Export the network in a folder; see `bayeslim export --help`."""
    place = device_by_name(device)
    found = saved_network(network, model).to(place)
    if (data is None) == (shape is None):
        raise BadSetting("export needs inputs to run the network on: pass either --data NAME or --shape 1x28x28.")
    if shape is not None:
        sizes = shape.lower().split("x")
        if not all(size.isdigit() and int(size) > 0 for size in sizes):
            raise BadSetting(f'shape="{shape}" must be whole numbers with x between them, such as "1x28x28".')
        example: Any = torch.rand(2, *map(int, sizes), generator=torch.Generator().manual_seed(0)).to(place)
    else:
        loaders = _loaders(data, rules_in(network), {}, place)
        assert loaders is not None
        example = loaders.example
    if isinstance(found, Bayesian):
        found = _compacted(found, example, draws=samples is not None)
    return export_network(found, to, example=example, samples=samples, sparse=sparse, int8=int8)


def _compacted(bnn: Bayesian, example: Any, draws: bool) -> nn.Module:
    """Compact the mean network, or with `draws` a network to draw from.

    A network that cannot be compacted is returned whole, with a warning.
    """
    if bnn.masks:
        try:
            return compact(bnn, example, bayesian=draws)
        except (UnsupportedModel, NotRestrictable) as reason:
            warnings.warn(f"The file still holds the units that were cut: {reason}", BayeslimWarning, stacklevel=2)
    return bnn if draws else bnn.mean_network()


def report_run(run: Path, to: Path | None, title: str | None, model: str | None, data: str | None, device: str) -> Path:
    """Write the report of a run again, from its files; nothing is trained or timed."""
    if not (run / FILE).is_file():
        raise BadSetting(f"{run} holds no {FILE}: it is no finished run of `bayeslim compress`.")
    place = device_by_name(device)
    settings = Settings.read(run / FILE, {"out": str(run)})
    architecture = model_by_name(of_folder("model", model, settings.model, run)).to(place)
    name = of_folder("data", data, settings.data, run)
    loaders = data_by_name(name, settings.batch_size, settings.validation, settings.seed, place)
    result = read_finished(run, architecture, described(loaders.test or loaders.val))
    return report(
        result.bnn,
        result.pruned,
        result.slim,
        to or run / "report.html",
        validate=loaders.test or loaders.val,
        example=loaders.example,
        rows=result.rows,
        benchmark=result.benchmark,
        files=[name for name in KNOWN_FILES if (run / name).exists()],
        title=title,
    )


def _loaders(
    data: str | None, rules: TableRules | None, settings: dict[str, Any], device: torch.device
) -> Loaders | None:
    if data is None:
        return None
    own = settings.get("batch_size", 128), settings.get("validation", 0.1), settings.get("seed", 0)
    if rules is not None and is_table(data):
        return loaders_of(rules.dataset(read_table(Path(data)), data), *own, device)
    return data_by_name(data, *own, device)
