"""One-shot cuts under priors of many widths, on one network of each kind.

    python benchmarks/prior_widths.py              train, cut, write results/prior_widths.json and the table of
                                                   docs/results.md (10 minutes on one core)

Five small networks are trained on the digits: a perceptron, a convolutional network, a residual network with batch
norms, a transformer and an LSTM, which read an image row by row. Each is cut with the Kronecker posterior under priors
of standard deviations from 0.03 to 10, and under that of the largest evidence ("tuned"), in one step and in four with
the curvature and the norms measured again. The test error is in per cent, averaged over seeds. "magnitude" sets the
smallest weights to zero. No solve may fail.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from environment import save
from torch import Tensor, nn

import bayeslim as bl

NAME = "prior_widths"
PRIORS = {f"std {std}": (std, None) for std in (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)} | {"tuned": (1.0, "evidence")}
"""The standard deviation of each prior, and how it is tuned."""
SPARSITY = 0.7
STEPS = (1, 4)


class Residual(nn.Module):
    """Two convolutions with batch norms, added to their input."""

    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Transform (B, width, H, W)."""
        return torch.relu(x + self.body(x))


class Rows(nn.Module):
    """A sequence model over the rows of an image, and a linear layer on its last or mean output."""

    def __init__(self, kind: str, width: int = 32):
        super().__init__()
        self.kind = kind
        self.embedding = nn.Linear(8, width)
        self.places = nn.Parameter(0.1 * torch.randn(8, width))
        if kind == "LSTM":
            self.body: nn.Module = nn.LSTM(width, width, batch_first=True)
        else:
            layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits of images (B, 1, 8, 8)."""
        rows = self.embedding(x.squeeze(1)) + self.places
        if self.kind == "LSTM":
            return self.head(self.body(rows)[0][:, -1])
        return self.head(self.body(rows).mean(1))


def convolutional() -> nn.Module:
    """Build two convolutions and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 16, 48),
        nn.ReLU(),
        nn.Linear(48, 10),
    )


def residual() -> nn.Module:
    """Build three residual blocks of 12 channels."""
    blocks = [Residual(12) for _ in range(3)]
    head = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 10))
    return nn.Sequential(nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), *blocks, *head)


def perceptron() -> nn.Module:
    """Build two hidden layers of 64 units."""
    layers = (nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(*layers)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "convolutional": convolutional,
    "residual, batch norm": residual,
    "transformer": lambda: Rows("transformer"),
    "LSTM": lambda: Rows("LSTM"),
}


def trained(build: Callable[[], nn.Module], data: bl.data.Dataset, epochs: int) -> nn.Module:
    """Train a network on the digits."""
    network = build()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(data.train_x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(data.train_x[chosen]), data.train_y[chosen]).backward()
            optimizer.step()
    return network.eval()


@torch.no_grad()
def error(network: nn.Module, data: bl.data.Dataset) -> float:
    """Compute the test error in per cent."""
    return 100 * float((network.eval()(data.test_x).argmax(1) != data.test_y).float().mean())


def errors(build: Callable[[], nn.Module], data: bl.data.Dataset, epochs: int, seed: int) -> dict[str, float]:
    """Train one network and cut it under all priors."""
    torch.manual_seed(seed)
    network = trained(build, data, epochs)
    loader = [(data.train_x, data.train_y)]
    found = {"dense": error(network, data)}
    for name, (std, tune) in PRIORS.items():
        prior = bl.priors.Normal(std)
        bnn = bl.bayesianize(network, bl.Laplace(), likelihood=bl.likelihoods.Categorical(), prior=prior)
        bnn.fit(loader, tune=tune, progress=False)
        if tune:
            found[f"{name} std"] = float(next(iter(bnn.priors.values())).std)
        for steps in STEPS:
            pruned = bl.prune(bnn, bl.Budget(sparsity=SPARSITY), steps=steps, refresh=loader, progress=False)
            found[f"{name}, steps {steps}"] = error(pruned.mean_network(), data)
    plan = bl.plan(bnn, bl.Budget(sparsity=SPARSITY), criterion="magnitude")
    with torch.no_grad():
        for name, mask in plan.masks.items():
            network.get_parameter(name).mul_(mask)
    found["magnitude"] = error(network, data)
    return found


def main() -> None:
    """Train, cut, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    data = bl.data.load("digits")
    found: dict[str, dict[str, float]] = {}
    for network, build in NETWORKS.items():
        rows = [errors(build, data, options.epochs, seed) for seed in range(options.seeds)]
        found[network] = {key: round(statistics.mean(row[key] for row in rows), 3) for key in rows[0]}
        print(network, found[network], flush=True)
    save(NAME, {"sparsity": SPARSITY, "seeds": options.seeds, "epochs": options.epochs, "results": found})


if __name__ == "__main__":
    main()
