"""Storage of tensors without their zeros.

A tensor of n elements of which k are not zero is stored in the smallest of three ways:

* dense: as it is;
* bitmap: one bit an element, and the k values: n / 8 + k · size bytes;
* gaps: the zeros before each non-zero, and the k values: about k · (1 + size) bytes, the smallest form below about one
  non-zero in eight. A gap is a byte; a byte of 255 means 255 zeros and that the gap goes on.

Everything is a flat dict of plain tensors, so that any tensor file (safetensors) can hold it. Decoding gives back every
value bit for bit; only the sign of zeros is lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from bayeslim.errors import CorruptFile

SEPARATOR = "::"
_BITMAP, _GAPS, _VALUES, _SHAPE = (f"{SEPARATOR}{part}" for part in ("bitmap", "gaps", "values", "shape"))
_ESCAPE_BYTE = 255
"""A byte of a gap that says: 255 zeros, and the gap goes on."""


def pack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Encode tensors by name; those that would not shrink keep their name and form.

    >>> packed = pack({"w": torch.eye(64)})
    >>> {key: tuple(part.shape) for key, part in packed.items()}
    {'w::shape': (2,), 'w::values': (64,), 'w::gaps': (64,)}
    >>> torch.equal(unpack(packed)["w"], torch.eye(64))
    True
    """
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if SEPARATOR in name:
            raise ValueError(f'Tensor names must not contain "{SEPARATOR}". Got "{name}".')
        packed.update(_encode(name, tensor.detach().cpu()))
    return packed


def unpack(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Decode the tensors that `pack` encoded.

    Raises:
        CorruptFile: if parts are missing or do not fit together.
    """
    names = dict.fromkeys(key.partition(SEPARATOR)[0] for key in packed)
    return {name: packed[name] if name in packed else _decode(name, packed) for name in names}


def stored_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Count the bytes of the tensors once packed."""
    return sum(part.numel() * part.element_size() for part in pack(tensors).values())


def _encode(name: str, tensor: Tensor) -> dict[str, Tensor]:
    flat = tensor.contiguous().flatten()
    if tensor.ndim == 0 or tensor.is_complex() or flat.element_size() < 2:
        return {name: tensor.contiguous()}
    kept = flat != 0
    places = kept.nonzero().flatten()
    values = {f"{name}{_SHAPE}": torch.tensor(tensor.shape), f"{name}{_VALUES}": flat[places]}
    bitmap = {**values, f"{name}{_BITMAP}": torch.from_numpy(np.packbits(kept.numpy()))}
    gaps = {**values, f"{name}{_GAPS}": _write_gaps(places)}
    return min(
        ({name: tensor.contiguous()}, bitmap, gaps),
        key=lambda form: sum(t.numel() * t.element_size() for t in form.values()),
    )


def _write_gaps(places: Tensor) -> Tensor:
    gaps = torch.diff(places, prepend=torch.tensor([-1])) - 1
    ends = (gaps // _ESCAPE_BYTE + 1).cumsum(0) - 1
    written = torch.full((int(ends[-1]) + 1 if len(ends) else 0,), _ESCAPE_BYTE, dtype=torch.uint8)
    written[ends] = (gaps % _ESCAPE_BYTE).to(torch.uint8)
    return written


def _read_gaps(written: Tensor) -> Tensor:
    zeros_before = written.long().cumsum(0)[written != _ESCAPE_BYTE]
    return zeros_before + torch.arange(len(zeros_before))


def _decode(name: str, packed: Mapping[str, Tensor]) -> Tensor:
    try:
        shape, values = packed[f"{name}{_SHAPE}"].tolist(), packed[f"{name}{_VALUES}"]
        flat = torch.zeros(int(np.prod(shape, dtype=np.int64)), dtype=values.dtype)
        if f"{name}{_BITMAP}" in packed:
            bits = np.unpackbits(packed[f"{name}{_BITMAP}"].numpy(), count=len(flat))
            places = torch.from_numpy(bits).nonzero().flatten()
        else:
            places = _read_gaps(packed[f"{name}{_GAPS}"])
        if len(places) != len(values):
            raise IndexError(f"{len(places)} places for {len(values)} values")
        flat[places] = values
        return flat.view(shape)
    except (KeyError, IndexError, RuntimeError, ValueError) as error:
        raise CorruptFile(f'The packed tensor "{name}" is damaged: {error}. Save it again.') from error
