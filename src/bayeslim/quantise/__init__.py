"""Bits from the posterior: few levels for every weight, chosen and rounded to by how sharply it is known."""

from __future__ import annotations

from bayeslim.quantise.allocate import allocate
from bayeslim.quantise.deserved import deserved_bits
from bayeslim.quantise.grids import Codebook, Grid, Uniform
from bayeslim.quantise.quantise import quantise
from bayeslim.quantise.result import Quantised

__all__ = ["Codebook", "Grid", "Quantised", "Uniform", "allocate", "deserved_bits", "quantise"]
