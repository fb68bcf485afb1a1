"""The Laplace approximation against laplace-torch: agreement and times.

    python benchmarks/laplace.py                    times of this library, and of laplace-torch where it is installed
    python benchmarks/laplace.py --threads 2        on two threads, in wall-clock time, instead of on one
    python benchmarks/laplace.py --agree            only the agreement

laplace-torch needs an environment of its own, with this library in it as well: pip install laplace-torch -e . Both run
in one process on the same network and inputs. All its backends are tried, and the fastest is compared. Contenders take
turns; a ratio is taken within its round, and the median is printed. Slow contenders get fewer inputs, and times are for
one input. They include the eigendecompositions, whose cost does not depend on the number of inputs.

Agreement is to 1e-4 for the marginal likelihood and the probit predictive: full, diagonal, last-layer and subnetwork
posteriors, and Kronecker ones of layers without a bias. With biases the two define different matrices: here a layer's
weight and bias are one block, there two; its BackPACK backend also counts the positions of a convolution in another
way. For a subnetwork of S of D weights the prior precision here is δ S/D.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, save, versions
from torch import Tensor, nn

import bayeslim as bl

sys.path = [folder for folder in sys.path if folder != str(Path(__file__).resolve().parent)]
"""The peer's package has this file's name."""

NETWORKS = ("lenet_300_100", "lenet5")
FIT_INPUTS = {"lenet_300_100": 60_000, "lenet5": 3_000}
"""Inputs for fits: enough that the eigendecompositions take a small share of the time."""
JACOBIAN_FIT_INPUTS = {"lenet_300_100": 200, "lenet5": 100}
"""Inputs for a peer's fits through Jacobians."""
PREDICTED_INPUTS = {"lenet_300_100": 2_000, "lenet5": 500}
PEER_PREDICTED_INPUTS = {"lenet_300_100": 40, "lenet5": 20}
SUBNETWORK_WEIGHTS = 1_000
PEERS = ("laplace-torch", "backpack-for-pytorch", "curvlinops-for-pytorch", "asdfghjkl")
BATCH = 500
GOALS = {
    "kron exact": {"lenet_300_100": 2.5, "lenet5": 1.4},
    "kron one backward": {"lenet_300_100": 2.3, "lenet5": 2.0},
    "predict": {"lenet_300_100": 1000.0, "lenet5": 70.0},
    "subnetwork": {"lenet_300_100": 50.0, "lenet5": 14.0},
}
"""The speed-up over the peer's fastest backend that each should reach."""

Batches = list[tuple[Tensor, Tensor]]
Action = Callable[[], Any]


def batches(count: int, size: int = BATCH) -> Batches:
    """Draw MNIST-shaped inputs with random labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 1, 28, 28, generator=generator)
    y = torch.randint(10, (count,), generator=generator)
    return list(zip(x.split(size), y.split(size), strict=True))


class Sized(list):
    """A list of batches that looks like a loader to the peer."""

    def __init__(self, content: Batches):
        super().__init__(content)
        self.dataset = [None] * sum(len(y) for _, y in content)


def ours(model: nn.Module, method: bl.Laplace, prior: float = 1.0) -> bl.Bayesian:
    likelihood = bl.likelihoods.Categorical()
    return bl.bayesianize(model, method, likelihood=likelihood, prior=bl.priors.Normal(prior**-0.5))


def our_fits(model: nn.Module, content: Batches) -> dict[str, Action]:
    methods = {
        "kron exact": bl.Laplace(curvature="exact"),
        "kron one backward": bl.Laplace(),
        "diagonal exact": bl.Laplace("diag", curvature="exact"),
        "subnetwork": bl.Laplace(subset=bl.Subnetwork(SUBNETWORK_WEIGHTS, "random"), curvature="exact"),
        "subnetwork one backward": bl.Laplace(subset=bl.Subnetwork(SUBNETWORK_WEIGHTS, "random")),
    }
    networks = {name: ours(model, method) for name, method in methods.items()}
    return {name: lambda bnn=bnn: bnn.fit(content, progress=False) for name, bnn in networks.items()}


def peer(model: nn.Module, structure: str, backend: Any, subset: str = "all", **options: Any) -> Any:
    from laplace import Laplace

    return Laplace(
        copy.deepcopy(model).eval(),
        "classification",
        subset_of_weights=subset,
        hessian_structure=structure,
        backend=backend,
        **options,
    )


def peer_backends() -> dict[str, dict[str, Any]]:
    """List the peer's curvature backends by the curvature they compute."""
    from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsGGN

    exact = {"backpack": BackPackGGN, "asdl": AsdlGGN, "curvlinops": CurvlinopsGGN}
    return {
        "kron exact": {name: {"backend": b} for name, b in exact.items()},
        "kron one backward": {
            name: {"backend": b, "backend_kwargs": {"stochastic": True}} for name, b in exact.items()
        },
        "diagonal exact": {name: {"backend": b} for name, b in exact.items()},
        "subnetwork": {name: {"backend": b} for name, b in exact.items()},
        "subnetwork one backward": {name: {"backend": b} for name, b in exact.items()},  # the peer has no other
    }


