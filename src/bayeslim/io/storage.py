"""Folders on disk: safetensors for numbers, JSON for all else, never pickle.

A folder holds `bayeslim.json`, the index, and the tensor file that it names. The name of the tensor file carries a hash
of its content, and the file is written first; then the index replaces its predecessor in one rename. At every moment,
also when a process is killed or the power fails, the folder is as it was or complete. One process writes at a time,
under a lock; readers need none. Reading checks the version, the checksums of both files and every shape before anything
is changed, and builds registered classes only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from torch.distributions import Distribution

from bayeslim.errors import BayeslimError, CorruptFile, NotRegistered
from bayeslim.io.lock import locked
from bayeslim.io.registry import all_registered, entry_of, registered
from bayeslim.priors.torch_distributions import parameters_of
from bayeslim.types import Params

VERSION = 2
INDEX = "bayeslim.json"
_TENSOR_FILE = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
_TEMPORARY_FILE = re.compile(rf"({_TENSOR_FILE.pattern}|{re.escape(INDEX)})\.[0-9a-f]{{8}}\.tmp")
_MAX_INDEX_BYTES = 64 << 20
_MAX_READS = 100
"""How often a reader starts again because a writer has replaced the index meanwhile."""

SETTINGS = ("method", "family", "gate", "schedule", "prior", "distribution", "likelihood")
"""The kinds of registered classes that settings are made of."""


def write_folder(
    path: str | os.PathLike[str], kind: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a folder so that it is complete or untouched at every moment."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise BayeslimError(f"{folder} must be a folder to write into, and is a file. Choose another path.")
    unique, aliases = _without_copies(tensors)
    try:
        data = save_tensors(unique)
    except (SafetensorError, KeyError, ValueError) as error:
        raise BayeslimError(f"These tensors cannot be written as safetensors: {error}.") from error
    digest = hashlib.sha256(data).hexdigest()
    name = f"tensors-{digest[:16]}.safetensors"
    index = sealed(
        {
            "format": "bayeslim",
            "version": VERSION,
            "kind": kind,
            "tensors": name,
            "sha256": digest,
            "aliases": aliases,
            "config": config,
        }
    )
    text = json.dumps(index, indent=1, allow_nan=True)
    try:
        with locked(folder) as is_locked:
            replaced = _named_in(folder / INDEX)
            replace_file(folder / name, data)
            replace_file(folder / INDEX, text.encode())
            _remove_leftovers(folder, name, replaced, is_locked)
    except OSError as error:
        raise BayeslimError(
            f"Could not write to {folder}: {error.strerror or error}. The folder's old content is untouched. "
            "Choose a folder you may write to, with space left."
        ) from error


def sealed(index: Mapping[str, Any]) -> dict[str, Any]:
    """Add the checksum of everything else in an index."""
    content = {key: value for key, value in index.items() if key != "checksum"}
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise BayeslimError(f"These settings cannot be written as JSON: {error}.") from error
    return content | {"checksum": hashlib.sha256(text.encode()).hexdigest()}


def _named_in(file: Path) -> str | None:
    """Read the name of the tensor file in an index; None without a readable index."""
    try:
        name = json.loads(file.read_bytes())["tensors"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) and _TENSOR_FILE.fullmatch(name) else None


def _remove_leftovers(folder: Path, name: str, replaced: str | None, is_locked: bool) -> None:
    """Remove the replaced tensor file and, under a lock, files of killed processes.

    Without a lock, which some file systems do not have, other files may be another process's.
    """
    for old in folder.iterdir():
        ours = _TENSOR_FILE.fullmatch(old.name) or _TEMPORARY_FILE.fullmatch(old.name)
        if ours and old.name != name and (is_locked or old.name == replaced):
            old.unlink(missing_ok=True)


def read_folder(path: str | os.PathLike[str], kinds: tuple[str, ...]) -> tuple[str, dict[str, Any], Params]:
    """Read and check a folder; return its kind, config and tensors."""
    folder = Path(path)
    for _ in range(_MAX_READS):
        text = _read_index(folder)
        found = _read_once(folder, text, kinds)
        if found is not None:
            return found
        if _read_index(folder) == text:
            break
    raise CorruptFile(f"{folder} is incomplete: its tensor file is missing. Copy it again.")


def _read_index(folder: Path) -> bytes:
    file = folder / INDEX
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist.")
    if not file.is_file():
        raise CorruptFile(f"{folder} holds no {INDEX}: it was not written by bayeslim, or not completely.")
    if file.stat().st_size > _MAX_INDEX_BYTES:
        raise CorruptFile(f"{file} is larger than any that bayeslim writes.")
    return file.read_bytes()


def _read_once(folder: Path, text: bytes, kinds: tuple[str, ...]) -> tuple[str, dict[str, Any], Params] | None:
    """Read the content of an index; None once a writer has replaced its tensor file."""
    file = folder / INDEX
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{file} is not valid JSON ({type(error).__name__}): it was truncated or edited.") from error
    if not isinstance(index, dict) or index.get("format") != "bayeslim":
        raise CorruptFile(f"{file} was not written by bayeslim.")
    if index.get("version") != VERSION:
        raise CorruptFile(
            f"{file} has version {index.get('version')!r}; this bayeslim reads version {VERSION}. "
            "Use the release that wrote it, or save it again."
        )
    kind = index.get("kind")
    if kind not in kinds:
        raise CorruptFile(f"{folder} holds a {kind!r}; needed {' or '.join(kinds)}.")
    if index != sealed(index):
        raise CorruptFile(f"{file} does not match its checksum: it was damaged or edited. Copy it again.")
    name, aliases, config = index.get("tensors"), index.get("aliases"), index.get("config")
    if not isinstance(name, str) or not _TENSOR_FILE.fullmatch(name):
        raise CorruptFile(f"{file} names a tensor file that bayeslim would not write: {name!r}.")
    if not isinstance(aliases, dict) or not isinstance(config, dict):
        raise CorruptFile(f"{file} lacks its config or aliases: it was edited.")
    tensor_file = folder / name
    try:
        data = tensor_file.read_bytes()
    except FileNotFoundError:
        return None
    if hashlib.sha256(data).hexdigest() != index.get("sha256"):
        raise CorruptFile(f"{tensor_file} does not match its checksum: it was truncated or changed. Copy it again.")
    try:
        tensors = load_tensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CorruptFile(f"{tensor_file} is not a safetensors file: {error}.") from error
    for alias, original in aliases.items():
        if not isinstance(original, str) or original not in tensors:
            raise CorruptFile(f"{file} refers to a tensor that is not there: {original!r}.")
        tensors[alias] = tensors[original]
    return kind, config, tensors


def replace_file(path: Path, data: bytes) -> None:
    """Write a file under another name, then rename it.

    It is as it was or complete at every moment, also after a power failure: file and folder are flushed to the disk.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk: a rename is durable only then."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _without_copies(tensors: Mapping[str, Tensor]) -> tuple[Params, dict[str, str]]:
    """Keep one of several tensors that share storage (tied weights); list the aliases."""
    unique: Params = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise BayeslimError(
                f'"{name}" is a {type(tensor).__name__}, not a tensor, and cannot be saved without pickle. '
                "Keep such state (get_extra_state) in tensors, or outside of the module."
            )
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
        else:
            seen[key] = name
            # A copy: two views of one storage must not reach the file as one.
            unique[name] = tensor.detach().to("cpu").contiguous().clone()
    return unique, aliases


