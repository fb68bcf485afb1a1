"""The nine UCI regression sets on which Bayesian neural networks are compared, with their published splits.

J. M. Hernández-Lobato, R. Adams, "Probabilistic backpropagation", 2015, split each set at random into 90 % for training
and 10 % for testing, 20 times (5 for protein), and published the indices; later work uses the same ones. They follow
from one generator with seed 1 a set, drawn from once a split, so they need no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bayeslim.app.data.formats import Array, read_npz, reading
from bayeslim.app.data.store import destination, locate
from bayeslim.errors import CorruptFile, DownloadFailed


@dataclass(frozen=True)
class RegressionSet:
    """The name and the size of a regression set.

    Attributes:
        stem: the published name.
        rows: the number of examples.
        features: the number of inputs of an example.
        splits: the number of published splits.
    """

    stem: str
    rows: int
    features: int
    splits: int = 20


UCI_SETS = {
    "boston": RegressionSet("bostonHousing", 506, 13),
    "concrete": RegressionSet("concrete", 1030, 8),
    "energy": RegressionSet("energy", 768, 8),
    "kin8nm": RegressionSet("kin8nm", 8192, 8),
    "naval": RegressionSet("naval-propulsion-plant", 11934, 16),
    "power": RegressionSet("power-plant", 9568, 4),
    "protein": RegressionSet("protein-tertiary-structure", 45730, 9, splits=5),
    "wine": RegressionSet("wine-quality-red", 1599, 11),
    "yacht": RegressionSet("yacht", 308, 6),
}


def published_split(rows: int, split: int) -> tuple[Array, Array]:
    """Compute the indices of the training and test part of a published split, from 0."""
    random = np.random.RandomState(1)  # the generator that the published splits were drawn with
    for _ in range(split + 1):
        order = random.choice(np.arange(rows), rows, replace=False)
    size = round(rows * 9 / 10)
    return order[:size], order[size:]


def read_regression(name: str, root: str | Path | None) -> tuple[Array, Array]:
    """Read features (N, D) and targets (N,), float64, in the published order."""
    spec = UCI_SETS[name]
    path = locate([f"uci/{spec.stem}.npz", f"uci/{spec.stem}/data/data.txt"], root)
    if path is None:
        folder = destination(root) / "uci"
        raise DownloadFailed(
            f"{name} was not found, and there is no checked download for it. Put the published "
            f"table with its index_features.txt and index_target.txt at {folder / spec.stem / 'data' / 'data.txt'}, or "
            f"an npz file with arrays x ({spec.rows}, {spec.features}) and y ({spec.rows},) at "
            f"{folder / spec.stem}.npz."
        )
    x, y = _read_table(path) if path.suffix == ".txt" else read_npz(path, "x", "y")
    if x.shape != (spec.rows, spec.features) or y.shape != (spec.rows,):
        raise CorruptFile(
            f"{path} must hold {spec.rows} rows of {spec.features} features and a target. "
            f"Got features of shape {x.shape} and targets of shape {y.shape}."
        )
    return x.astype(np.float64), y.astype(np.float64)


def _read_table(path: Path) -> tuple[Array, Array]:
    """Read a set in the published layout.

    It is a table of numbers, and two files with the column indices of the features and of the target.
    """
    with reading(path):
        table = np.loadtxt(path, ndmin=2)
        features, target = (
            np.loadtxt(path.with_name(f"index_{what}.txt"), ndmin=1).astype(int) for what in ("features", "target")
        )
        return table[:, features], table[:, target[0]]
