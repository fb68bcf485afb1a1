"""`encode` and `decode`: a network as one small file, entropy-coded, and back to the bit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import nn

from bayeslim.bayesian import Bayesian
from bayeslim.coding.architecture import tensors_of
from bayeslim.coding.content import HEADER, content_of, network_of
from bayeslim.coding.network import POSITIONS, VALUES
from bayeslim.coding.order import sort_units
from bayeslim.errors import BayeslimError
from bayeslim.io.files import write_file
from bayeslim.types import Inputs, Params

__all__ = ["Encoded", "decode", "encode"]


@runtime_checkable
class Rounded(Protocol):
    """A network with its weights on grids, such as the result of `quantise`."""

    @property
    def network(self) -> nn.Module:
        """The plain network."""
        ...

    @property
    def codes(self) -> Params:
        """The integer codes of its parameters."""
        ...


@dataclass(frozen=True, repr=False)
class Encoded:
    """A coded file on disk.

    Attributes:
        path: of the file.
        bytes: its size.
        parts: bytes of the header (checksum included) and of each tensor's positions and values, by (name, part); they
            are fractions of bytes, and their sum is the size of the file up to the rounding of its last byte.
        entries: the entries and the non-zeros of each tensor, by name.
    """

    path: Path
    bytes: int
    parts: dict[tuple[str, str], float]
    entries: dict[str, tuple[int, int]]

    @property
    def header(self) -> float:
        """Bytes of everything but the tensors."""
        return self.parts["", HEADER]

    def total(self, part: str) -> float:
        """Sum the bytes of all tensors' "positions" or "values"."""
        return sum(size for (_, one), size in self.parts.items() if one == part)

    def __repr__(self) -> str:
        def line(name: str, entries: int, nonzero: int, positions: float, values: float) -> str:
            return f"  {name:<{width}}  {entries:>10,}  {nonzero:>9,}  {positions:>9,.1f}  {values:>9,.1f}"

        width = max(map(len, (HEADER, *self.entries)))
        heading = f"  {'':<{width}}  {'entries':>10}  {'non-zero':>9}  {'positions':>9}  {'values':>9}"
        lines = [
            line(name, *counts, *(self.parts.get((name, part), 0.0) for part in (POSITIONS, VALUES)))
            for name, counts in self.entries.items()
        ]
        entries, nonzero = (sum(counts[place] for counts in self.entries.values()) for place in (0, 1))
        lines.append(line("all", entries, nonzero, self.total(POSITIONS), self.total(VALUES)))
        header = f"  {HEADER:<{width}}  {self.header:>43,.1f}"
        return "\n".join([f"Encoded {self.path}: {self.bytes:,} bytes", heading, *lines, header])


def encode(
    network: nn.Module | Rounded,
    path: str | os.PathLike[str],
    *,
    example: Inputs | None = None,
    raw: bool = False,
) -> Encoded:
    """Write a network as one entropy-coded file.

    Zeros and few distinct values make the file small.

    Args:
        network: a plain network whose values lie on grids or in tables, tensor by tensor, or the result of `quantise`.
            Compact it first, so that units without readers cost nothing.
        path: the file; an existing one is replaced atomically.
        example: inputs on which to check that hidden units can be permuted. With them, the file holds the units in the
            order that takes the fewest bytes, and the decoded network gives the same answers with its units permuted.
            Without them, every value keeps its place.
        raw: also accept tensors whose values do not lie on a grid, and store their bits. For the result of `quantise`
            this is always so: it leaves statistics of batch norms, and with rest=None more, unrounded.

    Returns:
        the size of the file and of its parts.

    Raises:
        ValueError: if values of a plain network do not lie on a grid and `raw` is false.
    """
    is_rounded = not isinstance(network, nn.Module) and isinstance(network, Rounded)
    plain = network.network if is_rounded else network
    if isinstance(plain, Bayesian) or not isinstance(plain, nn.Module):
        raise TypeError(
            f"encode takes a plain torch.nn.Module, or the result of quantise. Got {type(network).__name__}. For a "
            "Bayesian network, encode quantise(bnn), or bnn.mean_network()."
        )
    target = Path(path)
    if target.is_dir():
        raise BayeslimError(f"{target} is a folder. Choose the path of a file.")
    if example is not None:
        plain = sort_units(plain, example)
    content = content_of(plain)
    if content.raw and not raw and not is_rounded:
        more = " and more" if len(content.raw) > 3 else ""
        raise ValueError(
            f"The values of {', '.join(content.raw[:3])}{more} lie on no grid. Round them first (bl.quantise), or pass "
            "raw=True to store them as they are."
        )
    write_file(target, content.data)
    entries = {name: (t.numel(), int((t.detach() != 0).sum())) for name, t in tensors_of(plain).items()}
    return Encoded(target, len(content.data), content.parts, entries)


def decode(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Read a network that `encode` wrote.

    Every value is restored to the bit, but for the sign of zeros.

    Args:
        path: the file.
        model: a network of the coded architecture and sizes, plain or Bayesian; its values are ignored and left
            unchanged. Not needed for networks of `bayeslim.zoo`, compacted or not.

    Raises:
        CorruptFile: if the file is truncated, damaged, foreign or of another version, or does not fit the model.
    """
    if not isinstance(model, nn.Module | None):
        raise TypeError(f"model must be a torch.nn.Module of the coded architecture. Got {type(model).__name__}.")
    if isinstance(model, Bayesian):
        model = model.mean_network()
    return network_of(Path(path), model)
