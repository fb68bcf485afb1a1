"""The accuracy of links from Gaussian logits to class probabilities.

    python benchmarks/laplace_links.py
    python benchmarks/laplace_links.py --case "wine, perceptron"      one case; those of the same commit are kept

Networks are trained as usual and a Kronecker posterior is put around each, under the prior N(0, 1) and under the prior
tuned by evidence. The logits of test examples are then Gaussian, and every link is compared with the exact average of
the softmax over that Gaussian (10,000 draws): the total variation between the probabilities, the error of the expected
entropy of one network (`aleatoric`), and the negative log-likelihood of the test targets. The time is that of the link
alone; `linearise` is the time of the Gaussian logits themselves, in the same unit. Everything is averaged over seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from environment import RESULTS, environment, save
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.curvature.sweep import evaluation_replica
from bayeslim.likelihoods import Categorical
from bayeslim.predict import linearised, links

DRAWS = 10_000
LINKS: dict[str, tuple[str, int]] = {
    "auto": ("auto", 1),
    "joint, 32 draws": ("joint", 32),
    "joint, 256 draws": ("joint", 256),
    "extended-probit": ("extended-probit", 1),
    "probit": ("probit", 1),
    "bridge": ("bridge", 1),
}


def perceptron(inputs: int, hidden: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def convolutional(size: int, classes: int) -> nn.Module:
    stride = 1 if size < 20 else 2
    side = ((size - 3) // stride + 1) // 2
    layers = nn.Conv2d(1, 8, 3, stride), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * side**2, classes)
    return nn.Sequential(*layers)


def images(name: str, train: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = bl.data.load(name)
    return data.train_x[:train], data.train_y[:train], data.test_x[:200], data.test_y[:200]


def wine(name: str, train: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Load the quality of red wines, six grades, as classes."""
    data = bl.data.load(name)
    grades = data.train_y.unique()
    classes = lambda y: (y - grades).abs().argmin(1)  # noqa: E731
    return data.train_x[:train], classes(data.train_y)[:train], data.test_x, classes(data.test_y)


CASES: dict[
    str, tuple[Callable[[str, int], tuple[Tensor, Tensor, Tensor, Tensor]], str, int, Callable[[], nn.Module]]
] = {
    "digits, perceptron": (images, "digits", 1297, lambda: perceptron(64, 32, 10)),
    "digits, convolutions": (images, "digits", 1297, lambda: convolutional(8, 10)),
    "mnist 2000, perceptron": (images, "mnist", 2000, lambda: perceptron(784, 50, 10)),
    "mnist 2000, convolutions": (images, "mnist", 2000, lambda: convolutional(28, 10)),
    "wine, perceptron": (wine, "wine", 2000, lambda: perceptron(11, 50, 6)),
}


def trained(network: nn.Module, x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return network.eval()


def reference(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Average probabilities and entropies over many draws, independently of the links."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(1)
    probs, entropy = torch.zeros_like(mean), torch.zeros_like(mean[:, 0])
    chunks = DRAWS // 500
    for _ in range(chunks):
        noise = torch.randn(len(mean), mean.shape[1], 500, dtype=mean.dtype)
        each = (mean.unsqueeze(-1) + root @ noise).softmax(1)
        probs += each.mean(-1) / chunks
        entropy += torch.special.entr(each).sum(1).mean(-1) / chunks
    return probs, entropy


def measured(
    network: nn.Module, tune: str | None, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], seed: int
):
    likelihood = Categorical()
    bnn = bl.bayesianize(network, bl.Laplace(), likelihood=likelihood)
    bnn.fit([(x, y) for x, y in zip(train[0].split(500), train[1].split(500), strict=True)], tune=tune, progress=False)
    started = time.perf_counter()
    twin = evaluation_replica(bnn.model, test[0])
    parts = list(linearised.output_gaussians(twin, bnn.posterior_, [test[0]]))
    linearise = time.perf_counter() - started
    mean, covariance = (torch.cat(part).double() for part in zip(*parts, strict=True))
    exact, entropy = reference(mean, covariance)
    nll = lambda probs: float(-probs.gather(1, test[1].unsqueeze(1)).log().mean())  # noqa: E731
    distance = lambda probs: float((probs - exact).abs().sum(1).mean()) / 2  # noqa: E731
    unit = 1e6 / len(mean)
    rows = {
        "exact average": {"nll": nll(exact)},
        "plain network": {"nll": nll(mean.softmax(1)), "distance": distance(mean.softmax(1))},
        "linearise": {"microseconds": linearise * unit},
    }
    for name, (how, samples) in LINKS.items():
        generator = torch.Generator().manual_seed(seed)
        started = time.perf_counter()
        found = links.summarise(likelihood, mean, covariance, samples, how, generator)
        seconds = time.perf_counter() - started
        rows[name] = {
            "nll": nll(found.probs),
            "distance": distance(found.probs),
            "aleatoric": float((found.aleatoric - entropy).abs().mean()),
            "microseconds": seconds * unit,
        }
    return rows


def kept(settings: dict[str, int]) -> dict[str, dict]:
    """Read the rows that this commit has measured with the same settings."""
    path = RESULTS / "laplace_links.json"
    before = json.loads(path.read_text()) if path.exists() else None
    now = environment()
    if before is None or now["changed"] or before["environment"]["commit"] != now["commit"]:
        return {}
    return before["table"] if before["settings"] == settings else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--case", choices=CASES)
    arguments = parser.parse_args()
    settings = {"seeds": arguments.seeds, "epochs": arguments.epochs, "draws": DRAWS}
    table = kept(settings)
    for case, (load, name, count, make) in CASES.items():
        if arguments.case not in (None, case):
            continue
        x, y, test_x, test_y = load(name, count)
        runs: dict[str, list] = {"N(0, 1)": [], "evidence": []}
        for seed in range(arguments.seeds):
            torch.manual_seed(seed)
            network = trained(make(), x, y, arguments.epochs)
            for prior, found in runs.items():
                tune = None if prior == "N(0, 1)" else "evidence"
                found.append(measured(network, tune, (x, y), (test_x, test_y), seed))
        for prior, found in runs.items():
            rows = table[f"{case}, prior {prior}"] = {
                link: {key: round(statistics.mean(run[link][key] for run in found), 5) for key in found[0][link]}
                for link in found[0]
            }
            print(f"{case}, prior {prior}")
            for link, row in rows.items():
                print(f"  {link:18s}" + "".join(f"  {key} {value:.4g}" for key, value in row.items()), flush=True)
    save("laplace_links", {"settings": settings, "table": table})


if __name__ == "__main__":
    main()
