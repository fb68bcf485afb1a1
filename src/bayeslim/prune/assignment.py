"""The assignment problem: one column for each row, so that the sum of the chosen entries is largest.

Shortest augmenting paths with dual prices, O(n³): each row in turn is given the column that raises the sum most, moving
others along a path of reduced costs where that pays (Kuhn 1955; Jonker & Volgenant 1987).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def best_assignment(gains: Tensor) -> list[int]:
    """Assign a column to every row of a square matrix.

    >>> import torch
    >>> best_assignment(torch.tensor([[4.0, 3.0], [3.0, 0.0]]))
    [1, 0]
    """
    costs: NDArray[Any] = -gains.double().cpu().numpy()
    n = len(costs)
    # Every path starts at row and column 0; the matrix starts at 1.
    row_price, column_price = np.zeros(n + 1), np.zeros(n + 1)
    row_of = np.zeros(n + 1, dtype=np.int64)
    for row in range(1, n + 1):
        row_of[0], column = row, 0
        slack, previous = np.full(n + 1, np.inf), np.zeros(n + 1, dtype=np.int64)
        visited = np.zeros(n + 1, dtype=bool)
        while row_of[column]:
            visited[column] = True
            here = row_of[column]
            reduced = costs[here - 1] - row_price[here] - column_price[1:]
            better = ~visited[1:] & (reduced < slack[1:])
            slack[1:][better], previous[1:][better] = reduced[better], column
            nearest = int(np.where(visited[1:], np.inf, slack[1:]).argmin()) + 1
            step = slack[nearest]
            row_price[row_of[visited]] += step
            column_price[visited] -= step
            slack[~visited] -= step
            column = nearest
        while column:
            row_of[column], column = row_of[previous[column]], previous[column]
    return [int(place) for place in np.argsort(row_of[1:])]
