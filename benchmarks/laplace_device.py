"""Time and memory of Laplace on one accelerator.

    python benchmarks/laplace_device.py --device cuda

Measured are seconds (the median of repeats after a warm-up) and peak memory of an exact Kronecker fit of 60,000 MNIST
images and of the closed-form prediction of 10,000, for both LeNets, and of a fit of ResNet-18 with batch norms on
inputs of CIFAR-10's size.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, save

import bayeslim as bl


def timed(function: Any, device: str, repeats: int) -> dict[str, Any]:
    """Measure median seconds, and the peak memory beyond that held before."""
    function()
    seconds = []
    for _ in range(repeats):
        if device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        started = time.perf_counter()
        function()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() - held if device != "cpu" else 0
    return {"seconds": round(statistics.median(seconds), 4), "all": seconds, "peak_gigabytes": round(peak / 1e9, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ["BAYESLIM_PROGRESS"] = "0"
    device, results = options.device, {}
    data = bl.data.load("mnist")
    for name in ("lenet_300_100", "lenet5"):
        torch.manual_seed(0)
        network = bl.zoo.create(name).to(device)
        train = bl.data.Loader(data.train_x, data.train_y, batch_size=6000, shuffle=False, device=device)
        test = data.test_x.to(device)
        quick = torch.optim.Adam(network.parameters(), fused=True)
        for x, y in bl.data.Loader(data.train_x, data.train_y, batch_size=256, device=device):
            quick.zero_grad()
            torch.nn.functional.cross_entropy(network(x), y).backward()
            quick.step()
        for curvature in ("exact", "signs"):
            bnn = bl.bayesianize(network, bl.Laplace(curvature=curvature), likelihood=bl.likelihoods.Categorical())
            results[f"{name} fit, {curvature}"] = timed(
                lambda bnn=bnn, train=train: bnn.fit(train, progress=False), device, options.repeats
            )
        results[f"{name} predict"] = timed(lambda bnn=bnn, test=test: bl.predict(bnn, test), device, options.repeats)
        print({k: (v["seconds"], v["peak_gigabytes"]) for k, v in results.items() if k.startswith(name)}, flush=True)
    torch.manual_seed(0)
    x, y = torch.rand(50_000, 3, 32, 32), torch.randint(0, 10, (50_000,))
    resnet = bl.zoo.create("resnet18").to(device)
    images = bl.data.Loader(x, y, batch_size=500, shuffle=False, device=device)
    bnn = bl.bayesianize(resnet, bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    started = time.perf_counter()
    bnn.fit(images, progress=False)
    results["resnet18 fit, signs, 50,000 inputs"] = {"seconds": round(time.perf_counter() - started, 2)}
    print(results["resnet18 fit, signs, 50,000 inputs"], flush=True)
    command = f"python benchmarks/laplace_device.py --device {device}"
    save("laplace_device", {"command": command, "results": results}, folder=options.results)


if __name__ == "__main__":
    main()
