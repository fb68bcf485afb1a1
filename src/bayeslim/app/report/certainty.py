"""The inputs the posterior is most and least certain about."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeslim.app.report.figure import Figure, Table
from bayeslim.app.report.images import bitmap, photograph
from bayeslim.app.report.quantities import percent
from bayeslim.app.report.scores import Batches
from bayeslim.results import Prediction

IMAGES_PER_ROW = 8


def draw_certainty(prediction: Prediction, batches: Batches, ignored: int | None = None) -> Figure | None:
    """Draw the most and least certain images; None if the inputs are not images.

    Images whose target is the class `ignored` are left out.
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
    order = [place for place in prediction.entropy.argsort().tolist() if int(y[place]) != ignored]
    if len(order) < 2 * IMAGES_PER_ROW:
        return None
    title = "Most and least certain examples"
    rows, parts = [], []
    for name, chosen in (("most certain", order[:IMAGES_PER_ROW]), ("least certain", order[::-1][:IMAGES_PER_ROW])):
        shown = []
        for place in chosen:
            says, truth = int(prediction.classes[place]), int(y[place])
            probability = float(prediction.probs[place].max())
            words = f"{name}: the truth is {truth}, the prediction {says} with {percent(probability, 0)}"
            verdict = "right" if says == truth else "wrong"
            shown.append(bitmap(photograph(x[place]), words, f"{truth} → {says}, {percent(probability, 0)}", verdict))
            rows.append(
                (
                    name, truth, says, percent(probability),
                    f"{float(prediction.aleatoric[place]):.3f}", f"{float(prediction.epistemic[place]):.3f}",
                )
            )  # fmt: skip
        parts.append(f'<p class="row">The {name}</p><div class="examples">{"".join(shown)}</div>')
    caption = (
        f"Truth → prediction and its probability, among {len(order):,} held-out inputs, ordered by the entropy of the "
        "prediction. Wrong ones are in bold."
    )
    headings = ("", "truth", "predicted", "probability", "noise, nats", "ignorance, nats")
    return Figure(title, caption, "".join(parts), Table.of(headings, rows))
