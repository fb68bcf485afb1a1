"""A run's folder: what each stage made, so that a run that was stopped goes on where it was.

`run.json` says which stages are complete and with which settings. A stage's result is written whole before it is
entered there, so a run may be killed at any moment. A stage whose settings have changed is made again, and all that
follow it; a folder of another network or of other data is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bayeslim.errors import BayeslimError, CorruptFile
from bayeslim.io.files import write_file
from bayeslim.noise import kept_random_state

T = TypeVar("T")

INDEX = "run.json"
VERSION = 1


class RunFolder:
    """The folder of one run.

    Args:
        path: the folder; made if it is not there.
        identity: what makes it this run and no other, in words, by name.
        stages: the names of all stages in order.
        prepare: called before each stage that is made, so that none depends on what ran before it in this process.

    Raises:
        BayeslimError: if the folder cannot be written to, or holds another run.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        identity: Mapping[str, str],
        stages: Sequence[str],
        prepare: Callable[[], None],
    ) -> None:
        self.path, self.identity, self.stages, self.prepare = Path(path), dict(identity), tuple(stages), prepare
        self._made_one = False
        self._is_new = not self.path.exists()
        self.done: dict[str, dict[str, Any]] = {}
        if self.path.exists() and not self.path.is_dir():
            raise BayeslimError(f"{self.path} must be a folder for the run, and is a file. Choose another path.")
        if (self.path / INDEX).exists():
            self.done = self._read()
        self._write()

    def stage(
        self,
        name: str,
        settings: Mapping[str, str],
        make: Callable[[Path], T],
        save: Callable[[T, Path], None],
        load: Callable[[Path], T],
    ) -> T:
        """The result of a stage: read if it is complete, otherwise made and written.

        Args:
            name: the stage, and its folder or file inside the run's.
            settings: what it depends on beside the stages before it, in words.
            make: makes it; is given the place it will have.
            save: writes it there, whole or not at all.
            load: reads it.
        """
        place, settings = self.path / name, dict(settings)
        entry = self.done.get(name)
        if entry is not None and entry["settings"] == settings and place.exists() and not self._made_one:
            self.say(f"{self._heading(name)}: done before, in {entry['seconds']:.1f} s")
            return load(place)
        self.say(self._heading(name))
        self._made_one = True
        later = self.stages[self.stages.index(name) :]
        if any(self.done.pop(stage, None) for stage in later):
            self._write()
        started = time.monotonic()
        try:
            with kept_random_state():
                self.prepare()
                value = make(place)
            save(value, place)
        except BaseException:
            self.leave_nothing()
            raise
        self.done[name] = {"settings": settings, "seconds": round(time.monotonic() - started, 3)}
        self._write()
        for checkpoint in self.path.glob(f"{name}-*.checkpoint"):
            shutil.rmtree(checkpoint, ignore_errors=True)
        return value

    def leave_nothing(self, *also: str) -> None:
        """Take back what was written before any work, if no work came of it.

        Args:
            also: names of further such files.
        """
        made = any((self.path / stage).exists() for stage in self.stages)
        if self.done or made or any(self.path.glob("*.checkpoint")):
            return
        for name in (INDEX, *also):
            (self.path / name).unlink(missing_ok=True)
        if self._is_new and self.path.exists() and not any(self.path.iterdir()):
            self.path.rmdir()

    def checkpoint(self, name: str, settings: Mapping[str, str]) -> Path:
        """Where a stage with these settings keeps what it trained so far; gone once the stage is complete."""
        digest = hashlib.sha256(json.dumps(sorted(settings.items())).encode()).hexdigest()[:12]
        return self.path / f"{name}-{digest}.checkpoint"

    def say(self, words: str) -> None:
        """Tell a person how far it is, on stderr."""
        if os.environ.get("BAYESLIM_PROGRESS") != "0":
            print(words, file=sys.stderr, flush=True)

    def _heading(self, name: str) -> str:
        return f"[{self.stages.index(name) + 1}/{len(self.stages)}] {Path(name).stem}"

    def _read(self) -> dict[str, dict[str, Any]]:
        file = self.path / INDEX
        try:
            index = json.loads(file.read_text(encoding="utf-8"))
            if index["format"] != "bayeslim run" or index["version"] != VERSION:
                raise ValueError(f"format {index['format']!r}, version {index['version']!r}")
            identity = dict(index["identity"])
            done = {
                str(name): {"settings": dict(entry["settings"]), "seconds": float(entry["seconds"])}
                for name, entry in index["done"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptFile(f"{file} is not the index of a run ({error}). Choose another folder.") from error
        for key, value in self.identity.items():
            if identity.get(key) != value:
                raise BayeslimError(
                    f"{self.path} holds another run: its {key} was {identity.get(key)}, and is now {value}. "
                    "Choose another folder, or delete this one to start anew."
                )
        return done

    def _write(self) -> None:
        index = {"format": "bayeslim run", "version": VERSION, "identity": self.identity, "done": self.done}
        write_file(self.path / INDEX, json.dumps(index, indent=1).encode())
