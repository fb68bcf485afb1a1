"""The speed of sparse networks in C, PyTorch and onnxruntime on one core.

    BAYESLIM_DATA=... python benchmarks/c_export.py

LeNet-5 with 1 % and LeNet-300-100 with 5 % of their weights are compacted and exported. The weights are cut at random,
the same share of every layer; or one by one during a short training on MNIST, which keeps far more of the first
convolution, where a weight takes the most time. Every contender computes the same inputs, one thread each; they take
turns, and the fastest and the median round are kept. "C" is a plain call from Python (`bl.load_c`), which checks its
input and makes an output; "C bound" is a prepared call (`CNetwork.bind`), which leaves ctypes and Python's loop; "C
alone" is called from a loop in C, as a program without Python calls it. "Python's share" has the differences.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from environment import save
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.export.c.library import compile_c

NETWORKS = (
    ("lenet5", 0.01, "random"),
    ("lenet_300_100", 0.05, "random"),
    ("lenet5", 0.01, "trained"),
    ("lenet_300_100", 0.05, "trained"),
)
"""Networks of the zoo, the share of weights they keep, and how these are chosen."""
BATCHES = (1, 64)
ROUNDS = 200
MIN_SECONDS_PER_ROUND = 0.001
PRUNING_STEPS = 6
"""Steps from all weights to the share that is kept."""


def pruned(name: str, kept: float, data: bl.data.Dataset, epochs: int) -> nn.Module:
    """Train a network and cut the weights of least saliency, step by step."""
    network = bl.zoo.create(name)
    masks = {n: torch.ones_like(p) for n, p in network.named_parameters() if p.ndim > 1}
    train(network, masks, data, epochs)
    for cut in range(1, PRUNING_STEPS + 1):
        share = kept ** (cut / PRUNING_STEPS)
        scores = {n: s * masks[n] for n, s in saliencies(network, data).items() if n in masks}
        every = torch.cat([score.flatten() for score in scores.values()])
        least = every.topk(round(share * len(every))).values[-1]
        masks = {n: (score >= least).float() for n, score in scores.items()}
        train(network, masks, data, epochs)
    return network.eval()


def cut_at_random(name: str, kept: float) -> nn.Module:
    """Keep the same share of the weights of every layer."""
    network = bl.zoo.create(name)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(torch.rand_like(parameter) < kept)
    return network.eval()


def train(network: nn.Module, masks: dict[str, Tensor], data: bl.data.Dataset, epochs: int) -> None:
    """Train with Adam; weights that were cut stay zero."""
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(data.train_x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(data.train_x[rows]), data.train_y[rows]).backward()
            optimizer.step()
            with torch.no_grad():
                for name, parameter in network.named_parameters():
                    if name in masks:
                        parameter.mul_(masks[name])


def saliencies(network: nn.Module, data: bl.data.Dataset) -> dict[str, Tensor]:
    """Sum squared weights times squared gradients over small batches."""
    found = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    for rows in torch.arange(1000).split(10):
        network.zero_grad()
        nn.functional.cross_entropy(network(data.train_x[rows]), data.train_y[rows]).backward()
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None
            found[name] += parameter.grad.square() + 1e-12
    return {name: found[name] * p.detach().square() for name, p in network.named_parameters()}


def in_onnxruntime(network: nn.Module, x: Tensor, folder: Path) -> Callable[[], Any]:
    """Export a network and return a call of it on one thread."""
    bl.export(network, folder / "network.onnx", example=x)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        (folder / "network.onnx").read_bytes(), options, providers=["CPUExecutionProvider"]
    )
    inputs = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, inputs)


def in_torch(network: nn.Module, x: Tensor) -> Callable[[], Any]:
    """Return a call of a network in eager PyTorch."""

    def run() -> Tensor:
        with torch.inference_mode():
            found: Tensor = network(x)
        return found

    return run


def alone(source: Path, x: Tensor, folder: Path) -> tuple[Callable[[int], Any], Any]:
    """Compile a C loop around the network; return a function of the number of calls."""
    network = bl.load_c(source)
    loop = f"""
