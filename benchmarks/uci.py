"""Nine UCI regression sets with their published splits: ten methods, with and without conformal intervals.

    python benchmarks/uci.py                          everything that has no result yet; a second call goes on
    python benchmarks/uci.py --device cuda            one GPU: all splits of a set are trained at once
    python benchmarks/uci.py --sets yacht --methods vi laplace --splits 2 --epochs 50
    python benchmarks/uci.py --table                  the table of the results so far

The network has one hidden layer of 50 ReLU units (100 for protein), weights and biases are N(0, 1) a priori, the noise
is learned, as in Li & Turner 2016 (arXiv:1602.02311); 500 epochs, Adam with 1e-3, batches of 32, 100 draws. Sets of
more than 5,000 rows take batches of 256 at a learning rate of 2e-3, and 10 draws. Methods that train single networks
(the last four) take five times the learning rate, for in so few steps their noise would not arrive.

    vi               mean-field Gaussians, the KL in closed form
    renyi-A          the bound of order A from draws: -inf, 0, 0.5, 1, inf; at -inf and 0 it is a heuristic (see README)
    laplace          the full Gauss-Newton matrix at the MAP estimate, prior precision and noise by evidence
    sghmc            scale-adapted SGHMC from the MAP estimate, 50 networks of the second half
    dropout          5 % of the hidden units, 100 masks
    ensemble         five MAP estimates from random starts

Scores are in the units of the targets: the root mean squared error of the mean, the negative log of the averaged
density, and the coverage and the mean width of the central 90 % interval. "Conformal" trains on four fifths of the
training part and calibrates the scaled intervals (`bl.conformal`) on the last fifth.

The networks of all splits, and both parts of each, are trained side by side as one stack: the library's bounds,
samplers, curvature and conformal intervals on tensors with one more dimension.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, save
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.app.data.uci import UCI_SETS
from bayeslim.evidence import renyi
from bayeslim.noise import standard_normal
from bayeslim.results import Prediction
from bayeslim.train.progress import progress

ALPHAS = (-math.inf, 0.0, 0.5, 1.0, math.inf)
RENYI = {f"renyi-{alpha:g}": alpha for alpha in ALPHAS}
METHODS = ("vi", *RENYI, "laplace", "sghmc", "dropout", "ensemble")
COVERAGE = 0.9
LARGE_ROWS = 5000
MEMBERS, SAMPLES, DROPOUT = 5, 50, 0.05
POINT_LR_FACTOR = 5.0
INITIAL_SCALE, INITIAL_LOG_VARIANCE, INITIAL_NOISE = 0.1, -10.0, 1.0
SGHMC_START, SGHMC_LR, SGHMC_FRICTION = 0.4, 1e-3, 0.1
DRAWS_AT_ONCE = 2**25
"""Hidden activations of a prediction that are computed together."""

ORDER = ["renyi--inf", "renyi-0", "renyi-0.5", "renyi-1", "renyi-inf"]
PUBLISHED_NLL = {
    "boston": [2.47, 2.47, 2.46, 2.52, 2.50],
    "concrete": [3.09, 3.08, 3.09, 3.11, 3.12],
    "energy": [1.39, 1.42, 1.40, 0.77, 1.23],
    "kin8nm": [-1.13, -1.13, -1.14, -1.12, -1.12],
    "naval": [-3.43, -3.02, -3.58, -6.49, -6.47],
    "power": [2.82, 2.83, 2.82, 2.82, 2.83],
    "protein": [2.94, 2.91, 2.92, 2.91, 2.91],
    "wine": [0.95, 0.95, 0.95, 0.96, 0.97],
    "yacht": [1.82, 1.83, 1.82, 1.77, 2.01],
}
PUBLISHED_ERRORS = {
    "boston": [0.08, 0.07, 0.07, 0.03, 0.05],
    "concrete": [0.02] * 5,
    "energy": [0.02, 0.02, 0.03, 0.02, 0.01],
    "kin8nm": [0.01] * 5,
    "naval": [0.08, 0.48, 0.08, 0.04, 0.09],
    "power": [0.01] * 5,
    "protein": [0.01, 0.00, 0.01, 0.00, 0.00],
    "wine": [0.01] * 5,
    "yacht": [0.01, 0.01, 0.01, 0.01, 0.00],
}
PUBLISHED_RMSE = {
    "boston": (2.89, 0.17), "concrete": (5.42, 0.11), "energy": (0.51, 0.01), "kin8nm": (0.08, 0.0),
    "naval": (0.0, 0.0), "power": (4.07, 0.04), "protein": (4.45, 0.02), "wine": (0.63, 0.01), "yacht": (0.81, 0.05),
}  # fmt: skip
"""Means and standard errors over the splits, from the tables of Li & Turner; the RMSE is that of VI."""


class Stack:
    """Networks with one hidden layer, side by side: the weights of S splits, with K draws or members each.

    The first layer is (S, inputs + 1, K, H), the last (S, K, H + 1); the last row or column holds the biases.
    """

    def __init__(self, x: Tensor, y: Tensor, hidden: int, members: int, is_variational: bool, seed: int):
        self.x, self.y = x, y
        splits, self.num_data, inputs = x.shape
        generator = torch.Generator().manual_seed(seed)
        shapes = (splits, inputs + 1, members, hidden), (splits, members, hidden + 1)
        fans = (1.0, 1.0) if is_variational else (1 / math.sqrt(inputs), 1 / math.sqrt(hidden))
        scales = (INITIAL_SCALE, INITIAL_SCALE) if is_variational else fans
        start = [scale * torch.randn(shape, generator=generator) for shape, scale in zip(shapes, scales, strict=True)]
        self.means = [one.to(x.device).requires_grad_() for one in start]
        self.log_variances = [torch.full_like(m, INITIAL_LOG_VARIANCE).requires_grad_() for m in self.means]
        self.log_variances = self.log_variances if is_variational else []
        self.log_noise = torch.full((splits, 1, members), math.log(INITIAL_NOISE), device=x.device).requires_grad_()

    @property
    def weights(self) -> list[Tensor]:
        """The trained tensors but for the noise."""
        return [*self.means, *self.log_variances]

    def draw(self, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """Draw weights, and return the standard normals behind them too."""
        first, last = self.means[0].expand(-1, -1, count, -1), self.means[1].expand(-1, count, -1)
        noise = [standard_normal(m.shape, device=m.device) for m in (first, last)]
        spreads = [(t / 2).exp() for t in self.log_variances]
        drawn = [torch.addcmul(m, s, e) for m, s, e in zip((first, last), spreads, noise, strict=True)]
        return drawn, noise

    def outputs(self, x: Tensor, weights: Sequence[Tensor], dropout: float = 0.0) -> Tensor:
        """Compute outputs (S, B, K) on (S, B, inputs)."""
        W, v = weights
        hidden = torch.baddbmm(W[:, -1].flatten(1)[:, None], x, W[:, :-1].flatten(2)).relu()
        hidden = hidden.view(*x.shape[:2], *W.shape[2:])
        if dropout:
            hidden = hidden * (torch.rand_like(hidden) > dropout) / (1 - dropout)
        return (hidden * v[:, None, :, :-1]).sum(-1) + v[:, None, :, -1]

    def log_likelihoods(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute log p(y|x, w), (S, B, K)."""
        off = (y - outputs) * torch.exp(-self.log_noise)
        return -0.5 * off.square() - self.log_noise - 0.5 * math.log(2 * math.pi)

    def loss(self, method: str, rows: Tensor, draws: int) -> Tensor:
        """Compute the sum over splits of the loss of a batch, whose rows are (S, B)."""
        own = torch.arange(len(rows), device=rows.device)[:, None]
        x, y = self.x[own, rows], self.y[own, rows]
        if not self.log_variances:
            outputs = self.outputs(x, self.means, DROPOUT if method == "dropout" else 0.0)
            prior = 0.5 * sum(m.square().sum() for m in self.means) / self.num_data
            return prior - self.log_likelihoods(outputs, y).mean(1).sum()
        drawn, noise = self.draw(draws)
        data = self.log_likelihoods(self.outputs(x, drawn), y).mean(1)
        if method == "vi":
            kl = sum(
                0.5 * (m.square() + t.exp() - t - 1).sum() for m, t in zip(self.means, self.log_variances, strict=True)
            )
            return kl / self.num_data - data.mean(1).sum()
        prior, posterior = (
            -0.5 * (W.square().sum((1, 3)) + v.square().sum(2)) for W, v in (tuple(drawn), tuple(noise))
        )
        log_stds = sum(t.flatten(1).sum(1, keepdim=True) for t in self.log_variances) / 2
        log_ratios = self.num_data * data + prior - posterior + log_stds
        return -renyi.bound(log_ratios.T, RENYI[method]).sum() / self.num_data


