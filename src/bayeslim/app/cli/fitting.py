"""`bayeslim fit`: from a network and data to a posterior in a folder.

The folder holds the settings (`fit.toml`), the network once it is fitted (`network/`, for `bl.load`), and until then a
checkpoint. The same command goes on from the checkpoint, with the result of a run that was never stopped.
"""

from __future__ import annotations

import copy
import inspect
import math
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, cast, get_args

import torch

from bayeslim.app.cli import sources
from bayeslim.app.cli.calls import BadSetting, parse
from bayeslim.app.cli.fits import check_fits_data, outputs_for
from bayeslim.app.cli.sources import NETWORK
from bayeslim.app.cli.toml import TomlSettings
from bayeslim.app.compress.folder import RunFolder, run_folder
from bayeslim.app.compress.job import described_both, digest_of_weights, readable, start_over
from bayeslim.app.data.cells import is_table, read_table
from bayeslim.app.data.columns import Kind
from bayeslim.app.data.tables import Missing, TableRules
from bayeslim.bayesian import Bayesian, bayesianize
from bayeslim.io.files import write_file
from bayeslim.io.saving import load, save
from bayeslim.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from bayeslim.methods.base import Method
from bayeslim.methods.laplace import Tune
from bayeslim.methods.shared.chain_method import ChainMethod
from bayeslim.methods.shared.curvature_posterior import examples_in
from bayeslim.train.fit import LR_SCHEDULES
from bayeslim.types import split_batch

FILE = "fit.toml"
RULES = "table.json"
"""The rules by which a table was read, in the folder of its fit."""

AUTO = "auto"
"""The network of a table: a multilayer perceptron whose sizes follow from the columns."""
TABLE_SETTINGS = {"model": AUTO, "method": "laplace", "epochs": 100, "batch_size": 32}
"""Settings of a fit to a table, where none are given."""
TABLE_LR = 0.01
"""The learning rate of a fit to a table; chains choose their own."""
HIDDEN = 50

KINDS: dict[str, Kind] = {
    Gaussian.name: "values",
    Poisson.name: "counts",
    Bernoulli.name: "binary",
    Categorical.name: "classes",
}
"""What the target of a table holds, by the name of a likelihood."""


