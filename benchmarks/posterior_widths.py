"""Standard deviations of a mean-field posterior after short training, by where they start and how fast they move.

    python benchmarks/posterior_widths.py
    python benchmarks/posterior_widths.py --stationary

An MLP with 100 hidden units and the prior N(0, 1) is trained on three data sets for 5, 15 and 80 epochs. In "narrow"
every σ starts at 0.01, in the others at the default, min(0.03, 0.3 / √(fan-in)). `std_rate` is the learning rate of
log σ relative to that of the means; the default is 2, "faster" has 5. The loss is the negative ELBO per example, which
all minimise. The NLL is that of the average prediction of 64 draws on test data. A converged mean field can predict
worse than one that is still too narrow, because the ELBO penalises every weight. Every number is a mean of two seeds.

With `--stationary`, σ is set after a fifth of the epochs to the stationary point of the ELBO at the means of that time,
σ² = 1 / (N h + 1 / s²) for the prior N(0, s²), with the diagonal h of the Gauss-Newton matrix of the mean network.
Training then goes on.
"""

from __future__ import annotations

import argparse
import math
import warnings
from typing import Any

import torch
from environment import save
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.errors import BayeslimWarning
from bayeslim.families import DiagonalGaussian
from bayeslim.likelihoods import Categorical, Gaussian, Likelihood

EPOCHS = (5, 15, 80)
SEEDS = (0, 1)
STATIONARY = "stationary"
STATIONARY_AFTER = 0.2
"""The fraction of the epochs after which "stationary" sets σ."""

SETTINGS: dict[str, dict[str, Any]] = {
    "narrow": {"family": DiagonalGaussian(initial_std=0.01)},
    "default": {},
    "faster": {"std_rate": 5.0},
    STATIONARY: {},
}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor, Likelihood]:
    """Load the digits, flattened."""
    data = bl.data.load("digits")
    return data.train_x.flatten(1), data.train_y, data.test_x.flatten(1), data.test_y, Categorical()


def mnist() -> tuple[Tensor, Tensor, Tensor, Tensor, Likelihood]:
    """Load 1,000 training and 1,000 test images of MNIST, flattened."""
    data = bl.data.load("mnist")
    count = 1000
    return (
        data.train_x[:count].flatten(1), data.train_y[:count],
        data.test_x[:count].flatten(1), data.test_y[:count], Categorical(),
    )  # fmt: skip


def energy() -> tuple[Tensor, Tensor, Tensor, Tensor, Likelihood]:
    """Load the heating load of buildings (UCI energy), first split, standardised."""
    data = bl.data.load("energy", split=0)
    return data.train_x, data.train_y, data.test_x, data.test_y, Gaussian(0.1)


PROBLEMS = {"digits": digits, "mnist": mnist, "energy": energy}


def fitted(problem: str, epochs: int, settings: str, seed: int) -> dict[str, float]:
    """Train a network and measure its posterior."""
    x, y, test_x, test_y, likelihood = PROBLEMS[problem]()
    torch.manual_seed(seed)
    outputs = 1 if isinstance(likelihood, Gaussian) else int(y.max()) + 1
    model = nn.Sequential(nn.Linear(x.shape[1], 100), nn.ReLU(), nn.Linear(100, outputs))
    bnn = bl.bayesianize(model, bl.Variational(**SETTINGS[settings]), likelihood=likelihood)
    loader = bl.data.Loader(x, y, batch_size=128 if len(x) > 1000 else 32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BayeslimWarning)
        if settings == STATIONARY:
            first = max(1, round(STATIONARY_AFTER * epochs))
            bnn.fit(loader, epochs=first, seed=seed, progress=False)
            set_stationary_stds(bnn, x, y)
            result = bnn.fit(loader, epochs=epochs - first, seed=seed + 1, progress=False)
        else:
            result = bnn.fit(loader, epochs=epochs, seed=seed, progress=False)
    prediction = bl.predict(bnn, test_x, samples=64, generator=torch.Generator().manual_seed(seed))
    each = torch.stack([bnn.likelihood.log_prob(draw, test_y) for draw in prediction.samples])
    means = bnn.mean_network()(test_x)
    is_regression = isinstance(likelihood, Gaussian)
    errors = (means - test_y.view_as(means)).square() if is_regression else (means.argmax(1) != test_y).float()
    error = float(errors.mean().sqrt() if is_regression else errors.mean())
    stds = torch.cat([std.flatten() for std in bnn.posterior_.variance.values()]).sqrt()
    return {
        "loss": result.history[-1]["loss"],
        "median_std": float(stds.median()),
        "largest_tenth_std": float(stds.quantile(0.9)),
        "test_nll": float(-(each.logsumexp(0) - math.log(len(each))).mean()),
        "mean_network_error": error,
        "warned": float(any("still moving" in str(one.message) for one in caught)),
    }


@torch.no_grad()
def set_stationary_stds(bnn: bl.Bayesian, x: Tensor, y: Tensor) -> None:
    """Set every σ to the stationary point of the ELBO at the present means."""
    laplace = bl.Laplace("diag", curvature="exact")
    local = bl.bayesianize(bnn.mean_network(), laplace, likelihood=bnn.likelihood, sites="weights")
    local.fit(bl.data.Loader(x, y, batch_size=256, shuffle=False), progress=False)
    for name, variance in local.posterior_.variance.items():
        bnn.model.get_parameter(f"{name}_log_std").copy_(variance.sqrt().log())


def main() -> None:
    """Print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, nargs="+", default=EPOCHS)
    parser.add_argument("--stationary", action="store_true", help="measure the default and the stationary start")
    options = parser.parse_args()
    chosen = ["default", STATIONARY] if options.stationary else [name for name in SETTINGS if name != STATIONARY]
    torch.set_num_threads(1)
    rows = []
    print("problem  epochs  settings        loss  median σ  test NLL   error  warned")
    for problem in PROBLEMS:
        for epochs in options.epochs:
            for settings in chosen:
                runs = [fitted(problem, epochs, settings, seed) for seed in SEEDS]
                row = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
                rows.append({"problem": problem, "epochs": epochs, "settings": settings, **row, "seeds": runs})
                print(
                    f"{problem:7}  {epochs:6}  {settings:12}  {row['loss']:6.2f}  {row['median_std']:8.3f}  "
                    f"{row['test_nll']:8.3f}  {row['mean_network_error']:6.3f}  {row['warned']:.0%}",
                    flush=True,
                )
    described = {name: repr(bl.Variational(**SETTINGS[name])) for name in chosen}
    name = "posterior_widths_stationary" if options.stationary else "posterior_widths"
    print(save(name, {"settings": described, "rows": rows}))


if __name__ == "__main__":
    main()
