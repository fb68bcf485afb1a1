"""Draw the picture of the README: a network before and after, with its size and its error.

    python docs/pictures/before_after.py

It trains LeNet-300-100 on the digits that ship with the package, cuts 90 % of its weights in whole units by its
posterior and by magnitude, retrains nothing, and draws the weight matrices to scale. It writes before_after_light.svg
and before_after_dark.svg beside itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import LinearSegmentedColormap
from torch import nn

import bayeslim as bl

HERE = Path(__file__).parent
SPARSITY = 0.9
LABELS = ("dense", "cut by magnitude", "cut by bayeslim")


@dataclass(frozen=True)
class Theme:
    """The colours of one version of the picture."""

    ink: str
    quiet: str
    paper: str
    weight: str
    accent: str


THEMES = {
    "light": Theme("#1d2329", "#5c6670", "#eef1f3", "#1f63b0", "#c4571b"),
    "dark": Theme("#e4e8eb", "#9aa5ae", "#22272c", "#6fb0f5", "#f0935c"),
}


def compressed(out: str) -> bl.Compressed:
    """Train the network and cut it, by its posterior and by magnitude."""
    digits = bl.data.load("digits").with_validation(0.2)
    train = bl.data.Loader(digits.train_x, digits.train_y, batch_size=64)
    val, test = (
        bl.data.Loader(x, y, batch_size=1000, shuffle=False)
        for x, y in ((digits.valid_x, digits.valid_y), (digits.test_x, digits.test_y))
    )
    torch.manual_seed(0)
    model = bl.zoo.create("lenet_300_100", inputs=64)
    return bl.compress(
        model,
        train,
        val,
        test=test,
        budget=bl.Budget(sparsity=SPARSITY, empty_layers="keep best"),
        granularity="unit",
        steps=6,
        fit={"epochs": 30, "lr": 1e-3},
        formats=(),
        out=out,
    )


def matrices(network: nn.Module) -> list[torch.Tensor]:
    """Return the absolute weights of all layers, turned so that hidden units are rows."""
    first, *rest = (m.weight.detach().abs() for m in network.modules() if isinstance(m, nn.Linear))
    return [first, *(weight.T for weight in rest)]


def draw(found: bl.Compressed, theme: Theme, path: Path) -> None:
    """Draw one version of the picture."""
    matplotlib.rcParams.update({"font.family": "sans-serif", "font.size": 9, "svg.hashsalt": "0"})
    shades = LinearSegmentedColormap.from_list("weights", [theme.paper, theme.weight])
    figure = plt.figure(figsize=(8.6, 3.3))
    figure.patch.set_alpha(0)
    area = figure.add_axes((0.01, 0.02, 0.6, 0.96))
    area.set_axis_off()
    for title, network, left in (("before", found.bnn.mean_network(), 0), ("after", found.slim, 270)):
        place = left
        for weight in matrices(network):
            rows, columns = weight.shape
            shown = (weight / weight.quantile(0.98)).clamp(max=1).numpy()
            area.imshow(shown, cmap=shades, extent=(place, place + columns, rows, 0), interpolation="nearest")
            place += columns + 12
        parameters = sum(p.numel() for p in network.parameters())
        size = found.rows["dense" if title == "before" else "bayeslim"].cost.bytes
        area.text(left, -34, f"{title}: {parameters:,} parameters", color=theme.ink, fontsize=10, weight="bold")
        area.text(left, -12, f"{size / 1000:.0f} kB, weight matrices to scale", color=theme.quiet)
    area.set_xlim(-2, 520)
    area.set_ylim(304, -52)
    bars = figure.add_axes((0.72, 0.2, 0.26, 0.62))
    names = dict(zip(("dense", "magnitude", "bayeslim"), LABELS, strict=True))
    errors = [100 * found.rows[name].scores.error for name in names]
    bars.barh(range(3), errors, color=[theme.quiet, theme.quiet, theme.accent], height=0.6)
    for place, error in enumerate(errors):
        bars.text(error + 0.02 * max(errors), place, f"{error:.1f} %", va="center", color=theme.ink)
    bars.set_yticks(range(3), [names[name] for name in names], color=theme.ink)
    bars.set_ylim(2.6, -0.6)
    bars.set_xlim(0, 1.25 * max(errors))
    bars.set_title("test error, nothing retrained", loc="left", fontsize=10, weight="bold", color=theme.ink)
    bars.set_xticks([])
    bars.patch.set_alpha(0)
    for side in bars.spines.values():
        side.set_visible(False)
    bars.tick_params(length=0)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Compress once, and draw both versions."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        found = compressed(folder)
    print(found)
    for name, theme in THEMES.items():
        draw(found, theme, HERE / f"before_after_{name}.svg")


if __name__ == "__main__":
    main()
