"""Readers for the files of data sets, none of which can run code: idx, npy, npz, CIFAR-10's binary records.

An idx file has two zero bytes, a type (8: unsigned bytes), the number of dimensions, each dimension as a big-endian
32-bit integer, and then the values. A CIFAR-10 record is a label and 3 x 32 x 32 pixels, a byte each, channels first.

No size that a file declares is believed: before memory is taken, it is compared with the bytes that are there, and
for compressed files with the most that the data set can have, since a few bytes may unpack to gigabytes.
"""

from __future__ import annotations

import errno
import gzip
import math
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from bayeslim.errors import CorruptFile

Array: TypeAlias = NDArray[Any]
CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32
CIFAR_RECORDS_PER_FILE = 10_000
MAX_IDX_BYTES = 60_000 * 28 * 28
"""The size of the largest idx file of any known data set, the training images of MNIST."""
MAX_NPZ_BYTES = 50_000 * 32 * 32 * 3
"""The size of the largest array in an npz file of any known data set, the training images of CIFAR-10."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error about the contents of `path` into a `CorruptFile` that names it."""
    try:
        yield
    except (
        EOFError,
        KeyError,
        NotImplementedError,  # a kind of compression that zipfile does not have
        ValueError,
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        OSError,
    ) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # about the disk, not about the contents: those seek to places that are none
        raise CorruptFile(f"{path} could not be read: {error}. Remove it, and load the data set again.") from error


def read_idx(path: Path) -> Array:
    """Read an idx file of bytes, which may be compressed (.gz), as an array."""
    with reading(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        start = file.read(4)
        if len(start) < 4 or start[:3] != b"\0\0\x08":
            raise ValueError("it does not begin like an idx file of bytes")
        shape = np.frombuffer(file.read(4 * start[3]), ">u4").tolist()
        if len(shape) != start[3]:
            raise ValueError(f"its header promises {start[3]} dimensions, and ends before them")
        count = math.prod(shape)
        if count > MAX_IDX_BYTES:
            raise ValueError(f"its header promises {shape} values, more than the {MAX_IDX_BYTES:,} of any known set")
        content = file.read(count + 1)
        if count != len(content):
            found = f"{len(content):,}" if len(content) <= count else "more"
            raise ValueError(f"its header promises {shape} values, but {found} follow")
        return np.frombuffer(content, np.uint8).reshape(shape)


def read_npz(path: Path, *names: str) -> list[Array]:
    """Read the arrays of these names in an npz file; no pickled object is ever read."""
    with reading(path), zipfile.ZipFile(path) as archive:
        arrays = []
        for name in names:
            entry = archive.getinfo(f"{name}.npy")
            with archive.open(entry) as file:
                arrays.append(read_npy(file, min(entry.file_size, MAX_NPZ_BYTES)))
        return arrays


def read_npy(file: IO[bytes], max_bytes: int) -> Array:
    """Read an array of numbers in numpy's own format from the start of an open file.

    Args:
        file: the file.
        max_bytes: the most that the array may have: the bytes that are there, for a file that is not compressed.

    Raises:
        ValueError: if it is not such an array, or its header promises more than `max_bytes`.
    """
    try:
        return _read_npy(file, max_bytes)
    except (tokenize.TokenError, SyntaxError, TypeError, OverflowError) as error:
        raise ValueError(f"its header is none of the npy format: {error}") from error


def _read_npy(file: IO[bytes], max_bytes: int) -> Array:
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"it has version {version} of the npy format, and needs 1.0 or 2.0")
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if dtype.hasobject or any(size < 0 for size in shape):
        raise ValueError(f"it holds {dtype} of shape {shape}, and needs numbers")
    if math.prod(shape) * dtype.itemsize > max_bytes:
        raise ValueError(f"its header promises {dtype} of shape {shape}, more than the {max_bytes:,} bytes it can have")
    file.seek(0)
    array: Array = npy.read_array(file, allow_pickle=False)
    return array


def read_cifar(path: Path, members: list[str]) -> tuple[Array, Array]:
    """Read CIFAR-10's images (N, 3, 32, 32) and labels (N,) from a folder or tar file."""
    with reading(path):
        if path.is_dir():
            contents = {}
            for name in members:
                if (path / name).exists():
                    _check_cifar_size(name, (path / name).stat().st_size)
                    contents[name] = (path / name).read_bytes()
        else:
            contents = {}
            with tarfile.open(path) as tar:
                for entry in tar:
                    name = Path(entry.name).name
                    if name in members and (file := tar.extractfile(entry)):
                        _check_cifar_size(name, entry.size)
                        contents[name] = file.read()
        missing = [name for name in members if name not in contents]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        records = np.frombuffer(b"".join(contents[name] for name in members), np.uint8)
        if len(records) % CIFAR_RECORD_BYTES:
            raise ValueError(f"its length is not a multiple of {CIFAR_RECORD_BYTES} bytes")
        records = records.reshape(-1, CIFAR_RECORD_BYTES)
        return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _check_cifar_size(name: str, size: int) -> None:
    if size > CIFAR_RECORDS_PER_FILE * CIFAR_RECORD_BYTES:
        raise ValueError(f"its {name} has {size:,} bytes, more than {CIFAR_RECORDS_PER_FILE:,} records take")
