"""Nine UCI regression sets with their published splits: ten methods, with and without conformal intervals.

    python benchmarks/uci.py                          everything that has no result yet; a second call goes on
    python benchmarks/uci.py --device cuda            one GPU: all splits of a set are trained at once
    python benchmarks/uci.py --sets yacht --methods vi laplace --splits 2 --epochs 50
    python benchmarks/uci.py --table                  the table of the results so far

The network has one hidden layer of 50 ReLU units (100 for protein), weights and biases are N(0, 1) a priori, the noise
is learned, as in Li & Turner 2016 (arXiv:1602.02311); 500 epochs, Adam with 1e-3, batches of 32, 100 draws. Sets of
more than 5,000 rows take batches of 256 at a learning rate of 2e-3, and 10 draws. Methods that train single networks
(laplace, sghmc, dropout, ensemble) take five times the learning rate, for in so few steps their noise would not arrive.

    vi               mean-field Gaussians, the KL in closed form
    renyi-A          the bound of order A from draws: -inf, 0, 0.5, 1, inf; at -inf and 0 it is a heuristic (see README)
    laplace          the full Gauss-Newton matrix at the MAP estimate, prior precision and noise by evidence
    sghmc            scale-adapted SGHMC from the MAP estimate, 50 networks of the second half
    dropout          5 % of the hidden units, 100 masks
    ensemble         five MAP estimates from random starts

Scores are in the units of the targets: the root mean squared error of the mean, the negative log of the averaged
density, and the coverage and the mean width of the central 90 % interval. "Conformal" trains on four fifths of the
training part and calibrates the scaled intervals (`bl.conformal`) on the last fifth.

The networks of all splits are trained side by side, by `bl.fit_together` with a loader for each. VI is
`bl.Variational`, with one draw a step of its noise at the pre-activations. The bounds of other orders need draws of
all weights, and are those of `uci_renyi.py`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, save
from torch import Tensor, nn
from uci_renyi import INITIAL_LOG_VARIANCE, INITIAL_NOISE, INITIAL_SCALE, TEST_DRAWS, Networks, fit

import bayeslim as bl
from bayeslim.app.data.uci import UCI_SETS
from bayeslim.errors import BayeslimWarning
from bayeslim.results import Prediction
from bayeslim.train.progress import progress

ALPHAS = (-math.inf, 0.0, 0.5, 1.0, math.inf)
RENYI = {f"renyi-{alpha:g}": alpha for alpha in ALPHAS}
METHODS = ("vi", "laplace", "sghmc", "dropout", "ensemble", *RENYI)
COVERAGE = 0.9
LARGE_ROWS = 5000
MEMBERS, SAMPLES, DROPOUT = 5, 50, 0.05
POINT_LR_FACTOR = 5.0
LOG_VARIANCE_RATE = 0.5
"""The published networks train log σ² at the rate of the means, so log σ at half of it."""
SGHMC_START = 0.4
"""The part of the epochs that finds the MAP estimate at which SGHMC starts."""
ROWS_AT_ONCE = 5000
"""Rows of a prediction whose hidden activations are computed together."""

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


Predicts = Callable[[Tensor], Prediction]
"""The prediction of standardised targets on inputs (N, D)."""


@dataclass(frozen=True)
class Settings:
    """How networks are trained.

    Attributes:
        method: its name.
        epochs: passes over the data.
        batch: rows of a batch.
        lr: the learning rate of VI.
        draws: those of a step.
        hidden: the number of hidden units.
        seed: of weights, orders and noise.
    """

    method: str
    epochs: int
    batch: int
    lr: float
    draws: int
    hidden: int
    seed: int


def train(x: Tensor, y: Tensor, settings: Settings) -> list[Predicts]:
    """Train networks on inputs (S, N, D) and targets (S, N, 1) of S splits; return their predictions."""
    method = settings.method
    if method in RENYI:
        return trained_by_renyi(x, y, settings)
    if method == "vi":
        family = bl.families.DiagonalGaussian(math.exp(INITIAL_LOG_VARIANCE / 2))
        own = bl.Variational(family, std_rate=LOG_VARIANCE_RATE)
        return [averaged(bnn) for bnn in together(own, x, y, settings, settings.epochs)]
    if method == "dropout":
        return [averaged(bnn) for bnn in together(bl.MCDropout(), x, y, settings, settings.epochs)]
    loaders = [bl.data.Loader(*rows, settings.batch, seed=settings.seed) for rows in zip(x, y, strict=True)]
    epochs = round(SGHMC_START * settings.epochs) if method == "sghmc" else settings.epochs
    members = MEMBERS if method == "ensemble" else 1
    maps = together(bl.Variational(bl.families.Point()), x, y, settings, epochs, members)
    if method == "ensemble":
        return [ensemble(maps[first : first + MEMBERS]) for first in range(0, len(maps), MEMBERS)]
    own = bl.Laplace("full") if method == "laplace" else bl.SGHMC(SAMPLES, burn_in=0.5, adapt=True)
    found = [bl.bayesianize(one.mean_network(), own, likelihood=copy.deepcopy(one.likelihood)) for one in maps]
    if method == "sghmc":
        bl.fit_together(found, loaders, epochs=settings.epochs - epochs, seed=settings.seed)
        return [averaged(bnn) for bnn in found]
    for bnn, loader in zip(progress(found, method), loaders, strict=True):
        bnn.fit(loader, tune="evidence", progress=False)
    return [lambda x, bnn=bnn: bl.predict(bnn, x).to("cpu") for bnn in found]


def together(
    method: bl.Method, x: Tensor, y: Tensor, settings: Settings, epochs: int, members: int = 1
) -> list[bl.Bayesian]:
    """Train networks of all splits side by side, `members` of each."""
    torch.manual_seed(settings.seed)
    networks, loaders = [], []
    is_variational = settings.method == "vi"
    for own_x, own_y in zip(x, y, strict=True):
        loader = bl.data.Loader(own_x, own_y, settings.batch, seed=settings.seed)
        for _ in range(members):
            drops = [nn.Dropout(DROPOUT)] if settings.method == "dropout" else []
            layers = [nn.Linear(x.shape[2], settings.hidden), nn.ReLU(), *drops, nn.Linear(settings.hidden, 1)]
            model = nn.Sequential(*layers).to(x.device)
            if is_variational:
                for p in model.parameters():
                    nn.init.normal_(p, std=INITIAL_SCALE)
            likelihood = bl.likelihoods.Gaussian("learned", initial_noise=INITIAL_NOISE)
            networks.append(bl.bayesianize(model, method, likelihood=likelihood, sites="all"))
            loaders.append(loader)
    lr = settings.lr * (1.0 if is_variational else POINT_LR_FACTOR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BayeslimWarning)  # standard deviations still move: the published epochs
        bl.fit_together(networks, loaders, epochs=epochs, lr=lr, seed=settings.seed)
    return networks


def averaged(bnn: bl.Bayesian) -> Predicts:
    """Make the prediction of a fitted network: an average over draws, dropout masks or samples."""

    def predict(x: Tensor) -> Prediction:
        generator = torch.Generator(x.device).manual_seed(0)  # the same networks for every part
        samples = None if isinstance(bnn.method, bl.SGHMC) else TEST_DRAWS
        outputs = bl.predict(bnn, x, samples, generator=generator).samples
        return mixture(outputs, bnn.likelihood.noise.expand(len(outputs), 1, 1))

    return predict


def ensemble(members: Sequence[bl.Bayesian]) -> Predicts:
    """Make the prediction of several networks, each with the noise that it has learned."""
    networks = [bnn.mean_network().eval() for bnn in members]
    noise = torch.stack([bnn.likelihood.noise.detach() for bnn in members])[:, None, None]
    return lambda x: mixture(torch.stack([network(x) for network in networks]), noise)


def trained_by_renyi(x: Tensor, y: Tensor, settings: Settings) -> list[Predicts]:
    """Train with a Rényi bound from draws of all weights, by the networks of `uci_renyi.py`."""
    splits = [settings.seed + index for index in range(len(x))]
    networks = Networks(x.shape[2], splits, x.device.type, settings.hidden)
    alpha, rest = RENYI[settings.method], (settings.epochs, settings.draws, settings.seed, settings.batch, settings.lr)
    fit(networks, x, y, alpha, *rest)

    def predict(one: Networks, x: Tensor) -> Prediction:
        torch.manual_seed(0)  # the same networks for every part
        noise = one.noise(TEST_DRAWS)
        outputs = torch.cat([one.outputs(part[None], noise)[0][0] for part in x.split(ROWS_AT_ONCE)])
        return mixture(outputs.T[..., None], one.log_noise.exp().expand(TEST_DRAWS, 1, 1))

    return [partial(predict, networks.one(index)) for index in range(len(x))]


@torch.no_grad()
def mixture(outputs: Tensor, noise: Tensor) -> Prediction:
    """Average Gaussians around the outputs of draws, (K, N, 1), with their noise, (K, 1, 1)."""
    both = torch.cat([outputs, (2 * noise.log()).expand_as(outputs)], -1)
    return bl.likelihoods.Gaussian("heteroscedastic").predict(both.detach().double().cpu())


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
    predict: Predicts, held_out: tuple[Tensor, Tensor], x: Tensor, y: Tensor, scale: float
) -> dict[str, float]:
    """Score conformal intervals that are calibrated on held-out data."""

    def outputs(inputs: Tensor) -> Tensor:
        found = predict(inputs)
        return torch.cat([found.mean, found.variance.log()], -1)

    made = bl.conformal(outputs, [held_out], COVERAGE, likelihood=bl.likelihoods.Gaussian("heteroscedastic"))
    intervals: Any = made(x)
    off = intervals.prediction.mean.double() - y.double().cpu()
    return {
        "conformal_rmse": float(off.square().mean().sqrt()) * scale,
        "conformal_coverage": float(intervals.covers(y.cpu()).double().mean()),
        "conformal_width": float(intervals.widths.mean()) * scale,
    }


def run(name: str, method: str, splits: Sequence[int], epochs: int, device: str) -> list[dict[str, Any]]:
    """Train and score a method on some splits of a set."""
    started = time.monotonic()
    sets = [bl.data.load(name, split=split) for split in splits]
    is_large = UCI_SETS[name].rows > LARGE_ROWS
    batch, lr, draws = (256, 2e-3, 10) if is_large else (32, 1e-3, 100)
    settings = Settings(method, epochs, batch, lr, draws, 100 if name == "protein" else 50, splits[0])
    x, y = (torch.stack([getattr(d, part) for d in sets]).to(device) for part in ("train_x", "train_y"))
    held_out = len(x[0]) // 5  # the published splits are random: the last rows are a random choice
    whole = train(x, y, settings)
    proper = train(x[:, :-held_out], y[:, :-held_out], settings)
    found = []
    for index, (split, data) in enumerate(zip(splits, sets, strict=True)):
        scale, test_x = float(data.target_scale.std), data.test_x.to(device)
        calibration = x[index, -held_out:], y[index, -held_out:].cpu()
        own = scores(whole[index](test_x), data.test_y, scale)
        own |= conformal_scores(proper[index], calibration, test_x, data.test_y, scale)
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
                    is_known = len(values) > 1 and all(map(math.isfinite, values))
                    error = statistics.stdev(values) / math.sqrt(len(values)) if is_known else math.inf
                    cell[key] = [statistics.fmean(values), error]
                table.setdefault(name, {})[method] = cell
    return table


def matches(table: dict[str, Any]) -> list[str]:
    """List the sets on which the NLL of VI is as good as the published one.

    As good is a difference of at most two standard errors of both together.
    """
    found = []
    for name, cells in table.items():
        own = cells["vi"]["nll"] if "vi" in cells else [math.inf, math.inf]
        known, error = PUBLISHED_NLL[name][3], PUBLISHED_ERRORS[name][3]
        if math.isfinite(own[1]) and own[0] - known <= 2 * math.hypot(own[1], max(error, 0.005)):
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
    parser.add_argument("--table", action="store_true", help="print the table of the results so far, and train nothing")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    path = options.results / "uci.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    done = {tuple(r[key] for key in ("data", "method", "split", "epochs")) for r in runs}
    started = time.monotonic()
    sets = sorted(options.sets, key=lambda name: UCI_SETS[name].rows)
    # the bounds from draws take longer than all other methods together
    jobs = [(n, m) for last in (False, True) for n in sets for m in options.methods if (m in RENYI) == last]
    for name, method in [] if options.table else jobs:
        every = range(min(options.splits, UCI_SETS[name].splits))
        left = [s for s in every if (name, method, s, options.epochs) not in done]
        for first in range(0, len(left), options.together):
            if time.monotonic() - started > 60 * options.minutes:
                break
            group = left[first : first + options.together]
            new = run(name, method, group, options.epochs, options.device)
            runs += new
            save("uci", {"summary": summary(runs), "runs": runs}, folder=options.results)
            print(f"{name} {method}: {len(new)} splits, {sum(r['seconds'] for r in new):.0f} s", flush=True)
    show(summary(runs))


if __name__ == "__main__":
    main()
