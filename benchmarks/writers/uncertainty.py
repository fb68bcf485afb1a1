"""Tables of uncertainty in use: regression with intervals, labels asked for, and adversarial inputs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from active_learning import RULES
from adversarial import METHODS
from uci import METHODS as UCI_METHODS
from uci import PUBLISHED_NLL, PUBLISHED_RMSE, RENYI

from writers.markdown import spread, table

TITLES = {"lenet_300_100": "LeNet-300-100", "lenet5": "LeNet-5", "vgg": "VGG-like"}
LABELS_SHOWN = (20, 50, 100, 150, 200, 250, 300)
ATTACKS = ("fgsm 0.1", "pgd 0.1")


def uci(found: Mapping[str, Any]) -> str:
    """Write NLL, RMSE and coverage of every set and method, beside the published ones."""
    summary = found["summary"]
    methods = [method for method in UCI_METHODS if any(method in own for own in summary.values())]
    tables = []
    for heading, write in (("NLL", _nll), ("RMSE", _rmse), ("covered, %", _covered)):
        rows = [[method, *(write(name, method, summary[name].get(method)) for name in summary)] for method in methods]
        tables.append(table([heading, *summary], rows))
    return "\n".join(tables)


def _nll(name: str, method: str, own: Mapping[str, Any] | None) -> str:
    if own is None:
        return ""
    text = f"{own['nll'][0]:.2f} ± {own['nll'][1]:.2f}"
    place = list(RENYI).index(method) if method in RENYI else 3 if method == "vi" else None
    return text if place is None else f"{text} ({PUBLISHED_NLL[name][place]:.2f})"


def _rmse(name: str, method: str, own: Mapping[str, Any] | None) -> str:
    if own is None:
        return ""
    digits = 4 if name in ("kin8nm", "naval") else 2  # their errors are far smaller than one
    text = f"{own['rmse'][0]:.{digits}f} ± {own['rmse'][1]:.{digits}f}"
    return f"{text} ({PUBLISHED_RMSE[name][0]:.2f})" if method == "vi" else text


def _covered(name: str, method: str, own: Mapping[str, Any] | None) -> str:
    if own is None:
        return ""
    return " / ".join(
        f"{100 * own[key][0]:.1f} ± {100 * own[key][1]:.1f}" for key in ("coverage", "conformal_coverage")
    )


def five_for_one(found: Mapping[str, Any]) -> str:
    """Write errors and calibration of one network and five, dense and sparse."""
    rows = []
    others = [key for key in found["rows"][0] if key.startswith("auroc ")]
    for way in dict.fromkeys(row["row"] for row in found["rows"]):
        own = [row for row in found["rows"] if row["row"] == way]

        def over(key: str, digits: int, own: list[Any] = own) -> str:
            return spread([row[key] for row in own], digits)

        aurocs = " / ".join(f"{statistics.fmean(row[key] for row in own):.1f}" for key in others)
        size = f"{statistics.fmean(row['nonzeros'] for row in own):,.0f}"
        kilobytes = f"{statistics.fmean(row['bytes'] for row in own) / 1e3:,.0f} kB"
        rows.append([way, over("error", 2), over("nll", 4), over("ece", 2), aurocs, size, kilobytes])
    names = " / ".join(key.removeprefix("auroc ") for key in others)
    return table(["", "error %", "NLL", "ECE %", f"AUROC %: {names}", "non-zeros", "ONNX file"], rows)


def variances(found: Mapping[str, Any]) -> str:
    """Write the errors of variance networks: the mean network, one draw and many."""
    rows = []
    for network, own in _by_network(found, "variance"):
        for place, first in enumerate(own[0]):
            each = [rows_of_seed[place] for rows_of_seed in own]
            errors = (spread([row[key]["error"] for row in each], 2) for key in ("mean", "1 draws", "32 draws"))
            nll = spread([row["32 draws"]["nll"] for row in each], 3)
            rows.append([f"{network}, {first['row']}", *errors, nll])
    return table(["", "mean network", "one draw", "32 draws", "NLL of 32 draws"], rows)


def reductions(found: Mapping[str, Any]) -> str:
    """Write errors and sizes of networks whose units were cut by the evidence."""
    rows = []
    for network, own in _by_network(found, "reduction"):
        for place, first in enumerate(own[0]):
            each = [rows_of_seed[place] for rows_of_seed in own]
            left = "100"
            if "nonzeros" in first:
                left = spread([100 * row["nonzeros"] / row["weights"] for row in each], 2)
            rows.append([f"{network}, {first['row']}", left, spread([row["sparse"]["test"] for row in each], 2)])
    return table(["", "weights left, %", "test error, %"], rows)


def relevances(found: Mapping[str, Any]) -> str:
    """Write errors after cuts of networks trained with prior precisions of several kinds."""
    rows = []
    for network, own in _by_network(found, "relevance"):
        for place, first in enumerate(own[0]):
            each = [rows_of_seed[place] for rows_of_seed in own]
            keys = ["dense", *(key for key in first if key.endswith("%"))]
            rows.append([f"{network}, {first['row']}", *(spread([row[key] for row in each], 2) for key in keys)])
    return table(["", "dense", "90 %", "95 %", "98 %", "99 %"], rows)


def _by_network(found: Mapping[str, Any], part: str) -> list[tuple[str, list[Any]]]:
    """List the rows of every seed, by network."""
    runs = [run for run in found["runs"] if run["part"] == part]
    names = sorted({run["network"] for run in runs}, reverse=True)
    return [(TITLES[name], [run["rows"] for run in runs if run["network"] == name]) for name in names]


def active_learning(found: Mapping[str, Any]) -> str:
    """Write the test error of every rule at some numbers of labels."""
    rows = []
    for rule in RULES:
        curves = [run["curve"] for run in found["runs"] if run["rule"] == rule]
        if curves:
            at = [{point["labels"]: 100 * point["error"] for point in curve} for curve in curves]
            rows.append([rule, *(spread([curve[labels] for curve in at], 1) for labels in LABELS_SHOWN)])
    return table(["labels", *LABELS_SHOWN], rows)


def adversarial(found: Mapping[str, Any]) -> str:
    """Write errors and scores of every method on clean and on moved images."""
    rows = []
    for method in METHODS:
        own = [run["rows"] for run in found["runs"] if run["method"] == method]
        if not own:
            continue

        def mean(attack: str, key: str, own: list[Any] = own) -> float:
            return statistics.fmean(rows[attack][key] for rows in own)

        errors = [f"{100 * mean(attack, 'error'):.1f}" for attack in ("clean", *ATTACKS)]
        entropy = " → ".join(f"{mean(attack, 'entropy'):.2f}" for attack in ("clean", *ATTACKS))
        aurocs = [
            " / ".join(f"{mean(attack, key):.2f}" for attack in ATTACKS)
            for key in ("auroc_entropy", "auroc_information")
        ]
        rows.append([method, " / ".join(errors), entropy, *aurocs])
    headings = ["", "error %: clean / FGSM / PGD", "entropy", "AUROC of entropy", "AUROC of mutual information"]
    return table(headings, rows)
