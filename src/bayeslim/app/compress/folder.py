"""A run's folder: the results of its stages, so that a run that was stopped can go on.

`run.json` says which stages are complete and with which settings. A stage's result is written whole before it is
entered there, so a run may be killed at any moment. A stage whose settings have changed is run again, and so are all
that follow it. The same goes for those that follow a stage which another run made and this one does without. A folder
of another network or of other data is refused, and so is one that another process runs in.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from bayeslim.errors import BayeslimError, CorruptFile
from bayeslim.io.files import write_file
from bayeslim.io.lock import locked
from bayeslim.noise import kept_random_state

T = TypeVar("T")

INDEX = "run.json"
VERSION = 1


class ResultIncomplete(BayeslimError):
    """A stage's result names files that are missing or were changed: the stage has to run again."""


class RunFolder:
    """The folder of one run; `run_folder` opens it.

    Args:
        path: the folder, which exists.
        identity: the facts that make it this run and no other, in words, by name.
        stages: the names of all stages in order.
        prepare: called before each stage that runs, so that none depends on those that ran before it in this process.
        known: the names of all stages in order, also of those that this run does without; `stages` if not given.
            Results of stages that it does without are removed, and the stages after them run again.
    """

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, str],
        stages: Sequence[str],
        prepare: Callable[[], None],
        known: Sequence[str] = (),
    ) -> None:
        self.path, self.identity, self.stages, self.prepare = path, dict(identity), tuple(stages), prepare
        self._has_run_one = False
        self.done: dict[str, dict[str, Any]] = {}
        if (self.path / INDEX).exists():
            self.done = self._read()
        unwanted = [stage for stage in known if stage in self.done and stage not in self.stages]
        for stage in known[known.index(unwanted[0]) :] if unwanted else ():
            self.done.pop(stage, None)
        self._write()
        for stage in unwanted:
            shutil.rmtree(self.path / stage, ignore_errors=True)

    def stage(
        self,
        name: str,
        settings: Mapping[str, str],
        make: Callable[[Path], T],
        save: Callable[[T, Path], None],
        load: Callable[[Path], T],
    ) -> T:
        """Return the result of a stage.

        A complete result is read. Otherwise the stage runs, and its result is written.

        Args:
            name: the stage, and its folder or file inside the run's.
            settings: the settings it depends on, beside the stages before it, in words.
            make: runs it; is given the place of its result.
            save: writes the result there, whole or not at all.
            load: reads the result; raises `ResultIncomplete` if files that belong to it are missing.
        """
        place, settings = self.path / name, dict(settings)
        entry = self.done.get(name)
        if entry is not None and entry["settings"] == settings and place.exists() and not self._has_run_one:
            try:
                value = load(place)
            except ResultIncomplete as reason:
                self.say(f"{self._heading(name)}: runs again, because {reason}")
            else:
                self.say(f"{self._heading(name)}: done before, in {entry['seconds']:.1f} s")
                return value
        else:
            self.say(self._heading(name))
        self._has_run_one = True
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
        """Remove the files that were written before any stage was complete, if none is.

        Args:
            also: names of further such files.
        """
        made = any((self.path / stage).exists() for stage in self.stages)
        if self.done or made or any(self.path.glob("*.checkpoint")):
            return
        for name in (INDEX, *also):
            (self.path / name).unlink(missing_ok=True)

    def checkpoint(self, name: str, settings: Mapping[str, str]) -> Path:
        """Return the place of a stage's checkpoint with these settings.

        The checkpoint is removed once the stage is complete.
        """
        digest = hashlib.sha256(json.dumps(sorted(settings.items())).encode()).hexdigest()[:12]
        return self.path / f"{name}-{digest}.checkpoint"

    def say(self, words: str) -> None:
        """Print progress to stderr, unless BAYESLIM_PROGRESS=0."""
        if os.environ.get("BAYESLIM_PROGRESS") != "0":
            print(words, file=sys.stderr, flush=True)

    def _heading(self, name: str) -> str:
        return f"[{self.stages.index(name) + 1}/{len(self.stages)}] {Path(name).stem}"

    def _read(self) -> dict[str, dict[str, Any]]:
        identity, done = read_index(self.path)
        for key, value in self.identity.items():
            before = identity.get(key, "not noted")
            if before != value:
                raise BayeslimError(
                    f"{self.path} holds another run: its {key} was {before}, and is now {value}. "
                    "Choose another folder, or delete this one to start anew."
                )
        return done

    def _write(self) -> None:
        index = {"format": "bayeslim run", "version": VERSION, "identity": self.identity, "done": self.done}
        write_file(self.path / INDEX, json.dumps(index, indent=1).encode())


@contextmanager
def run_folder(
    path: str | os.PathLike[str],
    identity: Mapping[str, str],
    stages: Sequence[str],
    prepare: Callable[[], None],
    came_to_nothing: Callable[[Path], bool] = lambda _: False,
    known: Sequence[str] = (),
) -> Iterator[RunFolder]:
    """Open a run's folder for this process alone, with the arguments of `RunFolder`.

    A folder that was not there before is removed in the end if nothing came of the run. `came_to_nothing` says of the
    folder of another run whether it may be replaced.

    Raises:
        BayeslimError: if the folder cannot be written to, holds another run, or another process runs in it.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise BayeslimError(f"{folder} must be a folder for the run, and is a file. Choose another path.")
    is_new = not folder.exists()
    with ExitStack() as stack:
        if is_new:
            stack.callback(_remove_if_empty, folder)  # called last, without the lock's file in it
        try:
            stack.enter_context(locked(folder))
        except OSError as error:
            raise BayeslimError(
                f"Could not write to {folder}: {error.strerror or error}. "
                "Choose a folder you may write to, with space left."
            ) from error
        if came_to_nothing(folder):
            (folder / INDEX).unlink(missing_ok=True)
        yield RunFolder(folder, identity, stages, prepare, known)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # it is not empty: something came of the run
        folder.rmdir()


def read_index(folder: Path) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Read the identity of a run and its complete stages.

    Raises:
        CorruptFile: if there is no valid index.
    """
    file = folder / INDEX
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
        if index["format"] != "bayeslim run" or index["version"] != VERSION:
            raise ValueError(f"format {index['format']!r}, version {index['version']!r}")
        identity = {str(key): str(value) for key, value in index["identity"].items()}
        done = {
            str(name): {"settings": dict(entry["settings"]), "seconds": float(entry["seconds"])}
            for name, entry in index["done"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile(f"{file} is not the index of a run ({error}). Choose another folder.") from error
    return identity, done