def encode(value: Any, tensors: Params) -> Any:
    """Encode settings as JSON: classes by name, tensors by reference into `tensors`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        key = f"setting:{len(tensors)}"
        tensors[key] = value
        return {"$tensor": key}
    if isinstance(value, (list, tuple)):
        return [encode(v, tensors) for v in value]
    if isinstance(value, Mapping):
        return {"$dict": [[encode(k, tensors), encode(v, tensors)] for k, v in value.items()]}
    entry = entry_of(value)
    if entry is not None and entry[0] in SETTINGS:
        return {"$type": ":".join(entry), "fields": encode(_arguments(value), tensors)}
    if isinstance(value, Distribution):
        raise BayeslimError(
            f"A torch.distributions.{type(value).__name__} cannot be saved: its parameters may not determine "
            f"it. Those that can be saved are {', '.join(all_registered('distribution'))}."
        )
    raise BayeslimError(
        f"{type(value).__name__} cannot be saved: it is not registered. Decorate the class with "
        '@bl.register and its kind, for example @bl.register("prior").'
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Build settings that `encode` wrote, from registered classes only."""
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        if value["$tensor"] not in tensors:
            raise CorruptFile(f"The settings refer to a tensor that is not there: {value['$tensor']!r}.")
        return tensors[value["$tensor"]]
    if "$dict" in value:
        return {decode(k, tensors): decode(v, tensors) for k, v in value["$dict"]}
    group, _, name = str(value.get("$type")).partition(":")
    if group not in SETTINGS:
        raise CorruptFile(f"The settings name a class that cannot be part of them: {value.get('$type')!r}.")
    try:
        # torch.compile turns the checks of distributions off for the whole process
        checked = {"validate_args": True} if group == "distribution" else {}
        return registered(group, name)(**decode(value["fields"], tensors), **checked)
    except NotRegistered as error:
        raise CorruptFile(f"The settings name a class that is not known here. {error}") from error
    except BayeslimError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise CorruptFile(f"The settings of {group} {name} are not valid: {error}.") from error


def _arguments(value: Any) -> dict[str, Any]:
    if isinstance(value, Distribution):
        return parameters_of(value)
    if is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in fields(value) if f.init}
    return dict(value.config())


def check_fits(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], what: str) -> None:
    """Raise unless two sets of tensors have the same names, shapes and dtypes."""
    missing = [n for n in wanted if n not in given]
    extra = [n for n in given if n not in wanted]
    if missing or extra:
        parts = []
        if missing:
            parts.append(f"the file lacks {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}")
        if extra:
            parts.append(f"the model lacks {', '.join(extra[:3])}{' and more' if len(extra) > 3 else ''}")
        raise CorruptFile(f"The file does not fit {what}: {'; '.join(parts)}. Was it saved from another architecture?")
    for name, tensor in wanted.items():
        if tensor.shape != given[name].shape:
            raise CorruptFile(
                f'The file does not fit {what}: "{name}" has shape {tuple(given[name].shape)} in the file and '
                f"{tuple(tensor.shape)} in the model."
            )
        if tensor.dtype != given[name].dtype:
            raise CorruptFile(
                f'The file does not fit {what}: "{name}" is {given[name].dtype} in the file and {tensor.dtype} in the '
                f"model. Call model.to({given[name].dtype}) first."
            )
