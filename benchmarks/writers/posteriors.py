"""Tables of how good posteriors and their predictions are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from writers.markdown import listed, table

LINKS = {
    "auto": "auto",
    "joint, 32 draws": "joint, 32 draws",
    "extended-probit": "extended probit",
    "probit": "probit",
    "bridge": "bridge",
    "plain network": "plain network",
}


def laplace_links(found: Mapping[str, Any]) -> str:
    """Write the distance of every link to the exact average, and its NLL."""
    rows = []
    for case, links in found["table"].items():
        title = case.replace("prior evidence", "tuned").replace("prior ", "")
        cells = [f"{links[name]['distance']:.3f} / {links[name]['nll']:.2f}" for name in LINKS]
        rows.append([title, f"{links['exact average']['nll']:.2f}", *cells])
    return table(["", "exact average", *LINKS.values()], rows)


def report_studies(found: Mapping[str, Any]) -> str:
    """Write the choices of Bayes by Backprop, one at a time."""
    kinds = found["table"]
    mixtures = {name: row for name, row in kinds["priors"].items() if name.startswith("mixture")}
    gaussians = {name: row for name, row in kinds["priors"].items() if name.startswith("Gaussian")}
    sizes = " / ".join(name.removeprefix("Gaussian (").rstrip(")") for name in gaussians)
    groups = {
        "KL weights: " + " / ".join(kinds["KL weights"]): kinds["KL weights"],
        "mixture " + " / ".join(name.removeprefix("mixture ") for name in mixtures): mixtures,
        f"Gaussian prior, std {sizes}": gaussians,
        "pixels " + ", ".join(kinds["pixels"]): kinds["pixels"],
    }
    rows = []
    for title, group in groups.items():
        values = group.values()
        nlls, eces = listed((row["nll"] for row in values), 3), listed((row["ece"] for row in values), 1)
        rows.append([title, listed((row["error"] for row in values), 2), nlls, f"{eces} %"])
    return table(["", "error", "NLL", "ECE"], rows)


WIDTHS = (("loss", 2), ("median_std", 3), ("test_nll", 2))
"""The columns that both tables of standard deviations have, and their digits."""


def _by_problem(rows: Sequence[Mapping[str, Any]], settings: Sequence[str]) -> dict[tuple[str, int], list[Any]]:
    found = {(row["problem"], row["epochs"], row["settings"]): row for row in rows}
    cases = dict.fromkeys((row["problem"], row["epochs"]) for row in rows)
    return {case: [found[*case, name] for name in settings] for case in cases}


def widths(found: Mapping[str, Any]) -> str:
    """Write the negative ELBO, σ and NLL by problem and epochs, for three settings."""
    rows = [
        [problem, epochs, *(listed((row[key] for row in own), digits) for key, digits in WIDTHS)]
        for (problem, epochs), own in _by_problem(found["rows"], ("narrow", "default", "faster")).items()
    ]
    return table(["", "epochs", "negative ELBO", "median σ", "test NLL"], rows)


def stationary_widths(found: Mapping[str, Any]) -> str:
    """Write the same for the default and for σ at the stationary point, with the mean network's error."""
    rows = []
    for (problem, epochs), own in _by_problem(found["rows"], ("default", "stationary")).items():
        cells = [listed((row[key] for row in own), digits) for key, digits in WIDTHS]
        errors = [row["mean_network_error"] for row in own]
        share = " / ".join(f"{100 * value:.2g}" for value in errors)
        rows.append([problem, epochs, *cells, listed(errors, 2) if problem == "energy" else f"{share} %"])
    return table(["", "epochs", "negative ELBO", "median σ", "test NLL", "error of the mean network"], rows)


def chain_temperatures(found: Mapping[str, Any]) -> str:
    """Write the variance of draws over the exact one, at the usual and at the chosen rate."""
    ways = ("shuffled epochs", "with replacement")
    by_method: dict[str, dict[tuple[str, bool], float]] = {}
    for row in found["rows"]:
        own = by_method.setdefault(row["method"], {})
        own[row["batches"], row["rate"] == "chosen"] = row["variance_over_exact"]
    rows = [
        [f"`{name}`", *(f"{own[way, False]:.2f} / **{own[way, True]:.2f}**" for way in ways)]
        for name, own in by_method.items()
    ]
    return table(["", *ways], rows)


def uci_renyi(found: Mapping[str, Any]) -> str:
    """Write NLL and RMSE beside the published ones."""

    def cell(order: Mapping[str, Any], key: str) -> str:
        ours, theirs = order[key], order["published"][key]
        return f"{ours[0]:.2f} ± {ours[1]:.2f} ({theirs[0]:.2f} ± {theirs[1]:.2f})"

    parts = (("1", "nll"), ("1", "rmse"), ("0.5", "nll"))
    by_order = {name: {f"{float(a):g}": row for a, row in orders.items()} for name, orders in found["summary"].items()}
    rows = [[name, *(cell(orders[a], key) for a, key in parts)] for name, orders in by_order.items()]
    return table(["", *(f"{key.upper()} at α = {a}" for a, key in parts)], rows)


