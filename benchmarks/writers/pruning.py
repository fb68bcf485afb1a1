"""Tables of cuts without retraining."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from writers.markdown import listed, table

ONE_SHOT = {
    "magnitude": "magnitude",
    "snr": "signal to noise",
    "joint x1": "conditioned, one step",
    "joint x10": "**conditioned, ten steps**",
}
NETWORKS = {"lenet_300_100": "LeNet-300-100", "lenet5": "LeNet-5"}
SPARSITIES = ("0.9", "0.95", "0.98")

VOICE_STEPS = ("fit", "plan", "prune", "compact", "save", "export")

AIMS = {"90%": 1.0, "95%": 2.5}
"""The aims of `residual_pruning.py`: points of test error that a cut may cost."""


def one_shot(found: Mapping[str, Any]) -> str:
    """Write test errors of both LeNets at three sparsities."""
    summary = found["summary"]
    heads = [f"{title} (dense {summary[name]['dense']['0']['mean']:.2f})" for name, title in NETWORKS.items()]
    rows = []
    for rule, words in ONE_SHOT.items():
        cells = [listed((summary[name][rule][s]["mean"] for s in SPARSITIES), 2) for name in NETWORKS]
        rows.append([words, *(f"**{cell}**" if "**" in words else cell for cell in cells)])
    return table(["", *(f"{head} at 90 / 95 / 98\u00a0%" for head in heads)], rows)


def prior_widths(found: Mapping[str, Any]) -> str:
    """Write test errors after a cut: networks and steps in rows, priors in columns."""
    keys = [key.removesuffix(", steps 1") for key in next(iter(found["results"].values())) if "steps 1" in key]
    heads = [key.removesuffix(".0") for key in keys]
    rows = []
    for network, errors in found["results"].items():
        for steps in (1, 4):
            known = [f"{errors[key]:.1f}" if steps == 1 else "" for key in ("dense", "magnitude")]
            cells = [f"{errors[f'{key}, steps {steps}']:.1f}" for key in keys]
            rows.append([f"{network}, {'one step' if steps == 1 else f'{steps} steps'}", *known, *cells])
    return table(["", "dense", "magnitude", *heads], rows)


WAYS = {
    "magnitude": "magnitude",
    "kept": "conditioned, batch norms kept",
    "measured": "conditioned, measured again",
    "blocks": "block by block",
}


def residual(found: Mapping[str, Any]) -> str:
    """Write test errors of the residual network, and the points beside the aims."""
    errors, dense = found["error"], found["settings"]["dense"]
    rows = []
    for cut, aim in AIMS.items():
        more = round(min(errors[f"{cut}, {way}"] for way in WAYS if f"{cut}, {way}" in errors) - dense, 2)
        verdict = "met" if more <= aim else "**missed**"
        cells = [f"{errors[f'{cut}, {way}']:.2f}" if f"{cut}, {way}" in errors else "" for way in WAYS]
        rows.append([cut.replace("%", " %"), f"{dense:.2f}", *cells, f"+{more:.2f}, aim +{aim:.1f}: {verdict}"])
    return table(["weights cut", "dense", *WAYS.values(), "points over dense"], rows)


RECURRENT_RULES = {
    "magnitude": "magnitude",
    "diag": "diagonal",
    "kron": "Kronecker",
    "kron in 5 steps": "Kronecker in 5 steps",
}


def recurrent(found: Mapping[str, Any]) -> str:
    """Write test errors of an LSTM and a GRU after cuts."""
    rows = []
    for network, errors in found["error"].items():
        for cut in dict.fromkeys(key.partition(", ")[0] for key in errors if key != "dense"):
            known = [errors.get(f"{cut}, {rule}") for rule in RECURRENT_RULES]
            first = f"{network} (dense {errors['dense']:.1f}), {cut.replace('%', ' %')}"
            rows.append([first, *("" if value is None else f"{value:.1f}" for value in known)])
    return table(["", *RECURRENT_RULES.values()], rows)


def voice_encoder(found: Mapping[str, Any]) -> str:
    """Write cosines to the dense embeddings of new and of known voices, means over seeds."""
    cells = found["cells"]
    rows = []
    for cut in dict.fromkeys(key.partition(", ")[0] for key in cells):
        words = cut.replace("%", " %").replace("stacked units", "units, one `nn.LSTM`")
        row = [words]
        for rule in RECURRENT_RULES:
            seeds = [cell["cosine"] for key, cell in cells.items() if key.startswith(f"{cut}, {rule}, seed")]
            row.append(listed((statistics.mean(each[kind] for each in seeds) for kind in seeds[0]), 2) if seeds else "")
        rows.append(row)
    constant = listed(found["settings"]["constant"].values(), 2)
    return table([f"(constant embedding {constant})", *RECURRENT_RULES.values()], rows)


def voice_encoder_times(found: Mapping[str, Any]) -> str:
    """Write the sizes and the speed of compacted encoders, and CPU seconds on the way there."""
    rows = []
    for key, cell in found["cells"].items():
        cut, rule, seed = key.split(", ")
        if (rule, seed) == ("kron", "seed 0") and "parameters" in cell:
            seconds = [f"{cell['cpu_seconds'][step]:.1f}" for step in VOICE_STEPS]
            words = cut.replace("%", " %").replace("stacked units", "units, one `nn.LSTM`")
            rows.append([words, f"{cell['parameters'] / 1e6:.2f} M", f"{cell['times_faster']:.1f}", *seconds])
    size = f"parameters, of {found['settings']['parameters'] / 1e6:.2f} M"
    return table(["Kronecker", size, "times faster", *VOICE_STEPS], rows)
