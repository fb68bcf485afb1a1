"""Settings from flags and from a TOML file: the same names, the same meaning; flags win.

    model = "lenet5"
    data = "mnist"
    epochs = 20

A call on the command line, `--method "variational(samples=2, kl_schedule=warmup(end=5))"`, may be a table:

    [method]
    name = "variational"
    samples = 2
    kl_schedule = { name = "warmup", end = 5 }
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Self, get_args, get_type_hints

from bayeslim.app.cli.calls import BadSetting
from bayeslim.errors import BayeslimError, closest
from bayeslim.io.files import write_file

CALLS = ("model", "data", "method", "recipe", "prior", "likelihood")
"""Settings that name something with arguments."""


@dataclass(frozen=True)
class TomlSettings:
    """The base of the settings of a command that trains: a model, data, and where the run's folder is."""

    command: ClassVar[str]
    file: ClassVar[str]
    """The name of the settings' file in the run's folder."""

    model: str
    data: str
    out: str = "run"

    @classmethod
    def read(cls, file: Path | None, flags: Mapping[str, Any]) -> Self:
        """Read settings from a file and flags; flags that are None were not given."""
        given = _from_toml(file, [f.name for f in fields(cls)]) if file is not None else {}
        given |= {name: value for name, value in flags.items() if value is not None}
        given = cls.completed(given)
        missing = [name for name in ("model", "data") if name not in given]
        if missing:
            raise BadSetting(
                f"{cls.command} needs {' and '.join(missing)}: pass "
                f"{' '.join(f'--{name} NAME' for name in missing)}, or a --config file that says so."
            )
        hints = get_type_hints(cls)
        return cls(**{name: _checked(name, value, hints[name]) for name, value in given.items()})

    @classmethod
    def completed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Add settings that follow from those given; none by default."""
        return given

    def is_written(self, field: Field[Any]) -> bool:
        """Tell whether a setting is written; by default, if it is not the usual one."""
        return bool(getattr(self, field.name) != field.default)

    def keep(self) -> None:
        """Write the settings into the run's folder."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if self.is_written(f)}
        # a TOML string, number, flag or list of strings is written as in JSON
        text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in changed.items() if value is not None)
        write_file(Path(self.out) / self.file, text.encode())


def _from_toml(file: Path, known: Iterable[str]) -> dict[str, Any]:
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BayeslimError(f"Could not read {file}: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSetting(f"{file} is not valid TOML: {error}.") from error
    settings = {name.replace("-", "_"): value for name, value in found.items()}
    for name, value in settings.items():
        if name not in known:
            hint = closest(name, known)
            raise BadSetting(
                f'{file} sets "{name}", which is not a setting.{f" Closest: {hint}." if hint else ""} '
                f"There are: {', '.join(known)}."
            )
        if name in CALLS and isinstance(value, dict):
            settings[name] = _call(name, value)
    return settings


def _call(setting: str, table: Mapping[str, Any]) -> str:
    """Convert a table to the call it stands for."""
    name = table.get("name")
    if not isinstance(name, str):
        raise BadSetting(f'The table "{setting}" needs a name, such as name = "...". Got {", ".join(table) or "none"}.')
    arguments = [
        f"{key.replace('-', '_')}={_argument(key, value)}" for key, value in table.items() if key != "name"
    ]  # fmt: skip
    return f"{name}({', '.join(arguments)})" if arguments else name


def _argument(name: str, value: Any) -> str:
    if isinstance(value, dict):
        inner = _call(name, value)
        return inner if inner.endswith(")") else f"{inner}()"
    if isinstance(value, list):
        return f"[{', '.join(_argument(name, part) for part in value)}]"
    if not isinstance(value, (str, bool, int, float)):
        raise BadSetting(f'"{name}" must be a number, text, true or false, a list or a table. Got {value}.')
    return repr(value)


def _checked(name: str, value: Any, hint: Any) -> Any:
    """Check the type of a setting; a whole number is also a real one."""
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
            else {"str": "text", "bool": "true or false", "int": "a whole number"}.get(kind.__name__, "a number")
        )
        raise BadSetting(f'"{name}" must be {shown}. Got {value!r}.')
    return value
