"""The bytes of a coded file.

A file is two bytes of magic, one byte of version, the network as one number (`coders.py`), and a checksum. The network
is its architecture (`architecture.py`), then for each tensor the positions of its non-zeros (`positions.py`) and their
values (`values.py`). All models adapt their probabilities to the symbols coded so far (`adaptive.py`), in integers, so
that every machine reads the files of every other. Nothing is pickled.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bayeslim.coding.architecture import read_architecture, tensors_of, write_architecture
from bayeslim.coding.coders import Reader, Writer
from bayeslim.coding.network import NetworkCoder
from bayeslim.errors import BayeslimError, CorruptFile

MAGIC, VERSION = b"bs", 5
_CHECKSUM_BYTES = 4
HEADER = "header"


@dataclass(frozen=True)
class Content:
    """A network as bytes.

    Attributes:
        data: all bytes of the file.
        parts: bytes by (name, part), as in `Encoded`.
        raw: the tensors whose values do not lie on a grid.
    """

    data: bytes
    parts: dict[tuple[str, str], float]
    raw: list[str]


def content_of(network: nn.Module) -> Content:
    """Code a plain network."""
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors_of(network).items()}
    writer = Writer()
    write_architecture(writer, network)
    parts = {("", HEADER): writer.bits / 8 + len(MAGIC) + 1 + _CHECKSUM_BYTES}
    coder = NetworkCoder(writer, tensors, tensors)
    coder.run()
    data = MAGIC + bytes([VERSION]) + writer.finish()
    data += zlib.crc32(data).to_bytes(_CHECKSUM_BYTES, "big")
    return Content(data, parts | {key: bits / 8 for key, bits in coder.bits.items()}, coder.raw)


def network_of(path: Path, model: nn.Module | None) -> nn.Module:
    """Decode a file; see `decode`."""
    data = _checked(path)
    reader = Reader(data[len(MAGIC) + 1 : -_CHECKSUM_BYTES])
    try:
        network = read_architecture(reader, model, len(data))
        own = tensors_of(network)
        found = NetworkCoder(reader, own, None).run()
    except BayeslimError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CorruptFile(f"{path} does not hold a network: {error!r}.") from error
    with torch.no_grad():
        for name, tensor in found.items():
            own[name].copy_(tensor)
    return network


def _checked(path: Path) -> bytes:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist.")
    if path.is_dir():
        raise CorruptFile(f"{path} is a folder, not a coded file. Folders of bayeslim.save are read by bayeslim.load.")
    data = path.read_bytes()
    if len(data) < len(MAGIC) + 1 + _CHECKSUM_BYTES or not data.startswith(MAGIC):
        raise CorruptFile(f"{path} was not written by bayeslim.encode.")
    if zlib.crc32(data[:-_CHECKSUM_BYTES]) != int.from_bytes(data[-_CHECKSUM_BYTES:], "big"):
        raise CorruptFile(f"{path} does not match its checksum: it was truncated or changed. Copy it again.")
    if data[len(MAGIC)] != VERSION:
        raise CorruptFile(
            f"{path} has version {data[len(MAGIC)]}; this bayeslim reads version {VERSION}. "
            "Decode it with the release that wrote it, and encode it again with this one."
        )
    return data
