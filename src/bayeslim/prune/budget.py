"""How much to cut: exactly one goal, and where it applies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from bayeslim.sites import Selection

COUNTED = ("sparsity", "parameters", "flops", "bytes", "threshold")
"""Goals that the network alone determines."""
MEASURED = ("latency", "max_error_increase", "evidence")
"""Goals that are searched by trying cuts."""


@dataclass(frozen=True)
class Budget:
    """How much to cut: exactly one goal, and where it applies.

    Attributes:
        sparsity: the fraction of prunable weights that is zero afterwards, weights cut before included. Protected
            weights, biases and normalisations do not count.
        parameters: how many parameters of the whole network are left, at most.
        flops: additions and multiplications of one call on the example, at most; those of weights that are zero do not
            count.
        bytes: the size of the stored network, at most, with zeros stored sparsely.
        threshold: weights (units) with a lower score are cut; it belongs to a named criterion.
        latency: seconds a call of the compacted network takes on the example, at most; measured, for units only.
        max_error_increase: as much as possible while the validation error rises at most this much: in percentage points
            for classes (0.2: from 1.3 % to 1.5 %), in per cent of the root mean squared error for values and counts.
        evidence: as much as possible while the evidence of the validation data does not fall.
        scope: "global" ranks all weights together, with the saliencies of a Kronecker posterior as they grow in the
            course of a cut to a sparsity; "layer" cuts the same fraction in every layer.
        protect: selections of parameters (as in `bayeslim.sites`) that are left alone. For units: layers whose own
            units stay; they still lose the columns that read units cut before them.
        empty_layers: "keep best" leaves every layer its best weight (unit), with a note in the plan where that matters,
            and at least a quarter of the fraction that a cut leaves of the whole network; "refuse" ranks by the
            scores alone and raises where a layer would be empty.
        uniform: for units: layers of the same kind and width keep the same width, as the config of a Hugging Face model
            needs it.
        round_to: for units: every layer that is cut keeps a multiple of so many channels, such as 8, 16, 32 or 64 for
            fast kernels. A head counts with all its channels. A layer without a smaller multiple stays whole.

    >>> Budget(sparsity=0.9)
    Budget(sparsity=0.9)
    """

    sparsity: float | None = None
    parameters: int | None = None
    flops: float | None = None
    bytes: float | None = None
    threshold: float | None = None
    latency: float | None = None
    max_error_increase: float | None = None
    evidence: bool = False
    scope: Literal["global", "layer"] = "global"
    protect: Sequence[Selection] = ()
    empty_layers: Literal["keep best", "refuse"] = "keep best"
    uniform: bool = False
    round_to: int = 1

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            raise ValueError(
                f"A Budget needs exactly one of {', '.join((*COUNTED, *MEASURED))}. Got {', '.join(given) or 'none'}."
            )
        self._check_value(given[0], getattr(self, given[0]))
        if self.scope not in ("global", "layer"):
            raise ValueError(f'scope must be "global" or "layer". Got {self.scope!r}.')
        if self.scope == "layer" and self.threshold is not None:
            raise ValueError('A threshold is the same in every layer: leave scope="layer" out.')
        if self.empty_layers not in ("refuse", "keep best"):
            raise ValueError(f'empty_layers must be "refuse" or "keep best". Got {self.empty_layers!r}.')
        if not isinstance(self.uniform, bool):
            raise TypeError(f"uniform must be True or False. Got {self.uniform!r}.")
        if type(self.round_to) is not int or self.round_to < 1:
            raise ValueError(f"round_to must be a whole number of channels, at least 1. Got {self.round_to!r}.")
        if self.bundles and self.threshold is not None:
            raise ValueError("A threshold is for single units: leave uniform and round_to out.")
        if isinstance(self.protect, str) or not isinstance(self.protect, Sequence):
            raise TypeError(f"protect must be a list of selections, such as [{self.protect!r}].")
        object.__setattr__(self, "protect", tuple(self.protect))

    def _given(self) -> list[str]:
        values = {name: getattr(self, name) for name in (*COUNTED, *MEASURED)}
        return [name for name, value in values.items() if value is not None and value is not False]

    @staticmethod
    def _check_value(goal: str, value: Any) -> None:
        if goal == "evidence":
            if value is not True:
                raise TypeError(f"evidence must be True or False. Got {value!r}.")
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            raise TypeError(f"{goal} must be a number. Got {value!r}.")
        if goal == "parameters" and math.isfinite(value) and value != round(value):
            raise ValueError(f"parameters is a number of parameters, a whole number. Got {value}.")
        if goal == "sparsity" and not 0 < value < 1:
            raise ValueError(f"sparsity is the fraction that goes, between 0 and 1. Got {value}.")
        if goal == "max_error_increase" and not 0 <= value < math.inf:
            raise ValueError(f"max_error_increase must not be negative. Got {value}.")
        if goal not in ("sparsity", "threshold", "max_error_increase") and not 0 < value < math.inf:
            raise ValueError(f"{goal} must be positive and finite. Got {value}.")

    @property
    def bundles(self) -> bool:
        """Whether units are cut in bundles, because of `uniform` or `round_to`."""
        return self.uniform or self.round_to > 1

    @property
    def goal(self) -> str:
        """The name of the given goal."""
        return self._given()[0]

    @property
    def value(self) -> float:
        """The goal's value."""
        return float(getattr(self, self.goal))

    def __repr__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Budget({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"
