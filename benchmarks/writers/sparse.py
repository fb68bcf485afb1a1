"""Tables of networks trained to be sparse: `sparse_posteriors.py`, `entropy_coded.py` and `recipes.py`.

Goals and published numbers are constants here; all measured numbers come from the result files.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from writers.markdown import spread, table
from writers.pruning import NETWORKS

Run = Mapping[str, Any]
AUGMENTED_STRENGTH = {"lenet_300_100": 0.32, "lenet5": 0.5}
"""The chosen price of augmented units, in nats a weight."""


@dataclass(frozen=True)
class Group:
    """Runs of one network and one rule on one split of the images, or the files made from them."""

    runs: Sequence[Run]
    magnitude: Sequence[Run] = ()

    @property
    def compression(self) -> float:
        """How many times fewer weights are left, by the mean count."""
        return float(self.runs[0]["weights"] / statistics.mean(run["left"] for run in self.runs))

    def errors(self, key: str, way: str = "") -> list[float]:
        """List the test errors of the dense, the sparse or the magnitude network."""
        return [float((run[way] if way else run)[key]["test"]) for run in self.runs]

    def kilobytes(self, *, of_magnitude: bool = False) -> float:
        """Average the bytes of the files."""
        return statistics.mean(run["bytes"] for run in (self.magnitude if of_magnitude else self.runs)) / 1000

    def decoded(self, *, of_magnitude: bool = False) -> list[float]:
        """List the test errors of the decoded files."""
        return [float(run["decoded"]) for run in (self.magnitude if of_magnitude else self.runs)]


def trained(found: Mapping[str, Any], network: str, rule: str, split: str | None = None) -> Group:
    """Collect the runs of a rule; of augmented units, those at the chosen price."""
    runs = [r for r in found["runs"] if (r["network"], r["rule"], r.get("split")) == (network, rule, split)]
    if rule == "units, augmented":
        runs = [run for run in runs if run["strength"] == AUGMENTED_STRENGTH[network]]
    return Group(runs)


def files(found: Mapping[str, Any], network: str, kind: str = "") -> Group:
    """Collect the files of a kind: as the networks are called, without the seed."""
    by_name: dict[str, list[Run]] = {}
    for run in found["runs"]:
        by_name.setdefault(run["network"].rpartition("-")[0], []).append(run)
    return Group(by_name[f"{network}{kind}"], by_name[f"{network}{kind}-magnitude"])


def short(found: Mapping[str, Any], coded: Mapping[str, Any]) -> str:
    """Write the table of `docs/results.md`: what is left, and the errors with their spreads."""
    rows: list[list[str]] = []

    def weights(title: str, group: Group, published: str = "") -> None:
        cells = [spread(group.errors(key)) for key in ("dense", "sparse", "magnitude")]
        rows.append([title, f"1/{group.compression:.0f}", cells[0], f"**{cells[1]}**", cells[2], published])

    def size(title: str, group: Group, published: str = "") -> None:
        beside = f"{spread(group.decoded(of_magnitude=True))} in {group.kilobytes(of_magnitude=True):.1f} kB"
        rows.append([title, f"{group.kilobytes():.1f} kB", "", f"**{spread(group.decoded())}**", beside, published])

    published = {"lenet_300_100": "1/68 at 1.92 (Sparse VD)", "lenet5": "1/280 at 0.75 (Sparse VD)"}
    for name, title in NETWORKS.items():
        weights(f"{title}, non-zero weights", trained(found, name, "weights"), published[name])
        weights("augmented", trained(found, name, "weights, augmented", "official"))
    published = {"lenet_300_100": "8.6 kB at 1.9 (Oktay et al.)", "lenet5": "1.5 kB at 0.96 (MIRACLE)"}
    for name, title in NETWORKS.items():
        size(f"{title}, bytes", files(coded, name), published[name])
        size("augmented", files(coded, name, "-augmented"))
    published = {"lenet_300_100": "1/28 at 1.6 (VIBNet)", "lenet5": "1/156 at 1.0 (BC-GHS)"}
    for name, title in NETWORKS.items():
        weights(f"{title}, by units (gates)", trained(found, name, "units"), published[name])
        weights("augmented", trained(found, name, "units, augmented", "official"))
    lstm = "LSTM of 128 units on rows of MNIST, non-zero weights (one seed)"
    weights(lstm, trained(found, "lstm", "weights"))
    vgg = "VGG-like on CIFAR-10, non-zero weights (one seed)"
    weights(vgg, trained(found, "vgg", "weights"), "1/65 at no loss (Sparse VD)")
    weights("The same of twice the width", trained(found, "vgg_wide", "weights"))
    return table(["", "left", "dense", "sparse", "magnitude", "published"], rows)


def against_goals(found: Mapping[str, Any], coded: Mapping[str, Any]) -> str:
    """Write the table of `benchmarks/README.md`: goals, and which were missed."""
    rows: list[list[str]] = []

    def row(title: str, rule: str, goal: str, reached: str, met: bool, beside: str, published: str) -> None:
        rows.append([title, f"`{rule}`", goal, reached if met else f"**missed**: {reached}", beside, published])

    def weights(
        title: str, rule: str, group: Group, goal: tuple[int, float] | None = None, published: str = "", way: str = ""
    ) -> None:
        error = statistics.mean(group.errors("sparse", way))
        met = goal is None or (group.compression >= goal[0] and round(error, 2) <= goal[1])
        words = "" if goal is None else f"{goal[0]}x at {goal[1]:g} %"
        beside = f"{statistics.mean(group.errors('magnitude', way)):.2f} %"
        row(title, rule, words, f"{group.compression:.0f}x at {error:.2f} %", met, beside, published)

    def size(title: str, group: Group, goal: tuple[int, float] | None = None, published: str = "") -> None:
        ours, theirs = (statistics.mean(group.decoded(of_magnitude=m)) for m in (False, True))
        met = goal is None or (group.kilobytes() <= goal[0] and round(ours, 2) <= goal[1])
        words = "" if goal is None else f"{goal[0]} kB at {goal[1]:g} %"
        beside = f"{group.kilobytes(of_magnitude=True):.1f} kB at {theirs:.2f} %"
        row(title, "entropy_coded.py", words, f"{group.kilobytes():.1f} kB at {ours:.2f} %", met, beside, published)

    goals = {"lenet_300_100": (70, 1.92), "lenet5": (220, 0.80)}
    published = {"lenet_300_100": "68x at 1.92 % (Sparse VD)", "lenet5": "280x at 0.75 % (Sparse VD)"}
    for name, title in NETWORKS.items():
        weights(f"{title}, non-zeros", "weights", trained(found, name, "weights"), goals[name], published[name])
        if name == "lenet5":
            weights("shifted", "weights, shifted", trained(found, name, "weights, shifted"))
        weights("augmented", "weights, augmented", trained(found, name, "weights, augmented", "official"))
    goals = {"lenet_300_100": (20, 1.8), "lenet5": (100, 1.0)}
    published = {"lenet_300_100": "28x at 1.6 % (VIBNet)", "lenet5": "156x at 1.0 % (BC-GHS)"}
    for name, title in NETWORKS.items():
        group = trained(found, name, "units")
        weights(f"{title}, units", "units", group, goals[name], published[name])
        weights("taught", "units", group, way="taught")
        weights("shifted", "units", group, way="shifted")
        augmented = trained(found, name, "units, augmented", "official")
        weights(f"augmented, {AUGMENTED_STRENGTH[name]:g} nats", "units, augmented", augmented)
    goals = {"lenet_300_100": (9, 1.95), "lenet5": (3, 1.0)}
    published = {"lenet_300_100": "8.6 kB at 1.9 % (Oktay et al.)", "lenet5": "1.5 kB at 0.96 % (MIRACLE)"}
    for name, title in NETWORKS.items():
        size(f"{title}, bytes", files(coded, name), goals[name], published[name])
        size("augmented", files(coded, name, "-augmented"))
    for name, title, goal in (
        ("lstm", "LSTM", "10x at no loss"),
        ("vgg", "VGG-like, width 1", "40x at 0.5 points"),
        ("vgg_wide", "VGG-like, width 2", "40x at 0.5 points"),
    ):
        group = trained(found, name, "weights")
        dense, ours, theirs = (group.errors(key)[0] for key in ("dense", "sparse", "magnitude"))
        met = group.compression >= int(goal.partition("x")[0]) and ours - dense <= (0 if name == "lstm" else 0.5)
        reached = f"{group.compression:.0f}x, {dense:.2f} to {ours:.2f} %"
        known = "65x at no loss (Sparse VD)" if name == "vgg" else ""
        row(f"{title} (one seed)", "weights", goal, reached, met, f"{theirs:.2f} %", known)
    for name, title in (("lenet_300_100", "MNIST"), ("vgg", "VGG-like (one seed)")):
        pruned = min(run["pruned"] for run in trained(found, name, "random labels").runs)
        reached = f"{pruned:g} %, chance"
        row(f"random labels, {title}", "random labels", "99.9 % pruned", reached, pruned >= 99.9, "", "100 %")
    return table(["", "rule", "goal", "reached", "magnitude", "published"], rows)


def prices(found: Mapping[str, Any]) -> str:
    """Write augmented units at all prices."""
    rows = []
    for name, title in NETWORKS.items():
        kind = (name, "units, augmented", "official")
        runs = [run for run in found["runs"] if (run["network"], run["rule"], run.get("split")) == kind]
        for place, price in enumerate(sorted({run["strength"] for run in runs})):
            group = Group([run for run in runs if run["strength"] == price])
            star = " *" if price == AUGMENTED_STRENGTH[name] else ""
            cells = [f"{statistics.mean(group.errors(key)):.2f} %" for key in ("sparse", "magnitude")]
            rows.append(["" if place else title, f"{price:g}{star}", f"{group.compression:.0f}x", *cells])
    return table(["", "nats a weight", "left", "gates", "magnitude"], rows)


UNSEEN = {
    "non-zeros": ({"lenet_300_100": (70, 1.92), "lenet5": (220, 0.80)}, ("68x at 1.92 %", "280x at 0.75 %"), "weights"),
    "units": ({"lenet_300_100": (20, 1.8), "lenet5": (100, 1.0)}, ("28x at 1.6 %", "156x at 1.0 %"), "units"),
    "bytes": ({"lenet_300_100": (9, 1.95), "lenet5": (3, 1.0)}, ("8.6 kB at 1.9 %", "1.5 kB at 0.96 %"), ""),
}


def unseen(found: Mapping[str, Any], coded: Mapping[str, Any]) -> str:
    """Write the gentle and the augmented rules on test images that nothing was chosen on."""
    rows = []
    for place, (name, title) in enumerate(NETWORKS.items()):
        for count, (goals, published, rule) in UNSEEN.items():
            size, error = goals[name]
            cells = []
            for kind in ("gentle", "augmented"):
                if rule:
                    group = trained(found, name, f"{rule}, {kind}", "unseen")
                    dense, ours, theirs = (statistics.mean(group.errors(k)) for k in ("dense", "sparse", "magnitude"))
                    reached, met = f"{group.compression:.0f}x at {ours:.2f} %", group.compression >= size
                    beside = f"({dense:.2f}, {theirs:.2f})"
                else:
                    group = files(coded, name, f"-{kind}-unseen")
                    ours, theirs = (statistics.mean(group.decoded(of_magnitude=m)) for m in (False, True))
                    reached, met = f"{group.kilobytes():.1f} kB at {ours:.2f} %", group.kilobytes() <= size
                    beside = f"({group.kilobytes(of_magnitude=True):.1f} kB at {theirs:.2f})"
                missed = "" if met and round(ours, 2) <= error else "**missed**: "
                cells.append(f"{missed}{reached} {beside}")
            goal = f"{size}x at {error:g} %" if rule else f"{size} kB at {error:g} %"
            rows.append([f"{title}, {count}", goal, *cells, published[place]])
    return table(["", "goal", "gentle", "augmented", "published"], rows)


def fresh(found: Mapping[str, Any], coded: Mapping[str, Any]) -> str:
    """Write the augmented rules on fresh test images, seed by seed where they differ most."""
    rows = []
    for count, rule in (("non-zeros", "weights"), ("units", "units")):
        for name, title in NETWORKS.items():
            group = trained(found, name, f"{rule}, augmented", "fresh")
            reached = f"{group.compression:.0f}x at {statistics.mean(group.errors('sparse')):.2f} %"
            if name == "lenet5":
                each = [Group([run]) for run in sorted(group.runs, key=lambda run: -run["left"])]
                by_seed = [f"{one.compression:.0f}x at {one.errors('sparse')[0]:.2f} %" for one in each]
                reached += f" ({', '.join(by_seed)})"
            beside = [f"{statistics.mean(group.errors(key)):.2f} %" for key in ("magnitude", "dense")]
            price = f", {AUGMENTED_STRENGTH[name]:g} nats" if rule == "units" else ""
            rows.append([f"{title}, {count}{price}", reached, *beside])
    for name, title in NETWORKS.items():
        files_of = files(coded, name, "-augmented-fresh")
        cells = [
            f"{files_of.kilobytes(of_magnitude=m):.1f} kB at {statistics.mean(files_of.decoded(of_magnitude=m)):.2f} %"
            for m in (False, True)
        ]
        rows.append([f"{title}, bytes", *cells, ""])
    return table(["", "fresh test images", "magnitude", "dense"], rows)


RECIPES = {
    "sparse_vd": "weights", "relevance": "weights", "weights_and_units": "weights",
    "bottleneck": "units", "l0": "units", "jeffreys": "units", "log_normal": "units", "horseshoe": "units",
}  # fmt: skip
DROPOUTS = ("gaussian_dropout", "variational_dropout", "concrete_dropout")


def _recipe_rows(found: Mapping[str, Any], names: Sequence[str], write: Callable[[list[Run]], str]) -> list[list[str]]:
    def runs(recipe: str, network: str) -> list[Run]:
        return [run for run in found["runs"] if (run["recipe"], run["network"]) == (recipe, network)]

    return [[f"`{name}`", *(write(runs(name, network)) for network in NETWORKS)] for name in names]


def recipes(found: Mapping[str, Any]) -> str:
    """Write the recipes that cut: reduction, error, and the errors of the dense network and of magnitude."""

    def cell(runs: list[Run]) -> str:
        counted = "nonzeros" if RECIPES[runs[0]["recipe"]] == "weights" else "parameters"
        reduction = runs[0]["weights"] / statistics.mean(run[counted] for run in runs)
        errors = [statistics.mean(run[key]["test"] for run in runs) for key in ("sparse", "dense", "magnitude")]
        size = f"{reduction:.0f}x" if counted == "nonzeros" or reduction >= 100 else f"{reduction:.1f}x"
        return f"{size} at {errors[0]:.2f} ({errors[1]:.2f}, {errors[2]:.2f})"

    rows = _recipe_rows(found, tuple(RECIPES), cell)
    cuts = [RECIPES[row[0].strip("`")] for row in rows]
    lines = [[row[0], cut, *row[1:]] for row, cut in zip(rows, cuts, strict=True)]
    return table(["recipe", "cuts", *NETWORKS.values()], lines)


def dropouts(found: Mapping[str, Any]) -> str:
    """Write the recipes that cut nothing: error, NLL and calibration error, and the dense network's."""

    def cell(runs: list[Run]) -> str:
        parts = {
            way: [statistics.mean(run["scores"][way][key] for run in runs) for key in ("error", "nll", "ece")]
            for way in ("average", "dense")
        }
        ours, dense = (f"{e:.2f}, {n:.3f}, {c:.2f}" for e, n, c in parts.values())
        return f"{ours} ({dense})"

    return table(["recipe", *NETWORKS.values()], _recipe_rows(found, DROPOUTS, cell))
