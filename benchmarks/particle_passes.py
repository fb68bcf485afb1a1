"""What a prediction from S particles costs, in passes of the plain network, for networks of several kinds.

    python benchmarks/particle_passes.py                                  on two CPU threads, about 13 minutes
    python benchmarks/particle_passes.py --device cuda --members 5 20     on a GPU, about nine
    python benchmarks/particle_passes.py --networks lenet5 --inputs 16    a part of it
    python benchmarks/particle_passes.py --networks linear classes normed wide    where averages count most
    python benchmarks/particle_passes.py --networks large --inputs 1 4 16 100

The prediction is `bl.predict(bnn, x)`, with its mean: the probabilities, averaged. Uncertainty is worked out when it is
read, and counted beside that: the same with the variance and both parts of the entropy. A pass is a call of a plain
network in evaluation mode, without gradients, on the same inputs: S passes are those of S plain networks, each with its
weights, one after the other, and nothing is averaged. Calling one network again and again is counted too; its weights
stay in a cache that those of several may not fit into. A large tensor is freed before all else, as in any process that
has trained a network: until then the C library may return memory after every layer, and getting it again takes as long
as many a layer does. What exponentials of all outputs take is counted, too: no mean of probabilities can do without,
and no pass has them; and what the same mean takes as people write it, a loop over plain networks. All take turns, and
the median of the rounds is kept. Weights are random, as the cost does not depend on what was learned. Every particle's
outputs are compared with those of its plain network: the largest difference, relative to the largest output, is kept
beside the cost.
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

ROUNDS, FEWER = 21, 9
"""How many rounds there are, and of networks of which a pass is a turn."""
LEAST_SECONDS = 0.1
"""How long a turn takes at least."""
WORDS = 10_000
"""How many there are."""
LARGE = 2**23 - 2**12
"""Of how many numbers a tensor is the largest, just below 32 MB, that glibc learns from to keep memory."""


def batch_normalised() -> nn.Module:
    """Two convolutions with batch norms."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class WrittenMLP(nn.Module):
    """A perceptron as people write it, with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 100), nn.Linear(100, 100), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


class WrittenCNN(nn.Module):
    """A network for images as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(32), nn.BatchNorm2d(64)
        self.fc1, self.fc2 = nn.Linear(4096, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc2(F.relu(self.fc1(x.view(x.size(0), -1))))


def small() -> nn.Module:
    """As for a table of numbers."""
    return nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Linear(50, 10))


def linear() -> nn.Module:
    """No more than a layer."""
    return nn.Linear(20, 3)


def classes() -> nn.Module:
    """No more than a layer, of which exponentials alone take longer."""
    return nn.Linear(20, 1_000)


def normed() -> nn.Module:
    """With layer norms, one after the other."""
    return nn.Sequential(
        nn.Linear(20, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 5)
    )


def wide() -> nn.Module:
    """For many classes, of which softmax takes long."""
    return nn.Sequential(nn.Linear(20, 2048), nn.ReLU(), nn.Linear(2048, 1_000))


def large() -> nn.Module:
    """Mostly one layer, which no cache has room for."""
    return nn.Sequential(nn.Linear(3_072, 1_024), nn.ReLU(), nn.Linear(1_024, 10))


