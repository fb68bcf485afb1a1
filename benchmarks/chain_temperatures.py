"""The variance of samplers on minibatches, relative to the exact posterior's.

    python benchmarks/chain_temperatures.py

A linear regression in 8 dimensions, 400 examples, batches of 40, from shuffled epochs and with replacement. Every
network has 50 outputs, which are 50 independent chains. "before" is the usual learning rate of the method, as `lr=...`
sets it; "after" is the learning rate that `fit` chooses. The excess is the prediction of `fit` from the noise of the
gradients (`details["minibatch_excess"]`), for independent batches. The last column is `bl.diagnostics.temperature`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from environment import save
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import bayeslim as bl
from bayeslim.likelihoods import Gaussian

SIZE, NUM_DATA, BATCH, CHAINS, EPOCHS, SEED = 8, 400, 40, 50, 200, 1
METHODS = {
    "SGLD": bl.SGLD(samples=40),
    "PSGLD": bl.PSGLD(samples=40),
    "SGHMC": bl.SGHMC(samples=40),
    "SGHMC(adapt=True)": bl.SGHMC(samples=40, adapt=True),
    "SGNHT": bl.SGNHT(samples=40),
}
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(NUM_DATA, SIZE, generator=GENERATOR).double()
Y = X @ torch.randn(SIZE, 1, generator=GENERATOR).double() + torch.randn(NUM_DATA, 1, generator=GENERATOR).double()
TARGETS = Y.expand(-1, CHAINS).contiguous()
COVARIANCE = torch.linalg.inv(X.T @ X + torch.eye(SIZE))
MEAN = (COVARIANCE @ X.T @ Y)[:, 0]


def batches(replacement: bool) -> Any:
    """Load shuffled epochs, or batches drawn with replacement."""
    if not replacement:
        return bl.data.Loader(X, TARGETS, batch_size=BATCH)
    data = TensorDataset(X, TARGETS)
    return DataLoader(data, batch_size=BATCH, sampler=RandomSampler(data, replacement=True))


def sampled(name: str, replacement: bool, is_chosen: bool, epochs: int) -> dict[str, Any]:
    """Run a sampler and compare its draws with the exact posterior."""
    torch.manual_seed(SEED)
    model = nn.Linear(SIZE, CHAINS, bias=False).double()
    bnn = bl.bayesianize(model, METHODS[name], likelihood=Gaussian(1.0), num_data=NUM_DATA)
    lr = None if is_chosen else METHODS[name].default_lr(bnn)
    result = bnn.fit(batches(replacement), epochs=epochs, lr=lr, seed=SEED, progress=False)
    off = bnn.posterior_.values["weight"] - MEAN
    return {
        "method": name,
        "batches": "with replacement" if replacement else "shuffled epochs",
        "rate": "chosen" if is_chosen else lr,
        "variance_over_exact": float((off.square().mean((0, 1)) / COVARIANCE.diagonal()).mean()),
        "minibatch_excess": result.details["minibatch_excess"][0],
        "temperature": bl.diagnostics.temperature(bnn, [(X, TARGETS)]).value,
    }


def main() -> None:
    """Print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'method':18}  {'batches':16}  before  after  excess before  temperature before  after")
    for name in METHODS:
        for replacement in (False, True):
            before, after = (sampled(name, replacement, is_chosen, options.epochs) for is_chosen in (False, True))
            rows += [before, after]
            print(
                f"{name:18}  {before['batches']:16}  {before['variance_over_exact']:6.2f}  "
                f"{after['variance_over_exact']:5.2f}  {before['minibatch_excess']:13.2f}  "
                f"{before['temperature']:18.2f}  {after['temperature']:5.2f}",
                flush=True,
            )
    print(save("chain_temperatures", {"epochs": options.epochs, "rows": rows}))


if __name__ == "__main__":
    main()
