"""Cost of a prediction from S networks, in passes of the plain network.

    python benchmarks/particle_passes.py                                  on two CPU threads
    python benchmarks/particle_passes.py --device cuda --members 5 20     on a GPU
    python benchmarks/particle_passes.py --networks lenet5 --inputs 16    a part of it

The prediction is `bl.predict(bnn, x)`: averaged probabilities with their uncertainty. A pass is a call of a plain
network in evaluation mode, without gradients, on the same inputs; S passes are those of S plain networks, each with its
own weights, one after the other. It is compared with a loop written by hand (the mean of the softmax over S plain
networks) and, on a GPU or with `--compiled`, `bl.compiled`. All take turns, and the median of the rounds is kept.
Weights are random: the cost does not depend on them. The outputs of every particle are compared with those of its plain
network; the largest difference, relative to the largest output, is kept beside the cost. `before` is the cost measured
on the same machine before predictions became a plain loop, without and with uncertainty.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from environment import RESULTS, environment, save
from torch import Tensor, nn

import bayeslim as bl

ROUNDS = 7
MIN_SECONDS_PER_TURN = 0.05
VOCABULARY_SIZE = 10_000


def batch_normalised() -> nn.Module:
    """Build two convolutions with batch norms."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class WrittenMLP(nn.Module):
    """An MLP with a hand-written forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 100), nn.Linear(100, 100), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits of images."""
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


class WrittenCNN(nn.Module):
    """A convolutional network with a hand-written forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(32), nn.BatchNorm2d(64)
        self.fc1, self.fc2 = nn.Linear(4096, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits of images."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc2(F.relu(self.fc1(x.view(x.size(0), -1))))


def small() -> nn.Module:
    """Build an MLP for tabular data."""
    return nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Linear(50, 10))


class Residual(nn.Module):
    """A residual network with layer norms for tabular data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(30, 64), nn.Linear(64, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits of features."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def series() -> nn.Module:
    """Build a network of 1d convolutions for time series."""
    return nn.Sequential(
        nn.Conv1d(8, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(32, 64, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class Words(nn.Module):
    """A bag of words: the mean of embeddings, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.last = nn.Embedding(VOCABULARY_SIZE, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits of indices of words."""
        return self.last(F.relu(self.hidden(self.embedding(x).mean(1))))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small": (small, (13,)),
    "residual": (Residual, (30,)),
    "words": (Words, (40,)),
    "mlp": (bl.zoo.mlp, (1, 28, 28)),
    "written_mlp": (WrittenMLP, (1, 28, 28)),
    "series": (series, (8, 128)),
    "lenet5": (bl.zoo.lenet5, (1, 28, 28)),
    "batch_normalised": (batch_normalised, (3, 32, 32)),
    "written_cnn": (WrittenCNN, (3, 32, 32)),
    "vgg": (bl.zoo.vgg, (3, 32, 32)),
    "resnet18": (lambda: bl.zoo.resnet18(width=16), (3, 32, 32)),
    "transformer": (bl.zoo.transformer, (1, 28, 28)),
    "lstm": (bl.zoo.lstm, (1, 28, 28)),
}


def ensemble(network: nn.Module, members: int) -> bl.Bayesian:
    """Make particles around a network, as if it had been trained several times."""
    bnn = bl.bayesianize(network, bl.DeepEnsemble(members), likelihood=bl.likelihoods.Categorical())
    values = {n: torch.stack([p + 0.01 * torch.randn_like(p) for _ in range(members)]) for n, p in parts(network)[0]}
    buffers = {n: torch.stack([b.clone() for _ in range(members)]) for n, b in parts(network)[1]}
    bnn.state["posterior"] = bl.posteriors.Particles(values, buffers=buffers)
    return bnn


def parts(network: nn.Module) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """List detached parameters, and buffers."""
    return [(n, p.detach()) for n, p in network.named_parameters()], list(network.named_buffers())


def measure(name: str, inputs: int, members: int, device: str, compiled: bool) -> dict[str, Any]:
    """Time all contenders in turns, and compare outputs with the plain networks'."""
    torch.manual_seed(0)
    torch.compiler.reset()
    build, shape = NETWORKS[name]
    plain = build().to(device).eval()
    bnn, x = ensemble(copy.deepcopy(plain), members), torch.rand(inputs, *shape, device=device)
    if name == "words":
        x = (VOCABULARY_SIZE * x).long()
    networks = [alone(plain, bnn, k) for k in range(members)]

    @torch.no_grad()
    def each() -> None:
        for network in networks:
            network(x)

    @torch.no_grad()
    def loop() -> None:
        torch.stack([network(x).softmax(-1) for network in networks]).mean(0)

    actions: dict[str, Callable[[], Any]] = {"plain": each, "predict": lambda: bl.predict(bnn, x), "loop": loop}
    if compiled:
        fast = bl.compiled(bnn, x)
        actions["compiled"] = lambda: fast(x)

    def seconds(action: Callable[[], Any], times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            action()
        if x.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / times

    for action in actions.values():
        seconds(action, 3)
    turns = max(1, round(MIN_SECONDS_PER_TURN / seconds(each, 2)))
    rounds = [{key: seconds(action, turns) for key, action in actions.items()} for _ in range(ROUNDS)]

    def passes(key: str) -> float:
        return round(statistics.median(one[key] / one["plain"] for one in rounds) * members, 2)

    return {
        "network": name,
        "inputs": inputs,
        "members": members,
        **{f"passes_of_{key}": passes(key) for key in actions if key != "plain"},
        "milliseconds_of_a_pass": float(f"{1e3 * statistics.median(one['plain'] for one in rounds) / members:.3g}"),
        "difference": float(f"{difference(networks, bnn, x):.1e}"),
    }


def alone(plain: nn.Module, bnn: bl.Bayesian, number: int) -> nn.Module:
    """Make a plain network with the weights of one particle."""
    particles, network = bnn.posterior_, copy.deepcopy(plain)
    assert isinstance(particles, bl.posteriors.Particles)
    network.load_state_dict(particles.network(number, network))
    for module in network.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN needs contiguous weights, and a copy's are not
    return network


@torch.no_grad()
def difference(networks: list[nn.Module], bnn: bl.Bayesian, x: Tensor) -> float:
    """Compute the largest difference, relative to the largest output."""
    largest = 0.0
    for network, found in zip(networks, bl.predict(bnn, x).samples, strict=True):
        expected = torch.cat([network(part) for part in x.split(1_000)])
        largest = max(largest, float((found - expected).abs().max() / expected.abs().max()))
    return largest


def main() -> None:
    """Measure the chosen rows, and save them with the cost before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, help="else all; vgg on a GPU only")
    parser.add_argument("--inputs", nargs="+", type=int, default=[1, 16, 100, 1_000])
    parser.add_argument("--members", nargs="+", type=int, default=[5])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compiled", action="store_true", help="measure bl.compiled on a CPU, too")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    file = options.results / "particle_passes.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    before = {
        (r["network"], r["inputs"], r["members"]): r["before"] for r in results.get(options.device, {}).get("rows", ())
    }
    results.pop("environment", None)
    rows = []
    for members in options.members:
        for name in options.networks or [n for n in NETWORKS if n != "vgg" or options.device != "cpu"]:
            for inputs in options.inputs:
                row = measure(name, inputs, members, options.device, options.compiled or options.device != "cpu")
                rows.append(row | {"before": before.get((name, inputs, members), {})})
                print(rows[-1], flush=True)
                results[options.device] = {"environment": environment(), "rows": rows}  # rows of other devices are kept
                save("particle_passes", results, folder=options.results)


if __name__ == "__main__":
    main()
