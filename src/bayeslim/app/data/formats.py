"""Reading the files that data sets come in, none of which can run code: idx, npz, CIFAR-10's binary records.

An idx file has two zero bytes, a type (8: unsigned bytes), the number of dimensions, each dimension as a big-endian
32-bit integer, and then the values. A CIFAR-10 record is a label and 3 x 32 x 32 pixels, a byte each, channels first.
"""

from __future__ import annotations

import gzip
import math
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bayeslim.errors import CorruptFile

Array: TypeAlias = NDArray[Any]
CIFAR_RECORD = 1 + 3 * 32 * 32


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong with the contents of `path` into a `CorruptFile` that names it."""
    try:
        yield
    except (
        EOFError,
        KeyError,
        ValueError,
        gzip.BadGzipFile,
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise CorruptFile(f"{path} could not be read: {error}. Remove it, and load the data set again.") from error


def read_idx(path: Path) -> Array:
    """The bytes in an idx file, compressed (.gz) or not, as an array of the shape in its header."""
    with reading(path):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if len(content) < 4 or content[:3] != b"\0\0\x08":
            raise ValueError("it does not begin like an idx file of bytes")
        header = 4 + 4 * content[3]
        shape = np.frombuffer(content[4:header], ">u4").tolist()
        if len(shape) != content[3] or math.prod(shape) != len(content) - header:
            raise ValueError(f"its header promises {shape} values, but {max(len(content) - header, 0):,} follow")
        return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_npz(path: Path, *names: str) -> list[Array]:
    """The arrays of these names in an npz file; no pickled object is ever read."""
    with reading(path):
        arrays = np.load(path, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError("it is not an npz file")
        with arrays:
            return [arrays[name] for name in names]


def read_cifar(path: Path, members: list[str]) -> tuple[Array, Array]:
    """Images (N, 3, 32, 32) and labels (N,) in CIFAR-10's binary files, in their folder or in the tar file."""
    with reading(path):
        if path.is_dir():
            contents = {name: (path / name).read_bytes() for name in members if (path / name).exists()}
        else:
            contents = {}
            with tarfile.open(path) as tar:
                for entry in tar:
                    name = Path(entry.name).name
                    if name in members and (file := tar.extractfile(entry)):
                        contents[name] = file.read()
        missing = [name for name in members if name not in contents]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        records = np.frombuffer(b"".join(contents[name] for name in members), np.uint8)
        if len(records) % CIFAR_RECORD:
            raise ValueError(f"its length is not a multiple of {CIFAR_RECORD} bytes")
        records = records.reshape(-1, CIFAR_RECORD)
        return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]
