"""The first layer empties during Sparse Variational Dropout.

Every weight has a Gaussian posterior with multiplicative noise under a log-uniform prior,

    q(w) = N(w | μ, α μ²)          p(w) ∝ 1 / |w|.

Where the noise exceeds the signal by far, log α > 3, a weight counts as zero. On the left, the weights of 100 hidden
units on 8 x 8 pixels that are left after each epoch; on the right, how many units still read each pixel. Pixels at the
border, which are empty in all digits, go first.

Molchanov, Ashukha & Vetrov 2017, arXiv:1701.05369 · `bl.recipes.sparse_vd`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

import bayeslim as bl
from bayeslim.app.style import Theme
from bayeslim.gallery.digits_network import HIDDEN, test_error
from bayeslim.train.fit import Epoch

LARGEST_LOG_ALPHA = 3.0
EPOCHS, EPOCHS_PER_FRAME, EPOCHS_DENSE = 45, 3, 10
LAYER = "fc1.weight"


@dataclass(frozen=True, eq=False)
class Frame:
    """The first layer after an epoch: which weights are left, and the test error of the mean network."""

    epoch: int
    mask: Tensor
    error: float


def measure() -> list[Frame]:
    """Train with Sparse Variational Dropout, and look every few epochs."""
    digits = bl.data.load("digits")
    loader = bl.data.Loader(digits.train_x, digits.train_y, batch_size=64)
    torch.manual_seed(0)
    network = bl.zoo.mlp(hidden=HIDDEN, inputs=64, depth=1)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(EPOCHS_DENSE):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
    recipe = bl.recipes.sparse_vd(epochs=EPOCHS)
    bnn = bl.bayesianize(network, likelihood=bl.likelihoods.Categorical(), **recipe)
    frames = [_frame(bnn, 0)]

    def look(epoch: Epoch) -> None:
        if epoch.number % EPOCHS_PER_FRAME == 0:
            frames.append(_frame(bnn, epoch.number))

    bnn.fit(loader, **{**recipe.fit, "lr": 5e-3}, callbacks=[look], seed=0, progress=False)
    return frames


def _frame(bnn: bl.Bayesian, epoch: int) -> Frame:
    mean, variance = bnn.posterior_.mean[LAYER], bnn.posterior_.variance[LAYER]
    log_alpha = (variance / mean.square()).log()
    return Frame(epoch, log_alpha < LARGEST_LOG_ALPHA, test_error(bnn.mean_network()))


def draw(found: list[Frame], theme: Theme) -> Figure:
    """Draw the last frame."""
    return _draw_frame(found[-1], theme)


def draw_frames(found: list[Frame], theme: Theme) -> Iterator[Figure]:
    """Draw all frames in order."""
    for frame in found:
        yield _draw_frame(frame, theme)


def _draw_frame(frame: Frame, theme: Theme) -> Figure:
    figure = Figure(figsize=(8.6, 3.4))
    left, right = figure.subplots(1, 2, width_ratios=(1.9, 1))
    figure.subplots_adjust(left=0.07, right=0.93, bottom=0.15, top=0.86, wspace=0.12)
    colours = ListedColormap([theme.paper, theme.colours[0]])
    left.imshow(frame.mask.T.numpy(), cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    share = float(frame.mask.float().mean())
    title = f"epoch {frame.epoch}: {100 * share:.0f} % of the weights left, test error {100 * frame.error:.1f} %"
    left.set(xlabel="hidden unit", ylabel="pixel", title=title)
    readers = frame.mask.sum(0).view(8, 8).numpy()
    image = right.imshow(readers, cmap="cividis", norm=PowerNorm(0.5, 0, len(frame.mask)))
    right.set(xticks=[], yticks=[], title="units that read a pixel")
    figure.colorbar(image, ax=right, fraction=0.046, pad=0.04, ticks=[0, 5, 20, 50, 100])
    for ax in (left, right):
        for spine in ax.spines.values():
            spine.set_visible(True)
    return figure