class Residual(nn.Module):
    """As for a table of numbers, too, with norms and shortcuts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(30, 64), nn.Linear(64, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Features to logits."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def series() -> nn.Module:
    """For signals in time."""
    return nn.Sequential(
        nn.Conv1d(8, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(32, 64, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class Words(nn.Module):
    """For texts: the mean of what their words stand for, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.last = nn.Embedding(WORDS, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Numbers of words to logits."""
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
    "linear": (linear, (20,)),
    "classes": (classes, (20,)),
    "normed": (normed, (20,)),
    "wide": (wide, (20,)),
    "large": (large, (3_072,)),
}
ASKED_FOR = ("linear", "classes", "normed", "wide", "large")
"""Which are measured only where they are named."""


def ensemble(network: nn.Module, members: int) -> bl.Bayesian:
    """Particles around a network, as if it had been trained several times."""
    bnn = bl.bayesianize(network, bl.DeepEnsemble(members), likelihood=bl.likelihoods.Categorical())
    values = {n: torch.stack([p + 0.01 * torch.randn_like(p) for _ in range(members)]) for n, p in parts(network)[0]}
    buffers = {n: torch.stack([b.clone() for _ in range(members)]) for n, b in parts(network)[1]}
    bnn.state["posterior"] = bl.posteriors.Particles(values, buffers=buffers)
    return bnn


def parts(network: nn.Module) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Parameters, without gradients, and buffers."""
    return [(n, p.detach()) for n, p in network.named_parameters()], list(network.named_buffers())


def measure(name: str, inputs: int, members: int, device: str) -> dict[str, Any]:
    """Passes, and how far outputs are from those of each network alone."""
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    plain = build().to(device).eval()
    bnn, x = ensemble(copy.deepcopy(plain), members), torch.rand(inputs, *shape, device=device)
    if name == "words":
        x = (WORDS * x).long()
    networks = [alone(plain, bnn, k) for k in range(members)]

    @torch.no_grad()
    def one() -> None:
        plain(x)

    @torch.no_grad()
    def each() -> None:
        for network in networks:
            network(x)

    def several() -> None:
        _ = bl.predict(bnn, x).mean

    def how_sure() -> None:
        prediction = bl.predict(bnn, x)
        _ = prediction.mean, prediction.variance, prediction.aleatoric, prediction.epistemic

    outputs = bl.predict(bnn, x).samples

    def exponentials() -> None:
        outputs.exp()

    @torch.no_grad()
    def loop() -> None:
        torch.stack([network(x).softmax(-1) for network in networks]).mean(0)

    def seconds(action: Callable[[], None], times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            action()
        if x.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / times

    for action in (one, each, several, how_sure, exponentials, loop):
        seconds(action, 2)
    turns = max(1, round(LEAST_SECONDS / seconds(one, 3)))
    rounds = []
    for _ in range(ROUNDS if turns > 1 else FEWER):
        alike, of_all = seconds(one, turns), seconds(each, max(1, turns // members)) / members
        others = (seconds(action, max(1, turns // members)) for action in (several, how_sure, exponentials, loop))
        rounds.append((alike, of_all, *others))
    alike, of_all, predicted, read, exp, looped = map(torch.tensor, zip(*rounds, strict=True))

    def passes(seconds: Tensor, of: Tensor = of_all) -> float:
        return round(statistics.median((seconds / of).tolist()), 2)

    return {
        "network": name,
        "inputs": inputs,
        "members": members,
        "passes": passes(predicted),
        "passes_with_uncertainty": passes(read),
        "passes_of_exponentials": passes(exp),
        "passes_of_a_loop": passes(looped),
        "passes_of_one_network": passes(predicted, alike),
        "milliseconds_of_a_pass": float(f"{1e3 * statistics.median(of_all.tolist()):.3g}"),
        "difference": float(f"{difference(networks, bnn, x):.1e}"),
    }


def alone(plain: nn.Module, bnn: bl.Bayesian, number: int) -> nn.Module:
    """A plain network with the weights of one particle."""
    particles, network = bnn.posterior_, copy.deepcopy(plain)
    assert isinstance(particles, bl.posteriors.Particles)
    network.load_state_dict(particles.network(number, network))
    for module in network.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # a copy's weights are not in one piece, which cuDNN wants
    return network


@torch.no_grad()
def difference(networks: list[nn.Module], bnn: bl.Bayesian, x: Tensor) -> float:
    """The largest, relative to the largest output."""
    largest = 0.0
    for network, found in zip(networks, bl.predict(bnn, x).samples, strict=True):
        expected = torch.cat([network(part) for part in x.split(1_000)])
        largest = max(largest, float((found - expected).abs().max() / expected.abs().max()))
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, help="else all to lstm, vgg on a GPU only")
    parser.add_argument("--inputs", nargs="+", type=int, default=[1, 16, 100, 1_000])
    parser.add_argument("--members", nargs="+", type=int, default=[5])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.ones(LARGE)
    file = options.results / "particle_passes.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    results.pop("environment", None)
    rows = []
    for members in options.members:
        left_out = ("vgg", *ASKED_FOR) if options.device == "cpu" else ASKED_FOR
        for name in options.networks or [n for n in NETWORKS if n not in left_out]:
            for inputs in options.inputs:
                rows.append(measure(name, inputs, members, options.device))
                print(rows[-1], flush=True)
    results[options.device] = {"environment": environment(), "rows": rows}  # of the other device stay as they were
    save("particle_passes", results, folder=options.results)


if __name__ == "__main__":
    main()
