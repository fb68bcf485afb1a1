"""A reader of GGUF files: metadata and tensors, dequantised to float32 with numpy.

A GGUF file has a header, key-value pairs, the names and shapes of the tensors, and the tensors' bytes, aligned. Three
tensor types are read. A block of the quantised ones holds 32 weights:

    F32     float32 numbers
    Q8_0    a float16 scale d and 32 signed bytes q;                        w = d q
    Q4_1    float16 scale d and minimum m, and 32 codes q of 4 bits;        w = d q + m
            byte j holds the code of weight j in its low half, and that of weight j + 16 in its high half
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT_BYTES = 32
WEIGHTS_PER_BLOCK = 32
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8
BYTES_PER_BLOCK = {Q4_1: 20, Q8_0: 34}


@dataclass(frozen=True, eq=False)
class GGUF:
    """The contents of a file.

    Attributes:
        metadata: values by key.
        tensors: float32 arrays by name, outputs before inputs.
    """

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]


class _Bytes:
    """Bytes, read from the front."""

    def __init__(self, content: bytes):
        self.content, self.place = content, 0

    def number(self, kind: str) -> Any:
        value = struct.unpack_from(f"<{kind}", self.content, self.place)[0]
        self.place += struct.calcsize(f"<{kind}")
        return value

    def string(self) -> str:
        size = self.number("Q")
        self.place += size
        return self.content[self.place - size : self.place].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            element, count = self.number("I"), self.number("Q")
            return [self.value(element) for _ in range(count)]
        return self.number(NUMBERS[kind])


def read_gguf(content: bytes) -> GGUF:
    """Read the bytes of a GGUF file."""
    if content[:4] != MAGIC:
        raise ValueError(f"A GGUF file begins with {MAGIC!r}. Got {content[:4]!r}: join all its parts in order.")
    data = _Bytes(content)
    data.place = 4
    version, count, pairs = data.number("I"), data.number("Q"), data.number("Q")
    if version != 3:
        raise ValueError(f"This reader knows version 3 of GGUF. Got version {version}.")
    metadata = {}
    for _ in range(pairs):
        key = data.string()
        metadata[key] = data.value(data.number("I"))
    found = []
    for _ in range(count):
        name = data.string()
        shape = [data.number("Q") for _ in range(data.number("I"))]
        found.append((name, shape[::-1], data.number("I"), data.number("Q")))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    start = -(-data.place // alignment) * alignment
    tensors = {name: dequantised(content, start + offset, shape, kind) for name, shape, kind, offset in found}
    return GGUF(metadata, tensors)


def dequantised(content: bytes, start: int, shape: list[int], kind: int) -> np.ndarray:
    """Read one tensor as float32."""
    count = int(np.prod(shape))
    if kind == F32:
        return np.frombuffer(content, "<f4", count, start).reshape(shape).copy()
    if kind not in BYTES_PER_BLOCK:
        raise ValueError(f"This reader knows the tensor types F32, Q4_1 and Q8_0 (0, 3, 8). Got type {kind}.")
    size = BYTES_PER_BLOCK[kind]
    blocks = np.frombuffer(content, np.uint8, count // WEIGHTS_PER_BLOCK * size, start).reshape(-1, size)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if kind == Q8_0:
        return (scale * blocks[:, 2:].view(np.int8)).reshape(shape)
    minimum = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (scale * codes + minimum).reshape(shape)


def join_parts(folder: Path, name: str) -> bytes:
    """Join the files `name.0`, `name.1`, ... of a folder, or read the one file `name`."""
    whole = folder / name
    if whole.exists():
        return whole.read_bytes()
    parts = sorted(folder.glob(f"{name}.*"), key=lambda path: int(path.suffix[1:]))
    if not parts:
        raise FileNotFoundError(f"{folder} must hold {name}, or its parts {name}.0, {name}.1. Got neither.")
    return b"".join(part.read_bytes() for part in parts)