class Gradients:
    """The loss and its gradients of a step, as a CUDA graph on a GPU."""

    def __init__(self, stacks: Sequence[Stack], method: str, batch: int, draws: int, captured: bool):
        self.stacks, self.method, self.draws, self.graph = stacks, method, draws, None
        device = stacks[0].x.device
        self.rows = [torch.zeros(len(s.x), batch, dtype=torch.long, device=device) for s in stacks]
        self.parameters = [p for s in stacks for p in (*s.weights, s.log_noise)]
        if captured:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._run()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._run()

    def _run(self) -> None:
        for p in self.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.zero_()
        losses = [s.loss(self.method, rows, self.draws) for s, rows in zip(self.stacks, self.rows, strict=True)]
        torch.stack(losses).sum().backward()

    def __call__(self, rows: Sequence[Tensor]) -> None:
        """Compute the gradients of a batch, whose rows are (S, B) in every stack."""
        for own, given in zip(self.rows, rows, strict=True):
            own.copy_(given)
        self._run() if self.graph is None else self.graph.replay()


def orders(stack: Stack, size: int, generator: torch.Generator) -> Tensor:
    """Draw a random order of the rows of every split, (S, size); it begins anew where rows run out."""
    parts = []
    for _ in range(math.ceil(size / stack.num_data)):
        keys = torch.rand(len(stack.x), stack.num_data, generator=generator, device=stack.x.device)
        parts.append(keys.argsort(1))
    return torch.cat(parts, 1)[:, :size]