def peer_fit(model: nn.Module, what: str, settings: dict[str, Any], content: Sized) -> Action:
    structure = "full" if what.startswith("subnetwork") else "diag" if what.startswith("diagonal") else "kron"
    options: dict[str, Any] = dict(settings)
    if structure == "full":
        size = sum(p.numel() for p in model.parameters())
        chosen = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:SUBNETWORK_WEIGHTS].sort().values
        options |= {"subset": "subnetwork", "subnetwork_indices": chosen}
    return lambda: peer(model, structure, **options).fit(content)


def seconds(action: Action) -> float:
    """Time an action: in CPU time on one thread, in wall-clock time on several.

    CPU time is less sensitive to other processes on the machine.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    action()
    return clock() - start


def fastest_backend(model: nn.Module, what: str, content: Sized) -> str | None:
    """Find the peer's fastest backend for a fit, by one run of each that works."""
    times = {}
    for name, settings in peer_backends()[what].items():
        action = peer_fit(model, what, settings, content)
        try:
            action()
            times[name] = seconds(action)
        except Exception as error:  # a backend may refuse a network in any way
            print(f"  {what}: {name} fails ({type(error).__name__}: {str(error)[:70]})")
    return min(times, key=times.__getitem__) if times else None


def take_turns(actions: dict[str, tuple[Action, int]], rounds: int) -> dict[str, list[float]]:
    """Time all actions in seconds per input, in a new order in every round.

    Every action runs once before, untimed.
    """
    order, shuffle = list(actions), random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in actions}
    for action, _ in actions.values():
        action()
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            action, inputs = actions[name]
            times[name].append(seconds(action) / inputs)
    return times


