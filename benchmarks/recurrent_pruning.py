"""Pruning of recurrent networks without retraining, by three rules.

    python benchmarks/recurrent_pruning.py

A recurrent layer of 32 units reads the eight rows of a digit one after another. Its weights are cut once, or in five
steps with the curvature measured again after each. The test error of the pruned network is in per cent, averaged over
seeds. "kron" has Kronecker factors over time steps: the remaining weights move when the posterior is conditioned on the
zeros. "diag" has a diagonal curvature, under which they do not move. "magnitude" cuts the smallest weights.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from environment import save
from torch import Tensor, nn

import bayeslim as bl

LAYERS = {"LSTM": nn.LSTM, "GRU": nn.GRU}
CUTS = (0.5, 0.7, 0.8)
UNITS = (0.2, 0.4)


class Rows(nn.Module):
    """A recurrent layer over the rows of an image, and a linear layer."""

    def __init__(self, kind: type[nn.Module]):
        super().__init__()
        self.memory, self.head = kind(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits of images (B, 1, 8, 8)."""
        return self.head(self.memory(x.squeeze(1))[0][:, -1])


def trained(kind: type[nn.Module], data: bl.data.Dataset, epochs: int) -> nn.Module:
    network = Rows(kind)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(data.train_x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(data.train_x[chosen]), data.train_y[chosen]).backward()
            optimizer.step()
    return network.eval()


def run(kind: type[nn.Module], data: bl.data.Dataset, epochs: int, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    network, loader = trained(kind, data, epochs), [(data.train_x, data.train_y)]

    def error(module: nn.Module) -> float:
        return 100 * float((module.eval()(data.test_x).argmax(1) != data.test_y).float().mean())

    def fitted(structure: str) -> bl.Bayesian:
        bnn = bl.bayesianize(network, bl.Laplace(structure), likelihood=bl.likelihoods.Categorical())
        bnn.fit(loader, tune="evidence", progress=False)
        return bnn

    kron, diag = fitted("kron"), fitted("diag")
    row = {"dense": error(network)}
    for cut in CUTS:
        budget = bl.Budget(sparsity=cut)
        for name, bnn, criterion in (("kron", kron, "auto"), ("diag", diag, "auto"), ("magnitude", diag, "magnitude")):
            row[f"{cut:.0%} of weights, {name}"] = error(
                bl.prune(bnn, bl.plan(bnn, budget, criterion=criterion)).mean_network()
            )
        steps = bl.prune(kron, budget, refresh=loader, steps=5, progress=False)
        row[f"{cut:.0%} of weights, kron in 5 steps"] = error(steps.mean_network())
    for cut in UNITS:
        options = {"granularity": "unit", "example": data.test_x[:4]}
        for name, bnn, criterion in (("kron", kron, "auto"), ("diag", diag, "auto"), ("magnitude", diag, "magnitude")):
            plan = bl.plan(bnn, bl.Budget(sparsity=cut), criterion=criterion, **options)
            row[f"{cut:.0%} by units, {name}"] = error(bl.prune(bnn, plan).mean_network())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=30)
    arguments = parser.parse_args()
    data, table = bl.data.load("digits"), {}
    for name, kind in LAYERS.items():
        rows = [run(kind, data, arguments.epochs, seed) for seed in range(arguments.seeds)]
        table[name] = {key: round(statistics.mean(row[key] for row in rows), 2) for key in rows[0]}
        print(name, *(f"  {key}: {value}" for key, value in table[name].items()), sep="\n", flush=True)
    save("recurrent_pruning", {"settings": vars(arguments), "error": table})


if __name__ == "__main__":
    main()