def train(
    stacks: Sequence[Stack], method: str, epochs: int, batch: int, lr: float, draws: int, seed: int, graphs: bool = True
) -> Any:
    """Train stacks side by side; return the networks of SGHMC."""
    device = stacks[0].x.device
    generator = torch.Generator(device).manual_seed(seed)
    gradients = Gradients(stacks, method, batch, draws, graphs and device.type == "cuda")
    optimizer: torch.optim.Optimizer = torch.optim.Adam(gradients.parameters, lr=lr, fused=True)
    steps = max(1, stacks[0].num_data // batch)
    start = round(SGHMC_START * epochs) if method == "sghmc" else epochs + 1
    kept: list[list[Tensor]] = []
    keep_every = max(1, (epochs - start) // 2 // SAMPLES)
    for epoch in progress(range(epochs), f"{method} epochs"):
        if epoch == start:
            optimizer = sghmc(stacks, (epochs - start) * steps // 4)
        chosen = [orders(stack, steps * batch, generator).split(batch, 1) for stack in stacks]
        for rows in zip(*chosen, strict=True):
            gradients(rows)
            optimizer.step()
        if epoch >= (epochs + start) // 2 and (epochs - 1 - epoch) % keep_every == 0:
            kept.append([p.detach().clone() for p in gradients.parameters])
    return kept[-SAMPLES:]


def sghmc(stacks: Sequence[Stack], adapt_steps: int) -> torch.optim.Optimizer:
    """Make the sampler of all stacks, each with its own size of the data."""
    groups: list[dict[str, Any]] = []
    for stack in stacks:
        groups.append({"params": stack.means, "num_data": stack.num_data})
        groups.append({"params": [stack.log_noise], "num_data": stack.num_data, "temperature": 0.0})
    return bl.samplers.StochasticHamiltonian(
        groups, SGHMC_LR, num_data=stacks[0].num_data, friction=SGHMC_FRICTION, adapt_steps=max(1, adapt_steps)
    )


Predicts = Callable[[int, Tensor], Prediction]
"""The prediction of standardised targets of a split on inputs (N, D)."""


def predictor(stack: Stack, method: str, kept: Sequence[Sequence[Tensor]]) -> Predicts:
    """Make the predictions of a trained stack."""
    laplace: dict[int, bl.Bayesian] = {}

    def predict(split: int, x: Tensor) -> Prediction:
        if method == "laplace":
            if split not in laplace:
                laplace[split] = fitted_laplace(stack, split)
            return bl.predict(laplace[split], x).to("cpu")
        alone = _part(stack, split)
        with torch.no_grad():
            found = [_outputs(alone, method, part, kept, split) for part in _chunks(x, stack)]
        outputs, noise = torch.cat([part for part, _ in found], 1), found[0][1]
        together = torch.cat([outputs, (2 * noise.log()).expand_as(outputs)], -1)
        return bl.likelihoods.Gaussian("heteroscedastic").predict(together.double().cpu())

    return predict


def _outputs(
    alone: Stack, method: str, x: Tensor, kept: Sequence[Sequence[Tensor]], split: int
) -> tuple[Tensor, Tensor]:
    """Compute outputs (K, n, 1) and noise (K, 1, 1) of the networks of one split."""
    if method == "sghmc":
        parts = [(alone.outputs(x[None], [W[split][None], v[split][None]]), s[split][None]) for W, v, s in kept]
        return torch.cat([o[0].T for o, _ in parts])[..., None], torch.cat([s.exp()[0].T for _, s in parts])[..., None]
    if method == "dropout":
        outputs = torch.cat([alone.outputs(x[None], alone.means, DROPOUT) for _ in range(100)], -1)
    elif alone.log_variances:
        torch.manual_seed(0)  # the same networks for every part
        outputs = alone.outputs(x[None], alone.draw(100)[0])
    else:
        outputs = alone.outputs(x[None], alone.means)
    noise = alone.log_noise.exp().expand(1, 1, outputs.shape[-1])
    return outputs[0].T[..., None], noise[0].T[..., None]


def _part(stack: Stack, split: int) -> Stack:
    alone = Stack.__new__(Stack)
    alone.means = [m[split : split + 1].detach() for m in stack.means]
    alone.log_variances = [t[split : split + 1].detach() for t in stack.log_variances]
    alone.log_noise = stack.log_noise[split : split + 1].detach()
    return alone


def _chunks(x: Tensor, stack: Stack) -> Sequence[Tensor]:
    return x.split(max(1, DRAWS_AT_ONCE // (100 * stack.means[0].shape[-1])))


def fitted_laplace(stack: Stack, split: int) -> bl.Bayesian:
    """Measure the curvature of one split's network by the library."""
    W, v = (m[split].detach() for m in stack.means)
    hidden, last = nn.Linear(*W[:-1, 0].shape), nn.Linear(W.shape[-1], 1)
    with torch.no_grad():
        for layer, weight, bias in ((hidden, W[:-1, 0].T, W[-1, 0]), (last, v[:, :-1], v[:, -1])):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
    noise = float(stack.log_noise[split].detach().exp())
    network = nn.Sequential(hidden, nn.ReLU(), last).to(stack.x.device)
    likelihood = bl.likelihoods.Gaussian("learned", initial_noise=noise)
    bnn = bl.bayesianize(network, bl.Laplace("full"), likelihood=likelihood)
    bnn.fit(bl.data.Loader(stack.x[split], stack.y[split], 1000), tune="evidence", progress=False)
    return bnn


def scores(found: Prediction, y: Tensor, scale: float) -> dict[str, float]:
    """Score a prediction of standardised targets, in the units of the targets."""
    y = y.double().cpu()
    means, log_variances = found.samples.double().chunk(2, -1) if not found.is_gaussian else (None, None)
    if means is None:
        log_density = torch.distributions.Normal(found.mean.double(), found.std.double()).log_prob(y)
    else:
        each = torch.distributions.Normal(means, (log_variances / 2).exp()).log_prob(y)
        log_density = each.logsumexp(0) - math.log(len(each))
    low, high = found.interval(COVERAGE)
    return {
        "rmse": float((found.mean.double() - y).square().mean().sqrt()) * scale,
        "nll": math.log(scale) - float(log_density.mean()),
        "coverage": float(((low <= y) & (y <= high)).double().mean()),
        "width": float((high - low).mean()) * scale,
    }


def conformal_scores(
    predict: Predicts, split: int, held_out: tuple[Tensor, Tensor], x: Tensor, y: Tensor, scale: float
) -> dict[str, float]:
    """Score conformal intervals that are calibrated on held-out data."""

    def outputs(inputs: Tensor) -> Tensor:
        found = predict(split, inputs)
        return torch.cat([found.mean, found.variance.log()], -1)

    made = bl.conformal(outputs, [held_out], COVERAGE, likelihood=bl.likelihoods.Gaussian("heteroscedastic"))
    intervals: Any = made(x)
    off = intervals.prediction.mean.double() - y.double().cpu()
    return {
        "conformal_rmse": float(off.square().mean().sqrt()) * scale,
        "conformal_coverage": float(intervals.covers(y.cpu()).double().mean()),
        "conformal_width": float(intervals.widths.mean()) * scale,
    }


def run(
    name: str, method: str, splits: Sequence[int], epochs: int, device: str, graphs: bool = True
) -> list[dict[str, Any]]:
    """Train and score a method on some splits of a set."""
    started = time.monotonic()
    sets = [bl.data.load(name, split=split) for split in splits]
    is_large = UCI_SETS[name].rows > LARGE_ROWS
    batch, lr, draws = (256, 2e-3, 10) if is_large else (32, 1e-3, 100)
    x, y = (torch.stack([getattr(d, part) for d in sets]).to(device) for part in ("train_x", "train_y"))
    held_out = len(x[0]) // 5  # the published splits are random: the last rows are a random choice
    torch.manual_seed(splits[0])
    options = {
        "hidden": 100 if name == "protein" else 50,
        "members": MEMBERS if method == "ensemble" else 1,
        "is_variational": method == "vi" or method in RENYI,
        "seed": splits[0],
    }
    stacks = [Stack(x, y, **options), Stack(x[:, :-held_out], y[:, :-held_out], **options)]
    lr *= 1.0 if options["is_variational"] else POINT_LR_FACTOR
    kept = train(stacks, method, epochs, batch, lr, draws, splits[0], graphs)
    half = len(stacks[0].weights) + 1
    whole = predictor(stacks[0], method, [networks[:half] for networks in kept])
    proper = predictor(stacks[1], method, [networks[half:] for networks in kept])
    found = []
    for index, (split, data) in enumerate(zip(splits, sets, strict=True)):
        scale, test_x = float(data.target_scale.std), data.test_x.to(device)
        calibration = x[index, -held_out:], y[index, -held_out:].cpu()
        own = scores(whole(index, test_x), data.test_y, scale)
        own |= conformal_scores(proper, index, calibration, test_x, data.test_y, scale)
        found.append({"data": name, "method": method, "split": split, "epochs": epochs, **own})
    seconds = (time.monotonic() - started) / len(splits)
    return [one | {"seconds": round(seconds, 2)} for one in found]


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compute means and standard errors over the splits."""
    table: dict[str, Any] = {}
    for name in UCI_SETS:
        for method in METHODS:
            own = [r for r in runs if (r["data"], r["method"]) == (name, method)]
            if own:
                cell: dict[str, Any] = {"splits": len(own)}
                for key in (
                    "rmse",
                    "nll",
                    "coverage",
                    "width",
                    "conformal_rmse",
                    "conformal_coverage",
                    "conformal_width",
                ):
                    values = [r[key] for r in own]
                    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
                    cell[key] = [statistics.fmean(values), error]
                table.setdefault(name, {})[method] = cell
    return table


def matches(table: dict[str, Any]) -> list[str]:
    """List the sets on which the better of VI and its estimate from draws is as good as the published VI.

    As good is a difference of at most two standard errors of both together.
    """
    found = []
    for name, cells in table.items():
        best = min((cells[m]["nll"] for m in ("vi", "renyi-1") if m in cells), default=None)
        if best is not None and math.isfinite(best[1]):
            known, error = PUBLISHED_NLL[name][3], PUBLISHED_ERRORS[name][3]
            if best[0] - known <= 2 * math.hypot(best[1], max(error, 0.005)):
                found.append(name)
    return found


def show(table: dict[str, Any]) -> None:
    heads = (
        ("RMSE", 35),
        ("NLL", 15),
        ("published NLL", 15),
        ("coverage", 10),
        ("width", 8),
        ("conformal", 10),
        ("width", 8),
    )
    print("".join(f"{head:>{width}}" for head, width in heads))
    for name, cells in table.items():
        rmse, error = PUBLISHED_RMSE[name]
        print(f"{name} (published RMSE of VI {rmse:.2f} ± {error:.2f})")
        for method, cell in cells.items():
            pairs = [f"{cell[key][0]:.3f} ±{cell[key][1]:.3f}" for key in ("rmse", "nll")]
            place = ORDER.index("renyi-1" if method == "vi" else method) if method in ("vi", *RENYI) else None
            known = "" if place is None else f"{PUBLISHED_NLL[name][place]:.2f} ±{PUBLISHED_ERRORS[name][place]:.2f}"
            print(
                f"{cell['splits']:7} {method:12}{pairs[0]:>15}{pairs[1]:>15}{known:>15}"
                f"{cell['coverage'][0]:10.3f}{cell['width'][0]:8.3g}"
                f"{cell['conformal_coverage'][0]:10.3f}{cell['conformal_width'][0]:8.3g}"
            )
    print(f"As good as the published VI on {len(matches(table))} of {len(table)} sets: {', '.join(matches(table))}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", default=list(UCI_SETS), choices=list(UCI_SETS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--splits", type=int, default=20, help="at most; protein has five")
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=None, help="of a CPU; all if not given")
    parser.add_argument("--together", type=int, default=20, help="splits that are trained at once")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--table", action="store_true", help="print the table of the results so far, and train nothing")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    path = options.results / "uci.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    done = {tuple(r[key] for key in ("data", "method", "split", "epochs")) for r in runs}
    started = time.monotonic()
    sets = sorted(options.sets, key=lambda name: UCI_SETS[name].rows)
    for name, method in [] if options.table else [(n, m) for n in sets for m in options.methods]:
        every = range(min(options.splits, UCI_SETS[name].splits))
        left = [s for s in every if (name, method, s, options.epochs) not in done]
        for first in range(0, len(left), options.together):
            if time.monotonic() - started > 60 * options.minutes:
                break
            group = left[first : first + options.together]
            new = run(name, method, group, options.epochs, options.device, not options.eager)
            runs += new
            save("uci", {"summary": summary(runs), "runs": runs}, folder=options.results)
            print(f"{name} {method}: {len(new)} splits, {sum(r['seconds'] for r in new):.0f} s", flush=True)
    show(summary(runs))


if __name__ == "__main__":
    main()
