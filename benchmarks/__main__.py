"""The benchmark suite: the cost of every method and every peer, as a ratio to the plain network.

    make bench                                  on this machine's CPU, with the peers, at most 15 minutes
    python -m benchmarks --device cuda          on a GPU
    python -m benchmarks --report               only the plot, from the results file

Step, fit, prediction and memory (`suite.py`), and growth curves with their exponents (`growth.py`). Each part is saved
when it is done: a run that was interrupted, or ran out of minutes, goes on with the parts that are left. Results of
other sources or settings are not continued.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import growth
from contenders import PEERS
from environment import RESULTS, ROOT, environment, save, versions
from suite import METHODS, Problem

import bayeslim as bl

NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"title": "MLP 784-400-400-10", "inputs": 1_000, "examples": 512},
    "lenet5": {"title": "LeNet-5", "inputs": 200, "examples": 256},
}
SHARES = {"steps": 2.0, "predictions": 2.0, "fits": 3.0, "memory": 0.0}
"""The shares of time of the parts of a network; a growth curve has one share."""
SHARE_FOR_PREPARATION = 0.5
"""The fraction of the minutes that is left for first calls and last rounds."""


def name_of(device: str) -> str:
    """Return the name of the results file."""
    return f"suite_{device}"


def parts(options: argparse.Namespace) -> dict[str, tuple[float, Callable[[float], Any]]]:
    """List the parts of the suite: their share of time, and what they run."""
    found: dict[str, tuple[float, Callable[[float], Any]]] = {}
    for axis in options.growth:

        def curve(seconds: float, axis: str = axis) -> Any:
            return growth.curves(axis, options.device, seconds, options.small)

        found[f"growth {axis}"] = 1.0, curve
    for network in options.networks:
        facts = NETWORKS[network]

        def problem(network: str = network, facts: dict[str, Any] = facts) -> Problem:
            small = {"hidden": 16} if options.small and network == "mlp" else {}
            sizes = (20, 256) if options.small else (facts["inputs"], facts["examples"])
            return Problem.of(bl.zoo.create(network, **small), options.device, *sizes)

        for part, share in SHARES.items():

            def run(seconds: float, part: str = part, problem: Callable[[], Problem] = problem) -> Any:
                return getattr(problem(), part)(seconds, options.contenders)

            found[f"{network} {part}"] = share, run
    return found


def continued(options: argparse.Namespace, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """Read the finished parts of an earlier run with the same settings and sources, and their seconds."""
    path = options.results / f"{name_of(options.device)}.json"
    if options.fresh or not path.exists():
        return {}, {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    same = stored.get("settings") == settings and stored["environment"]["source"] == environment()["source"]
    return (stored["parts"], stored.get("seconds", {})) if same else ({}, {})


def measure(options: argparse.Namespace) -> bool:
    """Run the parts that are left, while there is time; say whether all are done."""
    began = time.monotonic()
    settings = {
        "networks": options.networks, "growth": options.growth, "contenders": options.contenders,
        "small": options.small, "peers": versions(PEERS),
    }  # fmt: skip
    done, spent = continued(options, settings)
    wanted = parts(options)
    total = sum(share for share, _ in wanted.values())
    ran = False
    for name, (share, run) in wanted.items():
        if name in done:
            print(f"{name}: done before", flush=True)
            continue
        if ran and time.monotonic() - began > 60 * options.minutes:
            print("The minutes are over. Run it again to go on with what is left.", flush=True)
            return False
        seconds = 60 * options.minutes * (1 - SHARE_FOR_PREPARATION) * share / total
        since = time.monotonic()
        done[name], ran = run(seconds), True
        spent[name] = round(time.monotonic() - since, 1)
        print(f"{name}: {spent[name]:.0f} s, {time.monotonic() - began:.0f} s in all", flush=True)
        report = {"command": f"python -m benchmarks --device {options.device}", "settings": settings}
        report |= {"seconds": spent, "parts": done}
        save(name_of(options.device), report, PEERS, options.results)
    return True


def main() -> None:
    """Measure, save, and draw the plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--minutes", type=float, default=13, help="no part but the first begins later")
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--growth", nargs="*", choices=growth.SIZES, default=list(growth.SIZES), help="growth curves")
    parser.add_argument("--contenders", nargs="+", choices=[*METHODS, *PEERS], help="only these, for a trial")
    parser.add_argument("--small", action="store_true", help="a small network and few sizes, for a trial")
    parser.add_argument("--fresh", action="store_true", help="measure finished parts again")
    parser.add_argument("--report", action="store_true", help="only draw the plot")
    parser.add_argument("--no-report", action="store_true", help="do not draw the plot")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results file")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "pictures", help="the folder of the plot")
    options = parser.parse_args()
    if not options.report:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bl.errors.BayeslimWarning)  # two epochs leave standard deviations moving
            if not measure(options):
                return
    if not options.no_report:
        import suite_plot  # needs matplotlib, which the environment of the peers does not have

        name = name_of(options.device)
        found = json.loads((options.results / f"{name}.json").read_text(encoding="utf-8"))
        suite_plot.plot(found, options.pictures / f"{name}.svg")
        print("Now run: python benchmarks/documents.py --write")


if __name__ == "__main__":
    main()
