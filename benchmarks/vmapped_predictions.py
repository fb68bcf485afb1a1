"""Would `torch.func.vmap` make predictions of small linear networks faster than the loop over draws?

    python benchmarks/vmapped_predictions.py

The same draws, the same inputs and the same mean of probabilities: by `bnn.predict`'s loop, and by one vmapped call on
the stacked draws. Both take turns in one process; the table shows the median ratio of vmap to the loop, so that a
number below one is a gain. The time to draw the weights is in both.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, save
from torch import Tensor, nn
from torch.func import functional_call, vmap

import bayeslim as bl

NETWORKS: dict[str, tuple[int, ...]] = {
    "20-3": (20, 3),
    "20-64-3": (20, 64, 3),
    "13-50-1": (13, 50, 1),
    "784-100-10": (784, 100, 10),
    "784-300-100-10": (784, 300, 100, 10),
    "784-400-400-10": (784, 400, 400, 10),
}
INPUTS = (1, 16, 100, 1000)
DRAWS = (5, 32)


def network(widths: tuple[int, ...]) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def contenders(widths: tuple[int, ...], inputs: int, draws: int, device: str) -> dict[str, Callable[[], Tensor]]:
    """Make both predictions; they agree on the distribution of the draws."""
    torch.manual_seed(0)
    model = network(widths).to(device)
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=100).eval()
    x = torch.randn(inputs, widths[0], device=device)

    def loop() -> Tensor:
        return bl.predict(bnn, x, samples=draws, how="sample").mean

    def together() -> Tensor:
        with torch.no_grad():
            posterior = bnn.posterior_
            samples = [posterior.sample() for _ in range(draws)]
            stacked = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
            fixed = {name: p for name, p in model.named_parameters() if name not in stacked}
            outputs = vmap(lambda own: functional_call(model, fixed | own, (x,)))(stacked)
            return outputs.softmax(-1).mean(0)

    return {"loop": loop, "vmap": together}


def ratio(actions: dict[str, Callable[[], Tensor]], seconds: float) -> dict[str, float]:
    """Time both in turns."""
    cuda = torch.cuda.is_available()
    for action in actions.values():
        action()
    times: dict[str, list[float]] = {name: [] for name in actions}
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or len(times["vmap"]) < 5:
        for name, action in actions.items():
            began = time.perf_counter()
            action()
            if cuda:
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - began)
    pairs = list(zip(times["vmap"], times["loop"], strict=True))
    return {
        "loop_ms": 1000 * statistics.median(times["loop"]),
        "vmap_ms": 1000 * statistics.median(times["vmap"]),
        "ratio": statistics.median(a / b for a, b in pairs),
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each row")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, widths in NETWORKS.items():
        for inputs in INPUTS:
            for draws in DRAWS:
                row = ratio(contenders(widths, inputs, draws, options.device), options.seconds)
                rows.append({"network": name, "inputs": inputs, "draws": draws, **row})
                print(f"{name:16} {inputs:5} inputs {draws:3} draws   {row['ratio']:.2f}", flush=True)
    print(save("vmapped_predictions", {"rows": rows}, folder=options.results))


if __name__ == "__main__":
    main()
