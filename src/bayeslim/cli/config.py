"""The settings of a compression, from flags and from a TOML file: the same names, the same meaning; flags win.

    model = "lenet5"
    data = "mnist"
    sparsity = 0.95
    steps = 10

A run's settings are kept in its folder, so that it can be taken up again.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from bayeslim.cli import sources
from bayeslim.cli.calls import BadSetting
from bayeslim.compress import Compressed, compress
from bayeslim.errors import BayeslimError, closest
from bayeslim.export.files import write_file
from bayeslim.prune import Budget
from bayeslim.prune.budget import COUNTED, MEASURED

FILE = "run.toml"


@dataclass(frozen=True)
class Settings:
    """All settings of `bayeslim compress`; the flags' help says what they mean."""

    model: str
    data: str
    out: str = "run"
    weights: str | None = None
    method: str = "laplace"
    prior: str | None = None
    likelihood: str | None = None
    epochs: int | None = None
    lr: float = 1e-3
    sparsity: float | None = None
    parameters: int | None = None
    flops: float | None = None
    bytes: float | None = None
    threshold: float | None = None
    latency: float | None = None
    max_error_increase: float | None = None
    evidence: bool = False
    scope: str = "global"
    protect: list[str] | None = None
    keep_best: bool = False
    granularity: str = "weight"
    criterion: str = "auto"
    steps: int = 10
    fine_tune: int = 0
    formats: list[str] | None = None
    baseline: bool = True
    batch_size: int = 128
    validation: float = 0.1
    seed: int = 0

    @classmethod
    def read(cls, file: Path | None, flags: Mapping[str, Any]) -> Settings:
        """Settings from a file and flags.

        Args:
            file: a TOML file.
            flags: by name; those that are None were not given.
        """
        given = _from_toml(file) if file is not None else {}
        given |= {name: value for name, value in flags.items() if value is not None}
        missing = [name for name in ("model", "data") if name not in given]
        if missing:
            raise BadSetting(
                f"compress needs a {' and '.join(missing)}: pass {' '.join(f'--{name} NAME' for name in missing)}, or "
                "a --config file with them."
            )
        hints = get_type_hints(cls)
        return cls(**{name: _checked(name, value, hints[name]) for name, value in given.items()})

    @property
    def budget(self) -> Budget | None:
        """How much to cut; None for an N:M pattern without a goal."""
        return budget(vars(self), is_pattern=":" in self.granularity)

    def run(self) -> Compressed:
        """Do it."""
        goal = self.budget
        loaders = sources.data_by_name(self.data, self.batch_size, self.validation, self.seed)
        model = sources.model_by_name(self.model, Path(self.weights) if self.weights else None, self.seed)
        training = {"epochs": self.epochs, "lr": self.lr}
        return compress(
            model,
            loaders.train,
            loaders.val,
            budget=goal,
            out=self.out,
            method=sources.method_by_name(self.method),
            likelihood=sources.likelihood_by_name(self.likelihood) if self.likelihood else None,
            prior=sources.prior_by_name(self.prior) if self.prior else None,
            fit=training if self.epochs else None,
            granularity=self.granularity,
            criterion=self.criterion,
            steps=self.steps,
            fine_tune={"epochs": self.fine_tune, "lr": self.lr} if self.fine_tune else None,
            test=loaders.test,
            formats=self.formats,
            baseline=self.baseline,
            seed=self.seed,
        )

    def keep(self) -> None:
        """Write the settings into the run's folder."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        # a TOML string, number, flag or list of strings is written as in JSON
        text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in changed.items() if value is not None)
        write_file(Path(self.out) / FILE, text.encode())


def budget(given: Mapping[str, Any], is_pattern: bool = False) -> Budget | None:
    """The budget in some flags.

    Args:
        given: goals, scope, protect and keep_best by name.
        is_pattern: whether no goal at all is fine.
    """
    goals: dict[str, Any] = {
        goal: given.get(goal) for goal in (*COUNTED, *MEASURED) if given.get(goal) not in (None, False)
    }
    if not goals and is_pattern:
        return None
    if len(goals) != 1:
        flags = ", ".join(f"--{goal.replace('_', '-')}" for goal in (*COUNTED, *MEASURED))
        raise BadSetting(f"Say how much to cut with exactly one of {flags}. Got {', '.join(goals) or 'none'}.")
    rest: dict[str, Any] = {
        "scope": given.get("scope") or "global",
        "protect": given.get("protect") or (),
        "empty_layers": "keep best" if given.get("keep_best") else "refuse",
    }
    try:
        return Budget(**goals, **rest)
    except (TypeError, ValueError) as error:
        raise BadSetting(str(error)) from error


def _from_toml(file: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BayeslimError(f"Could not read {file}: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSetting(f"{file} is not valid TOML: {error}.") from error
    settings = {name.replace("-", "_"): value for name, value in found.items()}
    known = [f.name for f in fields(Settings)]
    for name in settings:
        if name not in known:
            hint = closest(name, known)
            raise BadSetting(
                f'{file} sets "{name}", which is no setting.{f" Closest: {hint}." if hint else ""} '
                f"There are: {', '.join(known)}."
            )
    return settings


def _checked(name: str, value: Any, hint: Any) -> Any:
    """A setting once its type is right; whole numbers do for real ones."""
    kinds = [kind for kind in (get_args(hint) if isinstance(hint, UnionType) else (hint,)) if kind is not type(None)]
    kind = kinds[0]
    if kind == list[str]:
        fits = isinstance(value, list) and all(isinstance(part, str) for part in value)
    elif kind is float:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    else:
        fits = type(value) is kind
    if not fits:
        shown = (
            "a list of text"
            if kind == list[str]
            else {"str": "text", "bool": "true or false"}.get(kind.__name__, "a number")
        )
        raise BadSetting(f'"{name}" must be {shown}. Got {value!r}.')
    return value