void repeat(const float *input, float *output, size_t samples, float *work, int times)
{{
    for (int n = 0; n < times; ++n)
        {"net_run(input, output, work)" if len(x) == 1 else "net_run_batch(input, output, samples, work)"};
}}
"""
    (folder / "net.h").write_text(source.with_suffix(".h").read_text())
    (folder / "loop.c").write_text(source.read_text() + loop)
    compile_c(folder / "loop.c", folder / f"loop{len(x)}.so")
    function = ctypes.CDLL(str(folder / f"loop{len(x)}.so")).repeat
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int]
    function.restype = None
    output, work = np.empty((len(x), *network.output_shape), np.float32), np.empty(1 << 20, np.float32)
    values = x.contiguous()
    return lambda times: function(values.data_ptr(), output.ctypes.data, len(x), work.ctypes.data, times), output


def timed(calls: dict[str, Callable[[int], Any]]) -> dict[str, dict[str, float]]:
    """Time the contenders in turn; return the fastest and median µs of a call."""
    counts = {}
    for name, call in calls.items():
        count = 1
        while seconds(call, count) < MIN_SECONDS_PER_ROUND:
            count *= 2
        counts[name] = count
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            found[name].append(1e6 * seconds(call, counts[name]) / counts[name])
    return {
        name: {"fastest": round(min(times), 2), "median": round(statistics.median(times), 2)}
        for name, times in found.items()
    }


def seconds(call: Callable[[int], Any], count: int) -> float:
    start = time.perf_counter()
    call(count)
    return time.perf_counter() - start


def repeated(call: Callable[[], Any]) -> Callable[[int], Any]:
    """Make a function that calls another many times."""

    def run(count: int) -> None:
        for _ in range(count):
            call()

    return run


def measured(name: str, kept: float, which: str, data: bl.data.Dataset, epochs: int) -> list[dict[str, Any]]:
    """Cut, export and time one network at all batch sizes."""
    torch.manual_seed(0)
    sparse = pruned(name, kept, data, epochs) if which == "trained" else cut_at_random(name, kept)
    dense = bl.zoo.create(name).eval()
    example = data.test_x[:2]
    slim = bl.compact(sparse, example=example).eval()
    error = 100 * float((sparse(data.test_x).argmax(1) != data.test_y).double().mean())
    rows = []
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        source = folder / "net.c"
        exported = bl.export(slim, source, example=example)
        compile_c(source, folder / "net.so")
        for batch in BATCHES:
            x = data.test_x[:batch].contiguous()
            run, output = alone(source, x, folder)
            run(1)
            torch.testing.assert_close(torch.from_numpy(output), sparse(x).detach(), atol=1e-4, rtol=1e-4)
            network = bl.load_c(folder / "net.so")
            calls = {
                "torch dense": repeated(in_torch(dense, x)),
                "torch slim": repeated(in_torch(slim, x)),
                "onnxruntime dense": repeated(in_onnxruntime(dense, x, folder)),
                "onnxruntime slim": repeated(in_onnxruntime(slim, x, folder)),
                "C": repeated(lambda network=network, x=x: network(x)),
                "C bound": repeated(network.bind(x)),
                "C alone": run,
            }
            times = timed(calls)
            fastest = {key: value["fastest"] for key, value in times.items()}
            rows.append(
                {
                    "network": name,
                    "kept": kept,
                    "cut": which,
                    "nonzeros": {n: int((p != 0).sum()) for n, p in sparse.named_parameters() if p.ndim > 1},
                    "error": round(error, 2) if which == "trained" else None,
                    "batch": batch,
                    "microseconds": times,
                    "Python's share": {
                        "check and output": round(fastest["C"] - fastest["C bound"], 2),
                        "ctypes": round(fastest["C bound"] - fastest["C alone"], 2),
                    },
                    "speed-up over torch dense": ratios(fastest, "torch dense"),
                    "speed-up over onnxruntime dense": ratios(fastest, "onnxruntime dense"),
                    "source_bytes": exported.bytes,
                    "library_bytes": (folder / "net.so").stat().st_size,
                    "difference": exported.difference,
                }
            )
            print(json.dumps(rows[-1], indent=1), flush=True)
    return rows


def ratios(times: dict[str, float], base: str) -> dict[str, float]:
    return {name: round(times[base] / times[name], 2) for name in times if name != base}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=1, help="of training between two cuts")
    parser.add_argument("--images", type=int, default=6000, help="of training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = bl.data.load("mnist")
    some = bl.data.Dataset(
        "mnist",
        data.train_x[: options.images],
        data.train_y[: options.images],
        data.test_x,
        data.test_y,
        num_classes=10,
    )
    rows = [row for network in NETWORKS for row in measured(*network, some, options.epochs)]
    save("c_export", {"command": "python benchmarks/c_export.py", "rows": rows}, packages=["onnxruntime"])


if __name__ == "__main__":
    main()
