"""The grid of Bayes by Backprop: 324 settings on MNIST, trained side by side on one GPU.

    python benchmarks/bayes_by_backprop_grid.py --device cuda --minutes 9       train, or go on where it stopped

    samples {1, 2, 5, 10} · π {1/4, 1/2, 3/4} · −log σ₁ {0, 1, 2} · −log σ₂ {6, 7, 8} · learning rate {1e-3, 1e-4, 1e-5}

Networks 784-400-400-10 with one number of samples and one learning rate are a stack, trained by `bl.fit_together` with
a prior of each. Its step is compiled, and captured as one CUDA graph. Adam trains μ and log σ at the same rate, with
the paper's weights of the KL, for 60 epochs (the paper: 600). 10,000 images are held out for validation. A stack is
measured and saved when it is trained; a run goes on with the stacks that are missing, and begins none that it would not
finish in its minutes.

Blundell et al. 2015, arXiv:1505.05424
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, environment, save
from torch import Tensor

import bayeslim as bl

NAME = "bayes_by_backprop_grid"
GRID: dict[str, tuple[float, ...]] = {
    "samples": (1, 2, 5, 10),
    "lr": (1e-3, 1e-4, 1e-5),
    "pi": (0.25, 0.5, 0.75),
    "minus_log_sigma1": (0, 1, 2),
    "minus_log_sigma2": (6, 7, 8),
}
EPOCHS = 60
"""A tenth of the paper's."""
BATCH = 128
HELD_OUT = 10_000
PIXEL_SCALE = 255 / 126
"""The paper divides pixels by 126."""
SPARE = 1.3
"""A stack begins if this many times its expected seconds are left."""

Setting = dict[str, float]
Parts = dict[str, tuple[Tensor, Tensor]]
"""Images and classes of "train", "validation" and "test"."""


def stacks() -> dict[str, list[Setting]]:
    """List the settings of every stack: one number of samples, one learning rate, all priors."""
    found: dict[str, list[Setting]] = {}
    for values in itertools.product(*GRID.values()):
        setting = dict(zip(GRID, values, strict=True))
        found.setdefault(f"{setting['samples']:g} samples, lr {setting['lr']:g}", []).append(setting)
    return found


def network(setting: Setting, units: int) -> bl.Bayesian:
    """Make a network of one setting; all have the same start."""
    torch.manual_seed(0)
    sigma1, sigma2 = (math.exp(-setting[f"minus_log_sigma{k}"]) for k in (1, 2))
    method = bl.Variational(
        estimator="shared", samples=int(setting["samples"]), kl_schedule=bl.schedules.Blundell(), std_rate=1.0
    )
    return bl.bayesianize(
        bl.zoo.create("mlp", hidden=units),
        method,
        likelihood=bl.likelihoods.Categorical(),
        prior=bl.priors.ScaleMixture(setting["pi"], sigma1, sigma2),
        sites="all",
    )


def data(device: str, images: int | None) -> Parts:
    """Read MNIST, scaled as in the paper, or its first images for a trial."""
    found = bl.data.load("mnist").with_validation(HELD_OUT, seed=0)
    whole = {
        "train": (found.train_x, found.train_y),
        "validation": (found.valid_x, found.valid_y),
        "test": (found.test_x, found.test_y),
    }
    return {name: (PIXEL_SCALE * x[:images].to(device), y[:images].to(device)) for name, (x, y) in whole.items()}


def scores(bnn: bl.Bayesian, x: Tensor, y: Tensor, draws: int) -> dict[str, dict[str, float]]:
    """Compute the error in per cent and the NLL of the mean network and of the average of draws."""
    found = {}
    for how, samples in (("mean", None), ("sample", draws)):
        probabilities = bl.predict(bnn, x, samples, how=how).probs.double()
        wrong = 100 * (probabilities.argmax(1) != y).double().mean()
        nll = -probabilities.gather(1, y.unsqueeze(1)).clamp_min(1e-30).log().mean()
        found[how] = {"error": round(float(wrong), 3), "nll": round(float(nll), 5)}
    return found


def trained(own: list[Setting], parts: Parts, options: argparse.Namespace) -> dict[str, Any]:
    """Train a stack, and measure every network."""
    cuda = options.device == "cuda"
    torch.compiler.reset()  # each stack is compiled anew, and no compiler counts the earlier ones
    networks = [network(setting, options.units) for setting in own]
    loader = bl.data.Loader(*parts["train"], batch_size=BATCH, drop_last=True)
    started = time.monotonic()
    bl.fit_together(
        networks, loader, epochs=options.epochs, lr=own[0]["lr"], seed=0, device=options.device, progress=False,
        compile=True if cuda and not options.no_compile else "auto",
    )  # fmt: skip
    if cuda:
        torch.cuda.synchronize()
    seconds = time.monotonic() - started
    rows = [
        {**setting, **{part: scores(bnn.eval(), *parts[part], options.draws) for part in ("validation", "test")}}
        for setting, bnn in zip(own, networks, strict=True)
    ]
    facts = environment()
    return {
        "seconds": seconds,
        "with_measurements": time.monotonic() - started,
        "commit": facts["commit"],
        "on": facts.get("gpu", "a CPU"),
        "rows": rows,
    }


def expected(name: str, wanted: dict[str, list[Setting]], done: dict[str, Any]) -> float:
    """Expect the seconds of a stack: in proportion to networks and draws, from the slowest of those that are done."""

    def work(stack: str) -> float:
        return len(wanted[stack]) * (3 + wanted[stack][0]["samples"])

    alike = [done[n]["with_measurements"] for n in done if n in wanted and work(n) == work(name)]
    others = [done[n]["with_measurements"] * work(name) / work(n) for n in done if n in wanted]
    return max(alike or others, default=0.0)


def main() -> None:
    """Train the stacks that are missing, while there is time; save after each."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--minutes", type=float, default=60, help="no stack begins that would end later")
    parser.add_argument("--draws", type=int, default=16, help="networks whose predictions are averaged")
    parser.add_argument("--only", default="", help="stacks whose name contains this, such as '10 samples'")
    parser.add_argument("--units", type=int, default=400)
    parser.add_argument("--images", type=int, help="only the first images of every part, for a trial")
    parser.add_argument("--networks", type=int, help="only the first settings of every stack, for a trial")
    parser.add_argument("--no-compile", action="store_true", help="capture the step without compiling it")
    parser.add_argument("--earlier", type=Path, default=RESULTS, help="the folder of results to go on from")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results file")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # tensor cores: the products of float32 weights are rounded to TF32
    settings = {name: getattr(options, name) for name in ("epochs", "units", "images", "networks", "draws")}
    path = options.earlier / f"{NAME}.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    done: dict[str, Any] = stored["stacks"] if stored.get("settings") == settings else {}
    wanted = {name: own[: options.networks] for name, own in stacks().items() if options.only in name}
    parts = data(options.device, options.images)
    for name in [name for name in wanted if name not in done]:
        left = 60 * options.minutes - (time.monotonic() - began)
        if left < SPARE * expected(name, wanted, done):
            print(
                f"{name}: expected to take {expected(name, wanted, done):.0f} s, and {left:.0f} s are left", flush=True
            )
            continue
        done[name] = trained(wanted[name], parts, options)
        least = min(row["validation"]["sample"]["error"] for row in done[name]["rows"])
        print(f"{name}: {done[name]['seconds']:.0f} s, validation error {least:.2f} % at best", flush=True)
        command = f"python benchmarks/{NAME}.py --device {options.device}"
        save(NAME, {"command": command, "settings": settings, "stacks": done}, folder=options.results)


if __name__ == "__main__":
    main()
