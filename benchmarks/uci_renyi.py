"""Rényi divergences on UCI regression, as in Li & Turner 2016 (arXiv:1602.02311).

    python benchmarks/uci_renyi.py                       boston, concrete, energy and yacht at α = 1 and 0.5
    python benchmarks/uci_renyi.py --minutes 25          as many splits as fit; the next call resumes
    python benchmarks/uci_renyi.py --device cuda --together 20        all splits at once

The splits are the published ones. The network has one hidden layer of 50 ReLU units; all weights and biases are N(0, 1)
a priori and independent Gaussians a posteriori; the noise is learned; Adam with 1e-3, batches of 32, K = 100 draws, 500
epochs. Features and targets are standardised on the training part; scores are in the targets' own units, of 100
networks drawn from q: the negative log of the averaged density, and the root mean squared error of the averaged
prediction. α = 1 is estimated from draws as the others are.

The width of q after training depends on its start, because a log variance moves by only a few units in 500 epochs:
means start at N(0, 0.1²), log variances at −10 and the noise at 1, as in the authors' public code.

All draws go through the network at once, as one wide layer, for several splits together: it is `bl.Variational(renyi=α,
samples=K)` for this one architecture, many times faster than one network at a time (a test compares the losses).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import captured
import torch
from environment import RESULTS, save
from torch import Tensor

import bayeslim as bl
from bayeslim.evidence import renyi
from bayeslim.noise import standard_normal
from bayeslim.train.progress import progress

HIDDEN, BATCH, LR, TEST_DRAWS = 50, 32, 1e-3, 100
INITIAL_SCALE, INITIAL_LOG_VARIANCE, INITIAL_NOISE = 0.1, -10.0, 1.0
PUBLISHED: dict[str, dict[str, dict[str, list[float]]]] = {
    "boston": {"1": {"nll": [2.52, 0.03], "rmse": [2.89, 0.17]}, "0.5": {"nll": [2.46, 0.07]}},
    "concrete": {"1": {"nll": [3.11, 0.02], "rmse": [5.42, 0.11]}, "0.5": {"nll": [3.09, 0.02]}},
    "energy": {"1": {"nll": [0.77, 0.02], "rmse": [0.51, 0.01]}, "0.5": {"nll": [1.40, 0.03]}},
    "yacht": {"1": {"nll": [1.77, 0.01], "rmse": [0.81, 0.05]}, "0.5": {"nll": [1.82, 0.01]}},
}
"""Mean and standard error over the splits, from the paper's tables."""