def compare(network: str, rounds: int, rows: dict[str, Any], keep: Action) -> None:
    """Measure the times and speed-ups of fits and predictions of one network.

    Each row is saved as soon as it is measured, and a row that is there already is not measured again.
    """
    torch.manual_seed(0)
    model = bl.zoo.create(network).eval()
    content, few = Sized(batches(FIT_INPUTS[network])), Sized(batches(JACOBIAN_FIT_INPUTS[network], 100))
    installed = "laplace-torch" in versions(["laplace-torch"])
    for what, action in our_fits(model, content).items():
        if what in rows:
            continue
        actions = {"bayeslim": (action, FIT_INPUTS[network])}
        backend = None
        if installed:
            inputs, count = (content, FIT_INPUTS) if what.startswith("kron") else (few, JACOBIAN_FIT_INPUTS)
            backend = fastest_backend(model, what, Sized(inputs[: -(-len(inputs) // 6)]))
            if backend is not None:
                theirs = peer_fit(model, what, peer_backends()[what][backend], inputs)
                actions["laplace-torch"] = (theirs, count[network])
        rows[what] = row(take_turns(actions, rounds)) | ({"backend": backend} if backend else {})
        report(network, what, rows[what])
        keep()
    if "predict" in rows:
        return
    bnn = ours(model, bl.Laplace(curvature="exact"))
    bnn.fit(content, progress=False)
    x = torch.cat([x for x, _ in content])[: PREDICTED_INPUTS[network]]
    actions = {"bayeslim": (lambda: bl.predict(bnn, x, how="probit"), PREDICTED_INPUTS[network])}
    if installed:
        backend = fastest_backend(model, "kron exact", few)
        if backend is not None:
            theirs = peer(model, "kron", **peer_backends()["kron exact"][backend])
            theirs.fit(few)
            some = x[: PEER_PREDICTED_INPUTS[network]]
            actions["laplace-torch"] = (lambda: theirs(some, link_approx="probit"), PEER_PREDICTED_INPUTS[network])
    rows["predict"] = row(take_turns(actions, rounds))
    report(network, "predict", rows["predict"])
    keep()


def row(times: dict[str, list[float]]) -> dict[str, Any]:
    """Compute microseconds per input, and the median ratio within rounds."""
    found: dict[str, Any] = {
        name: {"us_per_input": float(f"{1e6 * statistics.median(each):.4g}")} for name, each in times.items()
    }
    if "laplace-torch" in times:
        ratios = [b / a for a, b in zip(times["bayeslim"], times["laplace-torch"], strict=True)]
        found["times_faster"] = float(f"{statistics.median(ratios):.4g}")
    return found


def report(network: str, what: str, found: dict[str, Any]) -> None:
    mine = found["bayeslim"]["us_per_input"]
    line = f"{network:14s} {what:24s} {mine:10.1f} us an input"
    if "times_faster" in found:
        goal = GOALS.get(what, {}).get(network)
        line += f", {found['times_faster']:.4g} times faster than laplace-torch"
        line += f" (goal {goal:g})" if goal else ""
    print(line, flush=True)


def agreement() -> dict[str, float]:
    """Compute the largest differences from the peer.

    Those of the marginal likelihood are relative, those of the predictive absolute.
    """
    from laplace.curvature import BackPackGGN, CurvlinopsGGN

    torch.manual_seed(0)
    x, images = torch.randn(60, 5, dtype=torch.float64), torch.randn(60, 1, 6, 6, dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    dense = trained(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), x, y)
    plain = trained(nn.Sequential(nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)), x, y)
    convolution = nn.Sequential(nn.Conv2d(1, 3, 3, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3, bias=False))
    convolution = trained(convolution, images, y)
    size, few = sum(p.numel() for p in dense.parameters()), 20
    chosen = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:few].sort().values
    subnetwork = {"subset": "subnetwork", "subnetwork_indices": chosen}
    exact = {"curvature": "exact"}
    cases = {
        "full": (dense, x, bl.Laplace("full", **exact), {"backend": CurvlinopsGGN}),
        "diagonal": (dense, x, bl.Laplace("diag", **exact), {"backend": BackPackGGN}),
        "last layer": (
            dense, x, bl.Laplace("full", "last-layer", **exact), {"backend": CurvlinopsGGN, "subset": "last_layer"}
        ),
        "subnetwork": (
            dense, x, bl.Laplace(subset=bl.Subnetwork(few, "random"), **exact), {"backend": BackPackGGN, **subnetwork}
        ),
        "Kronecker": (plain, x, bl.Laplace("kron", **exact), {"backend": CurvlinopsGGN}),
        "Kronecker convolution": (convolution, images, bl.Laplace("kron", **exact), {"backend": CurvlinopsGGN}),
    }  # fmt: skip
    differences = {}
    for name, (model, inputs, method, settings) in cases.items():
        content = Sized([(inputs[:25], y[:25]), (inputs[25:], y[25:])])
        bnn = ours(model, method, 2.0 * size / few if name == "subnetwork" else 2.0)
        bnn.fit(content, progress=False)
        theirs = peer(model, method.kind, prior_precision=2.0, **settings)
        theirs.fit(content)
        mine, other = bl.log_evidence(bnn, content).value, float(theirs.log_marginal_likelihood())
        new = torch.randn_like(inputs[:20])
        differences[f"{name} evidence"] = abs(mine - other) / abs(other)
        gap = bl.predict(bnn, new, how="probit").probs - theirs(new, link_approx="probit")
        differences[f"{name} predictive"] = float(gap.abs().max())
    return differences


def trained(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    """Train a small network for a few steps, in double precision."""
    model = model.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        (nn.functional.cross_entropy(model(x), y, reduction="sum") + penalty).backward()
        optimizer.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--agree", action="store_true", help="only compare numbers with the peer's")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    results: dict[str, Any] = {}
    if versions(["laplace-torch"]):
        results["agreement"] = agreement()
        for name, difference in results["agreement"].items():
            print(f"{name:34s} differs by {difference:.1e}")
        worst = max(results["agreement"].values())
        if worst > 1e-4:
            raise SystemExit(f"laplace-torch disagrees by {worst:.1e}, more than 1e-4.")
    if not arguments.agree:
        name = "laplace" if arguments.threads == 1 else f"laplace_{arguments.threads}_threads"
        file = arguments.results / f"{name}.json"
        results["times"] = json.loads(file.read_text())["times"] if file.exists() else {}
        for network in arguments.networks:
            rows = results["times"].setdefault(network, {})
            compare(network, arguments.rounds, rows, lambda: save(name, results, PEERS, arguments.results))


if __name__ == "__main__":
    main()
