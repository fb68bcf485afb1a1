"""Pictures of what a network is sure of."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from torch import Tensor

from bayeslim.metrics import calibration
from bayeslim.results import Prediction

COLUMNS = 8
RIGHT, WRONG, BARS = "#1b7837", "#b2182b", "#4575b4"


def certainty_picture(path: Path, images: Tensor, targets: Tensor, prediction: Prediction, order: Tensor) -> None:
    """The most and least certain images with their class probabilities, and the reliability curve, as a PNG."""
    assert prediction.probs is not None
    figure = plt.figure(figsize=(11, 7.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(2.1, 1))
    for part, title, chosen in zip(
        np.ravel(left.subfigures(2, 1)),
        ("The most certain", "The least certain"),
        (order[:COLUMNS], order.flip(0)[:COLUMNS]),
        strict=True,
    ):
        part.suptitle(title, fontsize=12, fontweight="bold")
        axes = part.subplots(2, COLUMNS, height_ratios=(1, 1))
        for column, i in enumerate(chosen.tolist()):
            says, truth = int(prediction.classes[i]), int(targets[i])
            top, bottom = axes[0, column], axes[1, column]
            top.imshow(images[i, 0], cmap="gray_r", interpolation="nearest")
            top.set_title(f"{truth} → {says}", fontsize=10, color=RIGHT if says == truth else WRONG)
            top.set_xticks([])
            top.set_yticks([])
            bottom.bar(range(prediction.probs.shape[1]), prediction.probs[i], color=BARS)
            bottom.set_ylim(0, 1)
            bottom.set_xticks([0, 5, 9])
            bottom.tick_params(labelsize=7)
            if column:
                bottom.set_yticklabels([])
        axes[1, 0].set_ylabel("probability", fontsize=8)
    curve = calibration(prediction.probs, targets)
    filled = curve.count > 0
    axis = right.subplots()
    axis.plot([0, 1], [0, 1], color="0.7", linestyle="--", label="perfect")
    axis.plot(curve.confidence[filled], curve.accuracy[filled], marker="o", color=BARS, label="this network")
    axis.set_xlabel("confidence")
    axis.set_ylabel("accuracy")
    axis.set_xlim(0, 1.02)
    axis.set_ylim(0, 1.02)
    axis.set_aspect("equal")
    axis.legend(loc="upper left", fontsize=9)
    axis.set_title(f"Reliability: calibration error {100 * curve.ece:.1f} %", fontsize=11)
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=110)
    plt.close(figure)
    temporary.replace(path)
