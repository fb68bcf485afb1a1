"""`encode` and `decode`: a network as one small file, entropy-coded, and back to the bit.

The file is two bytes that say what it is, one for the version, the network as one number (`coders.py`), and a
checksum. The network is its architecture (`architecture.py`), then for each weight where its non-zeros are
(`positions.py`) and what they are (`values.py`). Probabilities of all of it start from those that the posterior gives:
of how many non-zeros a row has (`crowd.py`), where they are (`hill.py`) and their values (`expected.py`). They follow
what was coded (`evidence.py`, `adaptive.py`). All models count in integers, so that every machine reads what another
wrote; nothing is pickled.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bayeslim.bayesian import Bayesian
from bayeslim.coding.architecture import read_architecture, tensors_of, write_architecture
from bayeslim.coding.coders import Reader, Writer
from bayeslim.coding.expected import expectations
from bayeslim.coding.network import POSITIONS, VALUES, Passage
from bayeslim.coding.order import sort_units
from bayeslim.errors import BayeslimError, CorruptFile
from bayeslim.export.files import write_file
from bayeslim.quantise import Quantised
from bayeslim.types import Inputs

__all__ = ["Encoded", "decode", "encode"]

MAGIC, VERSION = b"bs", 4
_CHECK = 4


@dataclass(frozen=True, repr=False)
class Encoded:
    """A coded file that was written.

    Attributes:
        path: where.
        bytes: its size.
        parts: bytes of the header (checksum included) and of each tensor's positions and values, by (name, part); they
            are fractions of bytes, which together are the file but for the rounding of its end.
        entries: how many numbers each tensor has, and how many of them are not zero, by name.
    """

    path: Path
    bytes: int
    parts: dict[tuple[str, str], float]
    entries: dict[str, tuple[int, int]]

    @property
    def header(self) -> float:
        """Bytes of everything that is no tensor."""
        return self.parts["", "header"]

    def total(self, part: str) -> float:
        """Bytes of all tensors' "positions" or "values"."""
        return sum(size for (_, one), size in self.parts.items() if one == part)

    def __repr__(self) -> str:
        def line(name: str, entries: int, nonzero: int, positions: float, values: float) -> str:
            return f"  {name:<{width}}  {entries:>10,}  {nonzero:>9,}  {positions:>9,.1f}  {values:>9,.1f}"

        width = max(map(len, ("header", *self.entries)))
        heading = f"  {'':<{width}}  {'entries':>10}  {'non-zero':>9}  {'positions':>9}  {'values':>9}"
        lines = [
            line(name, *counts, *(self.parts.get((name, part), 0.0) for part in (POSITIONS, VALUES)))
            for name, counts in self.entries.items()
        ]
        entries, nonzero = (sum(counts[place] for counts in self.entries.values()) for place in (0, 1))
        lines.append(line("all", entries, nonzero, self.total(POSITIONS), self.total(VALUES)))
        header = f"  {'header':<{width}}  {self.header:>43,.1f}"
        return "\n".join([f"Encoded {self.path}: {self.bytes:,} bytes", heading, *lines, header])


def encode(
    network: nn.Module | Quantised,
    path: str | os.PathLike[str],
    *,
    example: Inputs | None = None,
    raw: bool = False,
) -> Encoded:
    """Write a network as one entropy-coded file: zeros and few different values make it small.

    Args:
        network: a plain network whose values lie on grids or in tables, tensor by tensor, or what `quantise` returned.
            Compact it first, so that units which nothing reads cost nothing.
        path: the file; what was there is replaced in one step.
        example: inputs, to store the network with its hidden units in the order that takes the fewest bytes: what is
            decoded then gives the same answers with units in other places. Without, every value keeps its place.
        raw: also take tensors whose values lie on no grid, and store these as they are. Of what `quantise` returned,
            they always are: it left them (statistics of batch norms, or all that rest=None leaves).

    Returns:
        the size of the file and of its parts.

    Raises:
        ValueError: if values of a plain network lie on no grid and `raw` is false.
    """
    plain = network.network if isinstance(network, Quantised) else network
    if isinstance(plain, Bayesian) or not isinstance(plain, nn.Module):
        raise TypeError(
            f"encode takes a plain torch.nn.Module, or what quantise returned. Got {type(network).__name__}. Of a "
            "Bayesian network, encode quantise(bnn), or bnn.mean_network()."
        )
    target = Path(path)
    if target.is_dir():
        raise BayeslimError(f"{target} is a folder. Choose the path of a file.")
    if example is not None:
        plain = sort_units(plain, example)
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors_of(plain).items()}
    writer = Writer()
    write_architecture(writer, plain)
    parts = {("", "header"): writer.bits / 8 + len(MAGIC) + 1 + _CHECK}
    passage = Passage(writer, tensors, tensors, expectations(network) if isinstance(network, Quantised) else None)
    passage.run()
    if passage.raw and not raw and not isinstance(network, Quantised):
        raise ValueError(
            f"The values of {', '.join(passage.raw[:3])}{' and more' if len(passage.raw) > 3 else ''} lie on no grid. "
            "Round them first (bl.quantise), or pass raw=True to store them as they are."
        )
    content = MAGIC + bytes([VERSION]) + writer.finish()
    content += zlib.crc32(content).to_bytes(_CHECK, "big")
    write_file(target, content)
    parts |= {key: bits / 8 for key, bits in passage.bits.items()}
    entries = {name: (tensor.numel(), int((tensor != 0).sum())) for name, tensor in tensors.items()}
    return Encoded(target, len(content), parts, entries)


def decode(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Read a network that `encode` wrote; every value is as it was, to the bit (but for the sign of zeros).

    Args:
        path: the file.
        model: a network of the architecture and the sizes that were coded (its values do not matter and are not
            changed), or a Bayesian one. Not needed for networks of `bayeslim.zoo`, compacted or not.

    Raises:
        CorruptFile: if the file is truncated, damaged, foreign or of another version, or does not fit the model.
    """
    if not isinstance(model, nn.Module | None):
        raise TypeError(f"model must be a torch.nn.Module, such as was coded. Got {type(model).__name__}.")
    if isinstance(model, Bayesian):
        model = model.mean_network()
    content = _checked(Path(path))
    reader = Reader(content[len(MAGIC) + 1 : -_CHECK])
    try:
        network = read_architecture(reader, model, len(content))
        own = tensors_of(network)
        found = Passage(reader, own, None).run()
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
    content = path.read_bytes()
    if len(content) < len(MAGIC) + 1 + _CHECK or not content.startswith(MAGIC):
        raise CorruptFile(f"{path} was not written by bayeslim.encode.")
    if zlib.crc32(content[:-_CHECK]) != int.from_bytes(content[-_CHECK:], "big"):
        raise CorruptFile(f"{path} does not match its checksum: it was truncated or changed. Copy it again.")
    if content[len(MAGIC)] != VERSION:
        raise CorruptFile(
            f"{path} has version {content[len(MAGIC)]}; this bayeslim reads version {VERSION}. "
            "Use the release that wrote it."
        )
    return content