class Networks:
    """q over networks with one hidden layer, for several splits at once.

    S is the number of splits, H that of hidden units. The hidden layer's weights and biases are (S, inputs + 1, H), the
    output's (S, H + 1). K draws have them as (S, inputs + 1, K, H) and (S, K, H + 1).
    """

    def __init__(self, inputs: int, splits: Sequence[int], device: str = "cpu", hidden: int = HIDDEN):
        drawn = [INITIAL_SCALE * torch.randn((inputs + 2) * hidden + 1, generator=_seeded(split)) for split in splits]
        first, last = torch.stack(drawn).to(device).split([(inputs + 1) * hidden, hidden + 1], 1)
        shapes = (-1, inputs + 1, hidden), (-1, hidden + 1)
        self.means = [m.clone().view(s).requires_grad_() for m, s in zip((first, last), shapes, strict=True)]
        self.log_variances = [torch.full_like(m, INITIAL_LOG_VARIANCE).requires_grad_() for m in self.means]
        self.log_noise = torch.full((len(splits), 1, 1), math.log(INITIAL_NOISE), device=device).requires_grad_()

    def parameters(self) -> list[Tensor]:
        """List the trained tensors."""
        return [*self.means, *self.log_variances, self.log_noise]

    def one(self, index: int) -> Networks:
        """Take the networks of one split."""
        one = Networks.__new__(Networks)
        both = self.means, self.log_variances
        one.means, one.log_variances = ([t[index : index + 1].detach() for t in tensors] for tensors in both)
        one.log_noise = self.log_noise[index : index + 1].detach()
        return one

    def noise(self, draws: int) -> list[Tensor]:
        """Draw ε for K draws."""
        splits, inputs, hidden = self.means[0].shape
        shapes = (splits, inputs, draws, hidden), (splits, draws, hidden + 1)
        return [standard_normal(shape, device=self.log_noise.device) for shape in shapes]

    def outputs(self, x: Tensor, noise: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Compute outputs (S, B, K) on (S, B, inputs); return the drawn weights too."""
        (first, last), (spread_first, spread_last) = self.means, [(t / 2).exp() for t in self.log_variances]
        W = torch.addcmul(first[:, :, None], spread_first[:, :, None], noise[0])
        v = torch.addcmul(last[:, None], spread_last[:, None], noise[1])
        hidden = torch.baddbmm(W[:, -1].flatten(1)[:, None], x, W[:, :-1].flatten(2)).relu_()
        hidden = hidden.view(*x.shape[:2], *W.shape[2:])
        return (hidden * v[:, None, :, :-1]).sum(-1) + v[:, None, :, -1], [W, v]

    def log_likelihoods(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute log p(y|x, w) of every example (S, B, 1) and draw, (S, B, K)."""
        off = (y - outputs) * torch.exp(-self.log_noise)
        return -0.5 * off.square() - self.log_noise - 0.5 * math.log(2 * math.pi)

    def losses(self, x: Tensor, y: Tensor, noise: list[Tensor], num_data: int, alpha: float) -> Tensor:
        """Estimate −L_α / N of every split from K draws, (S,)."""
        outputs, (W, v) = self.outputs(x, noise)
        data = self.log_likelihoods(outputs, y).mean(1)
        # log p(w) − log q(w) of every draw, without the constants that they share
        prior = -0.5 * (W.square().sum((1, 3)) + v.square().sum(2))
        posterior = -0.5 * (noise[0].square().sum((1, 3)) + noise[1].square().sum(2))
        log_stds = sum(t.flatten(1).sum(1, keepdim=True) for t in self.log_variances) / 2
        return -renyi.bound((num_data * data + prior - posterior + log_stds).T, alpha) / num_data


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fit(
    networks: Networks,
    x: Tensor,
    y: Tensor,
    alpha: float,
    epochs: int,
    draws: int,
    seed: int,
    batch: int = BATCH,
    lr: float = LR,
) -> Tensor:
    """Train the networks of all splits; return the losses of the last batch, (S,).

    Args:
        networks: of S splits.
        x: inputs, (S, N, D).
        y: targets, (S, N, 1).
        alpha: the order of the bound.
        epochs: passes over the data.
        draws: K.
        seed: of the noise and of the order of the rows.
        batch: rows of a batch.
        lr: the learning rate of Adam.
    """
    torch.manual_seed(seed)
    on_gpu, count = x.is_cuda, x.shape[1]
    rate = torch.zeros((), device=x.device)
    optimizer = torch.optim.Adam(networks.parameters(), lr=rate, fused=True, capturable=on_gpu)
    own, losses = torch.arange(len(x), device=x.device)[:, None], x.new_zeros(len(x))

    def step(chosen: Tensor) -> None:
        optimizer.zero_grad()
        values = networks.losses(x[own, chosen], y[own, chosen], networks.noise(draws), count, alpha)
        values.sum().backward()
        optimizer.step()
        losses.copy_(values.detach())

    graphs = {}
    if on_gpu:  # as one graph for each size of a batch; the steps before the capture have a rate of zero
        for chosen in orders_of(x)[:, : batch + count % batch].split(batch, 1):
            graphs[chosen.shape[1]] = captured.graph_of(partial(step, chosen)), chosen
        for state in optimizer.state.values():
            torch._foreach_zero_(list(state.values()))
    rate.fill_(lr)
    for _ in progress(range(epochs), f"α={alpha:g} epochs"):
        for chosen in orders_of(x).split(batch, 1):
            if not on_gpu:
                step(chosen)
                continue
            graph, rows = graphs[chosen.shape[1]]
            rows.copy_(chosen)
            graph.replay()
    return losses


def orders_of(x: Tensor) -> Tensor:
    """Draw an order of the rows of every split, (S, N)."""
    return torch.stack([torch.randperm(x.shape[1]) for _ in x]).to(x.device)


def train(
    name: str, splits: Sequence[int], alpha: float, epochs: int, draws: int, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Train on some splits, and measure on their test parts."""
    started = time.process_time()
    sets = [bl.data.load(name, split=split) for split in splits]
    x, y = (torch.stack([getattr(d, part) for d in sets]).to(device) for part in ("train_x", "train_y"))
    networks = Networks(x.shape[2], splits, device)
    losses = fit(networks, x, y, alpha, epochs, draws, splits[0])
    seconds = (time.process_time() - started) / len(splits)
    return [score(networks, index, data, seconds) | {"objective": -losses[index].item(), "data": name, "split": split,
            "alpha": alpha, "epochs": epochs, "draws": draws} for index, (split, data) in enumerate(zip(splits, sets,
            strict=True))]  # fmt: skip


def score(networks: Networks, index: int, data: bl.data.Dataset, seconds: float) -> dict[str, float]:
    """Score 100 networks drawn for one split, in the targets' units."""
    scale, one = data.target_scale.std.item(), networks.one(index)
    x, y = (part[None].to(one.log_noise.device) for part in (data.test_x, data.test_y))
    with torch.no_grad():
        outputs, _ = one.outputs(x, one.noise(TEST_DRAWS))
        each = one.log_likelihoods(outputs, y)
        error = (outputs.mean(2) - y[..., 0]).square().mean().sqrt().item()
    return {
        "nll": math.log(scale) + math.log(TEST_DRAWS) - each.logsumexp(2).mean().item(),
        "rmse": error * scale,
        "noise": one.log_noise.exp().item() * scale,
        "std": torch.cat([(t / 2).flatten().exp() for t in one.log_variances]).mean().item(),
        "seconds": round(seconds, 1),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute mean and standard error over splits, with the published ones."""
    table: dict[str, Any] = {}
    for name, alpha in sorted({(r["data"], r["alpha"]) for r in runs}):
        own = [r for r in runs if (r["data"], r["alpha"]) == (name, alpha)]
        cell: dict[str, Any] = {"splits": len(own)}
        for key in ("nll", "rmse"):
            values = [r[key] for r in own]
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
            cell[key] = [statistics.fmean(values), error]
        table.setdefault(name, {})[f"{alpha:g}"] = cell | {"published": PUBLISHED.get(name, {}).get(f"{alpha:g}")}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", default=list(PUBLISHED))
    parser.add_argument("--alphas", nargs="+", type=float, default=[1.0, 0.5])
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this long")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--together", type=int, default=5, help="splits that are trained at once")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = options.results / "uci_renyi.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    done = {tuple(r[key] for key in ("data", "split", "alpha", "epochs", "draws")) for r in runs}
    started = time.monotonic()
    # All data sets run one group of splits before the next, so that an interrupted run has as many of each.
    starts = range(0, options.splits, options.together)
    groups = [range(s, min(s + options.together, options.splits)) for s in starts]
    jobs = [(name, group, alpha) for group in groups for name in options.sets for alpha in options.alphas]
    for name, group, alpha in progress(jobs, "groups of splits"):
        left = [s for s in group if (name, s, alpha, options.epochs, options.draws) not in done]
        if not left:
            continue
        if time.monotonic() - started > 60 * options.minutes:
            break
        runs += train(name, left, alpha, options.epochs, options.draws, options.device)
        save("uci_renyi", {"summary": summary(runs), "runs": runs}, folder=options.results)
    for name, cells in summary(runs).items():
        for alpha, cell in cells.items():
            nll, rmse = (f"{cell[key][0]:.2f}±{cell[key][1]:.2f}" for key in ("nll", "rmse"))
            known = {key: f"{m:.2f}±{e:.2f}" for key, (m, e) in (cell["published"] or {}).items()}
            print(f"{name:9} α={alpha:4} {cell['splits']:2} splits  NLL {nll}  RMSE {rmse}   published {known}")


if __name__ == "__main__":
    main()
