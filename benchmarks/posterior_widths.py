"""Standard deviations of a mean-field posterior by the learning rate of log σ.

    python benchmarks/posterior_widths.py

An MLP with 100 hidden units and the prior N(0, 1) is trained on three data sets for 5, 15 and 80 epochs. With
`std_rate=1`, log σ has the learning rate of the means; with 10 it has ten times that rate. The default is 2. The loss
is the negative ELBO per example, which both minimise. The NLL is that of the average prediction of 64 draws on test
data. A converged mean field can predict worse than one that is still too narrow, because the ELBO penalises every
weight. A cold posterior, `temperature=0.1`, has a smaller penalty; its loss is that of the tempered objective.
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
from bayeslim.likelihoods import Categorical, Gaussian, Likelihood

EPOCHS = (5, 15, 80)
SETTINGS = ({"std_rate": 1.0}, {"std_rate": 10.0}, {"std_rate": 10.0, "temperature": 0.1})
SEED = 0


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor, Likelihood]:
    """Load the digits, flattened."""
    data = bl.data.load("digits")
    return data.train_x.flatten(1), data.train_y, data.test_x.flatten(1), data.test_y, Categorical()


def moons() -> tuple[Tensor, Tensor, Tensor, Tensor, Likelihood]:
    """Draw two interleaved half circles with noise."""
    generator = torch.Generator().manual_seed(SEED)
    angle, y = torch.rand(1000, generator=generator) * math.pi, torch.randint(2, (1000,), generator=generator)
    centre = torch.stack([angle.cos() + y * (1 - 2 * angle.cos()), angle.sin() + y * (0.5 - 2 * angle.sin())], 1)
    x = centre + 0.2 * torch.randn(1000, 2, generator=generator)
    return x[:500], y[:500], x[500:], y[500:], Categorical()


def sine() -> tuple[Tensor, Tensor, Tensor, Tensor, Likelihood]:
    """Draw a sine with noise."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.rand(500, 1, generator=generator) * 6 - 3
    y = torch.sin(2 * x) + 0.2 * torch.randn(500, 1, generator=generator)
    return x[:250], y[:250], x[250:], y[250:], Gaussian(0.2)


PROBLEMS = {"digits": digits, "moons": moons, "sine": sine}


def fitted(problem: str, epochs: int, settings: dict[str, float]) -> dict[str, Any]:
    """Train a network and measure its posterior."""
    x, y, test_x, test_y, likelihood = PROBLEMS[problem]()
    torch.manual_seed(SEED)
    outputs = 1 if isinstance(likelihood, Gaussian) else int(y.max()) + 1
    model = nn.Sequential(nn.Linear(x.shape[1], 100), nn.ReLU(), nn.Linear(100, outputs))
    bnn = bl.bayesianize(model, bl.Variational(**settings), likelihood=likelihood)
    loader = bl.data.Loader(x, y, batch_size=128 if len(x) > 1000 else 32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BayeslimWarning)
        result = bnn.fit(loader, epochs=epochs, seed=SEED, progress=False)
    prediction = bl.predict(bnn, test_x, samples=64, generator=torch.Generator().manual_seed(SEED))
    each = torch.stack([bnn.likelihood.log_prob(draw, test_y) for draw in prediction.samples])
    stds = torch.cat([std.flatten() for std in bnn.posterior_.variance.values()]).sqrt()
    return {
        "problem": problem,
        "epochs": epochs,
        "temperature": 1.0,
        **settings,
        "loss": result.history[-1]["loss"],
        "median_std": float(stds.median()),
        "largest_tenth_std": float(stds.quantile(0.9)),
        "test_nll": float(-(each.logsumexp(0) - math.log(len(each))).mean()),
        "warned": any("still moving" in str(one.message) for one in caught),
    }


def main() -> None:
    """Print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, nargs="+", default=EPOCHS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("problem  epochs  std_rate  temperature    loss  median σ  test NLL  warned")
    for problem in PROBLEMS:
        for epochs in options.epochs:
            for settings in SETTINGS:
                row = fitted(problem, epochs, settings)
                rows.append(row)
                print(
                    f"{problem:7}  {epochs:6}  {row['std_rate']:8g}  {row['temperature']:11g}  {row['loss']:6.2f}  "
                    f"{row['median_std']:8.3f}  {row['test_nll']:8.3f}  {'yes' if row['warned'] else 'no'}",
                    flush=True,
                )
    print(save("posterior_widths", {"rows": rows}))


if __name__ == "__main__":
    main()
