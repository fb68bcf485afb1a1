"""The fit of a context model: the coefficients that cost the fewest bits in one weight.

One pass over a sample of the rows gathers the features of the columns that hold non-zeros and the sums over all columns
that could have. The cost of any coefficients is then a few products of small matrices. Coordinate descent changes one
coefficient at a time until none lowers the cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bayeslim.coding.features import CONSTANT, FEATURES, ColumnFeatures
from bayeslim.coding.geometry import Integers
from bayeslim.coding.positions import COEFFICIENTS, GAMMAS, ContextModel

MAX_SAMPLED_NONZEROS = 4096
_FIRST_CONSTANT = 6
_BITS_PER_COEFFICIENT = 4.0
_MIN_SHARE = 2.0**-28
_MAX_WEIGHT_SUM = 2.0**56


@dataclass(frozen=True)
class Choices:
    """Non-zeros as choices among columns; arrays are (choices, features) unless noted.

    Attributes:
        all: features summed over the remaining columns.
        beyond: features summed over the chosen column and those after it.
        chosen: features of the chosen column.
        left: the non-zeros still to come, this one included, (choices,).
        scale: the number of non-zeros that each sampled one stands for.
    """

    all: NDArray[np.float64]
    beyond: NDArray[np.float64]
    chosen: NDArray[np.float64]
    left: NDArray[np.float64]
    scale: float

    def bits(self, model: ContextModel) -> float:
        """Estimate the cost of all columns in bits."""
        coefficients = model.coefficients.astype(float)
        all_ = self.all @ coefficients
        if all_.max(initial=0.0) > _MAX_WEIGHT_SUM:
            return math.inf
        beyond = self.beyond @ coefficients / all_
        after = np.maximum(beyond - self.chosen @ coefficients / all_, 0.0)
        rho = 1 + (self.left - 1) * (model.gamma / GAMMAS)
        shares = np.maximum(beyond**rho - after**rho, _MIN_SHARE)
        header = _BITS_PER_COEFFICIENT * sum(choice > 0 for choice in model.choices[1:])
        return float(-np.log2(shares).sum()) * self.scale + header


def gather_choices(rows: Sequence[Integers], features: ColumnFeatures) -> Choices:
    """Gather the choices of a sample of rows that are neither empty nor full."""
    size = features.grid.size
    choosing = [row for row, columns in enumerate(rows) if 0 < len(columns) < size]
    total = sum(len(rows[row]) for row in choosing)
    sampled = set(choosing[:: max(1, -(-total // MAX_SAMPLED_NONZEROS))])
    found: list[list[float]] = []
    for row, columns in enumerate(rows):
        first = 0
        for place, column in enumerate(columns.tolist() if row in sampled else ()):
            values = features.values
            beyond = values[:, column:].sum(1)
            all_ = values[:, first:column].sum(1) + beyond
            found.append([*all_, *beyond, *values[:, column], len(columns) - place])
            features.add_nonzero(column)
            first = column + 1
        if len(columns):
            features.end_row(columns)
    table = np.array(found, np.float64).reshape(len(found), 3 * FEATURES + 1)
    every, beyond, chosen, left = np.split(table, [FEATURES, 2 * FEATURES, 3 * FEATURES], axis=1)
    return Choices(every, beyond, chosen, left[:, 0], total / max(len(found), 1))


def fit_context(choices: Choices) -> ContextModel:
    """Fit the context model with the fewest bits by coordinate descent."""
    best = ContextModel((_FIRST_CONSTANT, *ContextModel().choices[1:]))
    least, before = choices.bits(best), math.inf
    used = [feature for feature in range(FEATURES) if choices.chosen[:, feature].any()]
    while least < before:
        before = least
        for feature in (*used, None):
            least, best = min(
                ((choices.bits(model), model) for model in _neighbours(best, feature)), key=lambda found: found[0]
            )
    return best


def _neighbours(model: ContextModel, feature: int | None) -> list[ContextModel]:
    """List the model and its copies with each coefficient of a feature, or each γ."""
    if feature is None:
        return [model, *(ContextModel(model.choices, gamma) for gamma in range(GAMMAS + 1))]
    before, after = model.choices[:feature], model.choices[feature + 1 :]
    possible = range(int(feature == CONSTANT), len(COEFFICIENTS))
    return [model, *(ContextModel((*before, choice, *after), model.gamma) for choice in possible)]