MANY = (
    "map", "mc dropout", "deep ensemble", "snapshot", "swag", "cyclical sghmc", "subnetwork sgld", "variational",
    "laplace",
)  # fmt: skip


def many_models(found: Mapping[str, Any]) -> str:
    """Write all methods on MNIST, and their students."""
    rows = []
    for name in MANY:
        row = found["summary"]["mnist"][name]
        aurocs = " / ".join(f"{row[key]['mean']:.0f}" for key in ("kmnist", "notmnist", "fashion-mnist"))
        student = f"{row['student error']['mean']:.2f}" if "student error" in row else ""
        error = f"{row['error']['mean']:.2f} ± {row['error']['std']:.2f}"
        nll, calibration = (row[key]["mean"] for key in ("nll", "ece"))
        scores = [f"{nll:.3f}", f"{calibration:.1f} %", aurocs, f"{found['training']['mnist'][name]:.1f}"]
        rows.append([name, error, *scores, f"{found['passes']['mnist'][name]:.2f}", student])
    return table(["", "error %", "NLL", "ECE", "AUROC", "training", "passes", "student's error %"], rows)


def many_regressions(found: Mapping[str, Any]) -> str:
    """Write all methods on Concrete and Energy, and their students."""
    scores = (("rmse", 2), ("nll", 2), ("ece", 1))
    keys = (*scores, ("training", 1), *((f"student {key}", digits) for key, digits in scores))
    rows = []
    for name in MANY:
        both = [
            {**found["summary"][data][name], "training": {"mean": found["training"][data][name]}}
            for data in ("concrete", "energy")
        ]
        rows.append([name, *(listed((r[k]["mean"] for r in both), d) if k in both[0] else "" for k, d in keys)])
    heads = ["RMSE", "NLL", "calibration", "training", "student's RMSE", "NLL", "calibration"]
    return table(["", *heads], rows)


def particle_passes(found: Mapping[str, Any]) -> str:
    """Write the cost of predictions from several networks; a cost above its aim has a star."""
    rows = []
    for device in ("cpu", "cuda"):
        for row in found.get(device, {}).get("rows", ()):
            if "passes_of_predict" not in row:
                continue
            slow = row["passes_of_predict"] > row["members"] * (1.2 if row["milliseconds_of_a_pass"] >= 1 else 2)
            before, compiled = row["before"], row.get("passes_of_compiled")
            rows.append(
                [
                    device, row["network"], row["inputs"], row["members"], row["milliseconds_of_a_pass"],
                    f"{before['passes']} / {before['passes_with_uncertainty']}" if before else "",
                    f"{row['passes_of_predict']}{'*' * slow}", row["passes_of_loop"],
                    "" if compiled is None else f"{compiled}{'*' * (compiled > row['members'])}",
                ]
            )  # fmt: skip
    heads = ["device", "network", "inputs", "S", "ms a pass", "before, mean / all", "`predict`", "loop"]
    return table([*heads, "`bl.compiled`"], rows)


def out_of_distribution(found: Mapping[str, Any]) -> str:
    """Write the test error and the AUROC of the entropy against other images."""
    sets = {"fashion-mnist": "Fashion-MNIST", "kmnist": "KMNIST", "notmnist": "notMNIST"}
    rows = [
        [name, f"{row['error']['mean']:.2f}", *(f"{row[key]['mean']:.1f}" for key in sets)]
        for name, row in found["table"].items()
    ]
    return table(["posterior", "test error, %", *(f"{title}, AUROC in %" for title in sets.values())], rows)


def variational_pruning(found: Mapping[str, Any]) -> str:
    """Write test errors by the fraction cut, for both priors and both rules."""
    curves = {(prior, rule): points for prior, rules in found["test_error"].items() for rule, points in rules.items()}
    words = {"snr": "signal to noise", "magnitude": "magnitude"}
    rows = [
        [f"{prior} prior, {words[rule]}", *(f"{value:.2f}" for value in points.values())]
        for (prior, rule), points in curves.items()
    ]
    return table(["", *(f"{100 * float(s):g} % cut" for s in next(iter(curves.values())))], rows)


def continual(found: Mapping[str, Any]) -> str:
    """Write the mean accuracy after the last task."""
    rows = [
        [kind, rule, result["tasks"], f"{statistics.mean(result['accuracies_percent']):.1f}"]
        for kind, rules in found["summary"].items()
        for rule, result in rules.items()
    ]
    return table(["tasks of MNIST", "rule", "number of tasks", "mean accuracy, %"], rows)
