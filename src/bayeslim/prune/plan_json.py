"""Plans as JSON: masks as bits, eight a byte, deflated, in base 64.

Reading checks everything before it allocates: every field has its type, a mask has exactly the bits of its shape, and
the masks together are bounded by the length of the text, or have the shapes of a given network's parameters.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from dataclasses import asdict
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from bayeslim.errors import CorruptFile
from bayeslim.posteriors.conjugate import Solve

if TYPE_CHECKING:
    from bayeslim.prune.cuts import Cuts

FORMAT = "bayeslim plan"
VERSION = 2
MAX_BYTES_PER_DEFLATED_BYTE = 1032
MAX_DIMENSIONS = 16
MAX_WEIGHTS_PER_CHARACTER = 64
MAX_WEIGHTS_OF_ANY_PLAN = 1 << 26
"""Masks of this many weights are read without a network, however short their text is."""


def dumps(plan: Cuts) -> str:
    """Write a plan as JSON."""
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "criterion": plan.criterion,
            "granularity": plan.granularity,
            "budget": plan.budget,
            "thresholds": {name: float(value) for name, value in plan.thresholds.items() if math.isfinite(value)},
            "left": dict(plan.left),
            "masks": {name: _encoded(mask) for name, mask in plan.masks.items()},
            "unread": {name: _encoded(mask) for name, mask in plan.unread.items()},
            "notes": list(plan.notes),
            "solves": {name: asdict(solve) for name, solve in plan.solves.items()},
        },
        allow_nan=False,
    )


def loads(text: str, model: nn.Module | None = None) -> dict[str, Any]:
    """Read the fields of a plan from the text of `dumps`; a network bounds the memory.

    Raises:
        CorruptFile: if the text is no plan.
    """
    try:
        fields = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptFile(f"A plan must be JSON as written by Plan.to_json. {error}.") from None
    expected = {"format", "version", "criterion", "granularity", "budget", "thresholds", "left", "masks", "unread"}
    expected |= {"notes", "solves"}
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise CorruptFile(f'This JSON is no plan: "format" must be "{FORMAT}". Write plans with Plan.to_json.')
    if fields.get("version") != VERSION:
        raise CorruptFile(f"The plan has version {fields.get('version')!r}; this bayeslim reads version {VERSION}.")
    if set(fields) != expected:
        raise CorruptFile(f"A plan has the fields {sorted(expected)}. Got {sorted(fields)}.")
    for name in ("criterion", "granularity", "budget"):
        _require(isinstance(fields[name], str), f'"{name}" must be text')
    for name in ("thresholds", "left", "masks", "unread", "solves"):
        _require(isinstance(fields[name], dict), f'"{name}" must be an object')
    _require(all(isinstance(why, str) for why in fields["left"].values()), "reasons must be text")
    _require(all(_is_number(t) for t in fields["thresholds"].values()), "thresholds must be finite numbers")
    notes = fields["notes"]
    _require(isinstance(notes, list) and all(isinstance(note, str) for note in notes), "notes must be a list of text")
    solves = {name: _solve(name, entry) for name, entry in fields["solves"].items()}
    _check_size(fields, text, model)
    masks, unread = (
        {name: _decoded(name, entry) for name, entry in fields[part].items()} for part in ("masks", "unread")
    )
    for name, gone in unread.items():
        among = name in masks and masks[name].shape == gone.shape and not bool((masks[name] & gone).any())
        _require(among, f'the unread weights of "{name}" are not among those that are cut')
    own = {name: fields[name] for name in ("criterion", "granularity", "budget", "thresholds", "left")}
    return own | {"masks": masks, "unread": unread, "notes": tuple(notes), "solves": solves}


def _encoded(mask: Tensor) -> dict[str, Any]:
    bits = np.packbits(mask.contiguous().numpy().reshape(-1)).tobytes()
    return {"shape": list(mask.shape), "kept": base64.b64encode(zlib.compress(bits, 9)).decode("ascii")}


def _check_size(fields: dict[str, Any], text: str, model: nn.Module | None) -> None:
    """Refuse masks that would take far more memory than the text or the network."""
    shapes = [(name, _shape(name, entry)) for part in ("masks", "unread") for name, entry in fields[part].items()]
    if model is not None:
        own = {name: list(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        for name, shape in shapes:
            _require(own.get(name) == shape, f'"{name}" has no mask of shape {shape} in {type(model).__name__}')
        return
    weights = sum(math.prod(shape) for _, shape in shapes)
    if weights > max(MAX_WEIGHTS_OF_ANY_PLAN, MAX_WEIGHTS_PER_CHARACTER * len(text)):
        raise CorruptFile(
            f"The plan has masks of {weights:,} weights in a text of {len(text):,} characters. Pass the network that "
            "it is for, so that the sizes can be checked first: Plan.from_json(text, model=network)."
        )


def _shape(name: str, entry: Any) -> list[int]:
    _require(isinstance(entry, dict) and set(entry) == {"shape", "kept"}, f'the mask of "{name}" needs shape and kept')
    shape = entry["shape"]
    whole = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape) and len(shape) <= MAX_DIMENSIONS
    fits = whole and isinstance(entry["kept"], str)
    _require(fits, f'the mask of "{name}" must have a shape of whole numbers and bits as text')
    return list(shape)


def _decoded(name: str, entry: Any) -> Tensor:
    shape, text = _shape(name, entry), entry["kept"]
    count = math.prod(shape)
    size = -(-count // 8)
    reader = zlib.decompressobj()
    try:
        packed = base64.b64decode(text, validate=True)
        fits = size <= MAX_BYTES_PER_DEFLATED_BYTE * len(packed)
        bits = reader.decompress(packed, size + 1) if fits else b""
    except (ValueError, zlib.error) as error:
        raise CorruptFile(f'The plan is damaged: the mask of "{name}" cannot be read ({error}).') from None
    exact = len(bits) == size and reader.eof and not reader.unused_data
    _require(exact, f'the mask of "{name}" does not have the bits of its shape {shape}')
    flat = np.unpackbits(np.frombuffer(bits, dtype=np.uint8))
    _require(not flat[count:].any(), f'the mask of "{name}" has bits beyond its shape {shape}')
    return torch.from_numpy(flat[:count].astype(bool)).reshape(shape)


def _solve(name: str, entry: Any) -> Solve:
    _require(isinstance(entry, dict) and set(entry) == {f.name for f in fields_of(Solve)}, f'the solve of "{name}"')
    fits = entry["how"] in ("joint", "row") and type(entry["iterations"]) is int and _is_number(entry["residual"])
    fits = fits and type(entry["converged"]) is bool
    _require(fits, f'the solve of "{name}" needs "joint" or "row", a number of iterations and a residual')
    return Solve(**entry)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise CorruptFile(f"The plan is damaged: {what}.")
