"""Entropies of known and unknown images.

The networks learn the digits 0 to 7. On test digits 0 to 7 their predictions should have little entropy; 8 and 9 they
have never seen, and should not be sure of. The entropy of the average prediction,

    H[p(y | x, D)],          p(y | x, D) = 1/S Σ_s p(y | x, w_s),

adds the disagreement of networks to the doubt of each. AUROC is the probability that an unknown image has more entropy
than a known one.

Lakshminarayanan, Pritzel & Blundell 2017, arXiv:1612.01474 · Louizos & Welling 2017, arXiv:1703.01961
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

import bayeslim as bl
from bayeslim.app.style import Theme

CLASSES = 8
EPOCHS = 15
METHODS = {
    "Plain network": None,
    "Laplace": bl.Laplace(),
    "Variational": bl.Variational(std_rate=10.0),
    "DeepEnsemble": bl.DeepEnsemble(members=5),
}


@dataclass(frozen=True, eq=False)
class Found:
    """Entropies of known and unknown images by method, and how well they tell the two apart."""

    known: dict[str, Tensor]
    unknown: dict[str, Tensor]
    auroc: dict[str, float]


def measure() -> Found:
    """Train on eight classes, and predict all ten."""
    digits = bl.data.load("digits")
    seen = digits.train_y < CLASSES
    loader = bl.data.Loader(digits.train_x[seen], digits.train_y[seen], batch_size=64)
    familiar = digits.test_y < CLASSES
    known, unknown = {}, {}
    for name, method in METHODS.items():
        torch.manual_seed(0)
        network = bl.zoo.mlp(hidden=64, inputs=64, classes=CLASSES)
        bnn = bl.bayesianize(network, method or bl.Laplace(), likelihood=bl.likelihoods.Categorical())
        epochs = 3 * EPOCHS if name == "Variational" else EPOCHS
        options = {"tune": "evidence"} if isinstance(bnn.method, bl.Laplace) else {}
        bnn.fit(loader, epochs=epochs, lr=3e-3, lr_schedule="half-then-linear", seed=0, progress=False, **options)
        how = "mean" if method is None else "auto"
        generator = torch.Generator().manual_seed(0)
        entropy = bl.predict(bnn, digits.test_x, samples=50, how=how, generator=generator).entropy
        known[name], unknown[name] = entropy[familiar], entropy[~familiar]
    return Found(known, unknown, {name: bl.metrics.auroc(known[name], unknown[name]) for name in METHODS})


def draw(found: Found, theme: Theme) -> Figure:
    """Draw two histograms for each method."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    bins = torch.linspace(0, float(torch.tensor(CLASSES).log()), 31).tolist()
    for ax, name in zip(axes.flatten(), found.known, strict=True):
        ax.hist(found.known[name], bins=bins, density=True, color="C0", alpha=0.55, label="digits 0 to 7, known")
        ax.hist(
            found.unknown[name], bins=bins, density=True, histtype="step", color="C1", linewidth=2,
            label="digits 8 and 9, unknown",
        )  # fmt: skip
        ax.set_title(f"{name}: AUROC {found.auroc[name]:.2f}")
    axes[0, 0].legend()
    for ax in axes[1]:
        ax.set_xlabel("entropy of the prediction, nats")
    for ax in axes[:, 0]:
        ax.set_ylabel("density")
    return figure
