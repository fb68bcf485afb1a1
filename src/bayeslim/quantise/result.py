"""`Quantised`: a network with its weights on grids, their codes and the grids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from bayeslim.quantise.fitting import coded_bits
from bayeslim.quantise.grids import Codebook, Grid
from bayeslim.types import Params


@dataclass(frozen=True, eq=False, repr=False)
class Quantised:
    """A plain network with its weights on grids; made by `bayeslim.quantise`.

    Attributes:
        network: the network; every parameter in `codes` is `grids[name].decode(codes[name])`, exactly (in half
            precision, the nearest number to it).
        codes: integers by parameter name, of the parameters' shapes; 0 is the weight zero.
        grids: by name, `Uniform` (scale · code) or `Codebook` (values[code]).
        losses: the expected loss of log-posterior in nats, by name, for the parameters that the posterior covers.
        kept: the non-zero weights of each parameter before rounding.
    """

    network: nn.Module
    codes: Params
    grids: dict[str, Grid]
    losses: dict[str, float]
    kept: dict[str, int]

    @property
    def bits(self) -> dict[str, float]:
        """Bits per code by name; where units differ, the mean over units."""
        return {name: float(grid.bits.double().mean()) for name, grid in self.grids.items()}

    @property
    def expected_loss(self) -> float:
        """Expected loss of log-posterior by rounding, in nats: ½ δᵀ P δ.

        It is for the log-posterior of the whole training set.
        """
        return sum(self.losses.values())

    @cached_property
    def coded_bits(self) -> dict[str, float]:
        """Estimated bits of each parameter when coded, positions and grid included."""
        return {name: coded_bits(codes, self.grids[name]) for name, codes in self.codes.items()}

    @property
    def coded_bytes(self) -> float:
        """Estimated bytes of all parameters when coded, without a file's header."""
        return sum(self.coded_bits.values()) / 8

    @property
    def nonzeros(self) -> int:
        """Number of non-zero weights after rounding."""
        return sum(int(codes.count_nonzero()) for codes in self.codes.values())

    def __repr__(self) -> str:
        size = sum(codes.numel() for codes in self.codes.values())
        width = max((len(name) for name in self.codes), default=9)
        lines = [
            f"Quantised {type(self.network).__name__}: {self.nonzeros:,} of {size:,} weights left, about "
            f"{self.coded_bytes / 1024:,.4g} KiB when coded; expected loss {self.expected_loss:.4g} nats",
            f"  {'':<{width}}  {'weights':>10}  {'kept':>9}  {'left':>9}  {'bits':>5}  {'coded':>6}  {'nats':>8}",
        ]
        for name, codes in self.codes.items():
            left, loss = int(codes.count_nonzero()), self.losses.get(name)
            each = self.coded_bits[name] / max(left, 1)
            lines.append(
                f"  {name:<{width}}  {codes.numel():>10,}  {self.kept[name]:>9,}  {left:>9,}  {self.bits[name]:>5.3g}  "
                f"{each:>6.3g}  {'' if loss is None else f'{loss:.3g}':>8}"
                f"{'  codebook' if isinstance(self.grids[name], Codebook) else ''}"
            )
        return "\n".join([*lines, "  coded: bits per non-zero weight, its position included; nats: the expected loss"])
