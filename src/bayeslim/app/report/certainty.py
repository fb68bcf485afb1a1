"""The inputs the posterior is most and least certain about."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeslim.app.report.figure import Figure, Table
from bayeslim.app.report.images import photograph
from bayeslim.app.report.quantities import percent
from bayeslim.app.report.scores import Batches
from bayeslim.app.report.svg import Drawing
from bayeslim.results import Prediction

IMAGES_PER_ROW = 8
_SIDE, _GAP = 50.0, 7.0


def draw_certainty(prediction: Prediction, batches: Batches) -> Figure | None:
    """Draw the most and least certain images; None if the inputs are not images.

    Args:
        prediction: of all batches together.
        batches: inputs and targets.
    """
    images = [x for x, _ in batches if isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] in (1, 3)]
    if (
        len(images) < len(batches)
        or prediction.kind != "classes"
        or prediction.probs is None
        or prediction.mean.ndim != 2
    ):
        return None
    x, y = torch.cat(images), torch.cat([targets for _, targets in batches])
    if len(x) < 2 * IMAGES_PER_ROW:
        return None
    order = prediction.entropy.argsort().tolist()
    title = "Most and least certain examples"
    rows = []
    drawing = Drawing(460, 2 * (_SIDE + 52), title, "The most and the least certain inputs, with truth and prediction.")
    for line, (name, chosen) in enumerate(
        (("most certain", order[:IMAGES_PER_ROW]), ("least certain", order[::-1][:IMAGES_PER_ROW]))
    ):
        top = line * (_SIDE + 52)
        drawing.text((4, top + 12), f"The {name}", "label")
        for column, place in enumerate(chosen):
            left = 4 + column * (_SIDE + _GAP)
            says, truth = int(prediction.classes[place]), int(y[place])
            probability = float(prediction.probs[place].max())
            drawing.image((left, top + 19), (_SIDE, _SIDE), photograph(x[place]))
            drawing.text(
                (left + _SIDE / 2, top + _SIDE + 33),
                f"{truth} → {says}",
                "right" if says == truth else "wrong",
                "middle",
            )
            rows.append(
                (
                    name, truth, says, percent(probability),
                    f"{float(prediction.aleatoric[place]):.3f}", f"{float(prediction.epistemic[place]):.3f}",
                )
            )  # fmt: skip
    caption = f"Truth → prediction, among {len(x):,} held-out inputs, ordered by the entropy of the prediction."
    headings = ("", "truth", "predicted", "probability", "noise, nats", "ignorance, nats")
    return Figure(title, caption, drawing.render(), Table.of(headings, rows))
