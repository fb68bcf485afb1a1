"""Draw the digits and letters that the reader refuses, for the documentation.

    python examples/reader/picture.py

It writes reader_light.svg and reader_dark.svg into docs/pictures.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import numpy as np
from integers import UNKNOWN, Array, Network
from matplotlib import pyplot as plt
from matplotlib.colors import LinearSegmentedColormap
from run import pixels

import bayeslim as bl

HERE = Path(__file__).parent
PICTURES = HERE.parents[1] / "docs" / "pictures"
COLUMNS = 14
THEMES = {"light": ("#1d2329", "#eef1f3"), "dark": ("#e4e8eb", "#22272c")}
"""Ink and paper of the two versions."""
Strip = tuple[str, Array, list[str]]
"""A title, images, and a caption for each."""


def strips(network: Network) -> list[Strip]:
    """Choose images at even steps of confidence: refused digits, wrong answers, refused and answered letters."""
    data = bl.data.load("mnist", part="test")
    images, labels = pixels(data.test_x), data.test_y.numpy()
    answers, digits, confidences = network.read(images)
    refused, wrong = answers == UNKNOWN, (answers != UNKNOWN) & (answers != labels)
    letters = bl.data.load("notmnist", part="test")
    others = pixels(letters.test_x)
    found, _, certainties = network.read(others)

    def spread(chosen: Array, order: Array) -> Array:
        rows = np.flatnonzero(chosen)
        rows = rows[order[rows].argsort(kind="stable")]
        return rows[np.linspace(0, len(rows) - 1, min(COLUMNS, len(rows))).astype(int)]

    first, second = spread(refused, confidences), spread(wrong, confidences)
    third, fourth = spread(found == UNKNOWN, certainties), spread(found != UNKNOWN, certainties)
    return [
        (
            f"digits it refuses: {refused.sum():,} of {len(images):,} (below each, the label)",
            images[first],
            [str(labels[row]) for row in first],
        ),
        (
            f"digits it gets wrong: {wrong.sum():,} (the label, then its answer)",
            images[second],
            [f"{labels[row]} → {digits[row]}" for row in second],
        ),
        (f"letters it refuses: {(found == UNKNOWN).sum():,} of {len(others):,}", others[third], [""] * len(third)),
        (
            f"letters it takes for digits: {(found != UNKNOWN).sum():,} (its answer)",
            others[fourth],
            [str(found[row]) for row in fourth],
        ),
    ]


def draw(found: list[Strip], ink: str, paper: str, path: Path) -> None:
    """Draw one version of the picture."""
    matplotlib.rcParams.update({"font.family": "sans-serif", "font.size": 9, "svg.hashsalt": "0"})
    shades = LinearSegmentedColormap.from_list("ink", [paper, ink])
    figure, areas = plt.subplots(len(found), COLUMNS, figsize=(8.6, 1.02 * len(found)))
    figure.subplots_adjust(left=0.01, right=0.99, top=0.93, bottom=0.05, wspace=0.12, hspace=0.75)
    figure.patch.set_alpha(0)
    for row, (title, images, captions) in zip(areas, found, strict=True):
        for area in row:
            area.set_axis_off()
        row[0].set_title(title, loc="left", fontsize=9, weight="bold", color=ink)
        for area, image, caption in zip(row, images, captions, strict=False):
            area.imshow(image, cmap=shades, vmin=0, vmax=255, interpolation="none")
            area.text(13.5, 33.5, caption, ha="center", va="center", color=ink, fontsize=8)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    found = strips(Network.load(HERE / "network.json"))
    for name, (ink, paper) in THEMES.items():
        draw(found, ink, paper, PICTURES / f"reader_{name}.svg")


if __name__ == "__main__":
    main()
