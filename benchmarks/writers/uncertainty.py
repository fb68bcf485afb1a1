"""Tables of uncertainty in use: regression with intervals, labels asked for, and adversarial inputs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from active_learning import RULES
from adversarial import METHODS
from uci import PUBLISHED_ERRORS, PUBLISHED_NLL, PUBLISHED_RMSE, RENYI

from writers.markdown import spread, table

LABELS_SHOWN = (20, 50, 100, 150, 200, 250, 300)
ATTACKS = ("fgsm 0.1", "pgd 0.1")


def uci(found: Mapping[str, Any]) -> str:
    """Write RMSE, NLL and intervals of every set and method that has results, beside the published ones."""
    rows = []
    for name, methods in found["summary"].items():
        for method, own in methods.items():
            published = list(RENYI).index(method) if method in RENYI else 3 if method == "vi" else None
            known_nll = known_rmse = ""
            if published is not None:
                known_nll = f"{PUBLISHED_NLL[name][published]:.2f} ± {PUBLISHED_ERRORS[name][published]:.2f}"
            if method == "vi":
                known_rmse = "{:.2f} ± {:.2f}".format(*PUBLISHED_RMSE[name])
            numbers = {key: f"{own[key][0]:.2f} ± {own[key][1]:.2f}" for key in ("rmse", "nll")}
            if name in ("kin8nm", "naval"):  # their errors are far smaller than one
                numbers["rmse"] = f"{own['rmse'][0]:.4f} ± {own['rmse'][1]:.4f}"
            shares = [f"{100 * own[key][0]:.1f} %" for key in ("coverage", "conformal_coverage")]
            widths = f"{own['width'][0]:.3g} / {own['conformal_width'][0]:.3g}"
            rows.append([name, method, numbers["rmse"], known_rmse, numbers["nll"], known_nll, *shares, widths])
    headings = ["", "method", "RMSE", "published", "NLL", "published", "covered", "conformal", "widths"]
    return table(headings, rows)


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