@dataclass(frozen=True)
class FitSettings(TomlSettings):
    """All settings of `bayeslim fit`; the flags' help says what they mean."""

    command: ClassVar[str] = "fit"
    file: ClassVar[str] = FILE

    out: str = "fit"
    weights: str | None = None
    method: str = "variational"
    prior: str | None = None
    likelihood: str | None = None
    epochs: int | None = None
    lr: float | None = None
    lr_schedule: str = "constant"
    patience: int | None = None
    tune: str | None = None
    batch_size: int = 128
    validation: float = 0.1
    seed: int = 0
    device: str = "auto"
    target: str | None = None
    missing: str = "refuse"
    drop: list[str] | None = None

    @classmethod
    def completed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Add the usual settings of a table, where the data are one."""
        if not is_table(str(given.get("data", ""))):
            if given.keys() & {"target", "missing", "drop"}:
                raise BadSetting("--target, --missing and --drop are for tables: pass --data FILE.csv.")
            return given
        if "target" not in given:
            raise BadSetting("A table needs a column to predict: pass --target NAME.")
        given = {**TABLE_SETTINGS, **given}
        if not isinstance(sources.method_by_name(given["method"]), ChainMethod):
            given = {"lr": TABLE_LR, **given}
        if given["method"] == "laplace":
            given = {"tune": "online", "lr_schedule": "cosine", **given}
        return given

    def is_written(self, field: Field[Any]) -> bool:
        """Tell whether a setting is written.

        For a table, whose usual settings differ, all are.
        """
        return self.target is not None or super().is_written(field)

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise BadSetting(
                f"epochs must be at least 1. Got {self.epochs}. Leave it out to take the weights as they are."
            )
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise BadSetting(f"lr must be a positive number. Got {self.lr}.")
        if self.lr_schedule not in LR_SCHEDULES:
            raise BadSetting(f'lr_schedule must be one of {", ".join(LR_SCHEDULES)}. Got "{self.lr_schedule}".')
        if self.patience is not None and self.patience < 1:
            raise BadSetting(f"patience must be at least 1. Got {self.patience}.")
        if not 0 <= self.seed < 2**32:
            raise BadSetting(f"seed must be a whole number from 0 to {2**32 - 1}. Got {self.seed}.")

    def run(self) -> Fitted:
        """Fit, or go on with it; a run that is complete is read."""
        device = sources.device_by_name(self.device)
        method = sources.method_by_name(self.method)
        self._check_training(method)
        rules, loaders, content = self._data(device)
        from_the_start = start_over(self.seed, loaders.train)
        train, val = readable(loaders.train, "train"), readable(loaders.val, "val")
        text = self.model
        if rules is not None and text == AUTO:
            outputs = outputs_for(self._likelihood(), rules.outputs)
            text = f"mlp({HIDDEN}, inputs={rules.width}, classes={outputs})"
        model = sources.model_by_name(text, Path(self.weights) if self.weights else None, self.seed).to(device)
        bnn = bayesianize(
            model,
            method,
            likelihood=self._likelihood() or guessed(val),
            prior=sources.prior_by_name(self.prior) if self.prior else None,
            num_data=None if hasattr(train, "dataset") else examples_in(train),
        )
        check_fits_data(bnn, train, val, self.model, self.data)
        architecture = bnn.plain_copy().eval()
        identity = self._identity(bnn, content or described_both(train, val))
        with run_folder(self.out, identity, (NETWORK,), from_the_start, _came_to_nothing) as folder:
            self.keep()
            folder.say(repr(bnn))
            try:
                fitted = folder.stage(
                    NETWORK,
                    {},
                    lambda _: self._fit(bnn, train, val, folder),
                    save,
                    lambda path: load(path, architecture),
                )
            except BaseException:
                folder.leave_nothing(FILE)
                raise
            if rules is not None:
                write_file(Path(self.out) / RULES, rules.to_json().encode())
        return Fitted(cast("Bayesian", fitted), val, loaders.target_scale, Path(self.out))

    def _data(self, device: torch.device) -> tuple[TableRules | None, sources.Loaders, str | None]:
        """Load the data, and the rules and the content of a table."""
        if self.target is None:
            return None, sources.data_by_name(self.data, self.batch_size, self.validation, self.seed, device), None
        table = read_table(Path(self.data))
        kind = KINDS.get(parse(self.likelihood, "likelihood").name) if self.likelihood else None
        rules = TableRules.learn(table, self.target, cast("Missing", self.missing), self.drop or (), kind)
        found = rules.dataset(table, self.data)
        loaders = sources.loaders_of(found, self.batch_size, self.validation, self.seed, device)
        return rules, loaders, rules.described(table)

    def _likelihood(self) -> Likelihood | None:
        return sources.likelihood_by_name(self.likelihood) if self.likelihood else None

    @property
    def next_command(self) -> str:
        """The command that measures the network on test data.

        It names the user's own model and data again, since code that a folder names is not run.
        """
        if self.target is not None:
            return f"bayeslim evaluate {self.out} --data FILE.csv"
        own = [
            f'--{name} "{value}"'
            for name, value in (("model", self.model), ("data", self.data))
            if parse(value, name).module
        ]
        return " ".join(["bayeslim evaluate", self.out, *own])

    def _check_training(self, method: Method) -> None:
        """Refuse settings that would fail after work was done."""
        options = inspect.signature(method.fit).parameters
        without_training = "epochs" in options and options["epochs"].default is None
        if self.epochs is None and not without_training:
            raise BadSetting(f"{method.name} trains the network: say how long, such as --epochs 10.")
        if self.epochs is None and self.weights is None and not parse(self.model, "model").module:
            raise BadSetting(
                f"{method.name} needs a trained network, and {self.model} is new: pass --epochs 10 to train it first, "
                "or --weights FILE."
            )
        if self.tune is not None and "tune" not in options:
            raise BadSetting(f"tune chooses the prior of laplace, and {method.name} does not. Leave it out.")
        if self.tune not in (None, *get_args(Tune)):
            raise BadSetting(f'tune must be one of {", ".join(get_args(Tune))}. Got "{self.tune}".')
        if self.tune == "online" and self.epochs is None:
            raise BadSetting('tune="online" chooses the prior during training: pass --epochs 10, or --tune evidence.')

    def _fit(self, bnn: Bayesian, train: Any, val: Any, folder: RunFolder) -> Bayesian:
        options: dict[str, Any] = {"validate": val, "seed": self.seed}
        if self.tune is not None:
            options["tune"] = self.tune
        if self.epochs is not None:
            options["epochs"] = self.epochs
            # only the options that were given: every method has its own learning rate, and some have their own schedule
            if self.lr is not None:
                options["lr"] = self.lr
            if self.lr_schedule != "constant":
                options["lr_schedule"] = self.lr_schedule
            if self.patience is not None:
                options["patience"] = self.patience
            if self.tune != "online":  # it changes the prior, which a checkpoint does not hold
                options["checkpoint"] = folder.checkpoint(NETWORK, {})
        bnn = copy.deepcopy(bnn)
        bnn.fit(train, **options)
        return bnn.eval()

    def _identity(self, bnn: Bayesian, content: str) -> dict[str, str]:
        """List the facts that identify a run: settings, first weights, the data."""
        settings = {f.name: str(getattr(self, f.name)) for f in fields(self) if f.name not in ("out", "device")}
        return {**settings, "start": digest_of_weights(bnn.model), "content of the data": content}


@dataclass(frozen=True)
class Fitted:
    """The result of `fit`: the network, validation data with the scale of their targets, and the folder."""

    bnn: Bayesian
    val: Any
    target_scale: Any
    out: Path


def guessed(loader: Any) -> Likelihood:
    """Guess the likelihood from the first targets: classes, binary, or values."""
    _, targets = split_batch(next(iter(loader)))
    if targets.dtype == torch.bool:
        return Bernoulli()
    return Gaussian(noise="learned") if targets.is_floating_point() else Categorical()


def _came_to_nothing(out: Path) -> bool:
    """Check whether a run failed before its first epoch was complete.

    The folder of such a run is free for another run.
    """
    return (out / FILE).is_file() and not (out / NETWORK).exists() and not any(out.glob("*.checkpoint"))
