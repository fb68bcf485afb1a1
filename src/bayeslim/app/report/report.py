"""`report`: the decisions and measurements of a compression, on one page."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bayeslim.app.benchmark import Benchmark
from bayeslim.app.report import html
from bayeslim.app.report.certainty import draw_certainty
from bayeslim.app.report.costs import compared, counted, draw_costs
from bayeslim.app.report.curves import draw_curves, measure_curves
from bayeslim.app.report.figure import Figure
from bayeslim.app.report.files import uses_of
from bayeslim.app.report.histograms import draw_snr, draw_weights, measure_snr, measure_weights
from bayeslim.app.report.layers import draw_layers, measure_layers
from bayeslim.app.report.masks import draw_masks
from bayeslim.app.report.overview import DENSE, SLIM, Row, latencies, measure_rows, overview
from bayeslim.app.report.quantities import number, percent, times
from bayeslim.app.report.reliability import draw_reliability
from bayeslim.app.report.scores import Batches, collected, predict_all, score_prediction
from bayeslim.app.report.summary import fastest, summarise
from bayeslim.app.style import has_matplotlib
from bayeslim.bayesian import Bayesian
from bayeslim.errors import ShapeMismatch
from bayeslim.io.files import write_file
from bayeslim.prune.cuts import NothingToCut
from bayeslim.results import Prediction
from bayeslim.train.loaders import ignored_class
from bayeslim.types import Inputs
from bayeslim.version import __version__

PLOTS_MISSING = "Plots: matplotlib is not installed. Run: pip install 'bayeslim[plots]'. The tables hold all numbers."


def report(
    bnn: Bayesian,
    pruned: Bayesian,
    slim: nn.Module | None = None,
    path: str | os.PathLike[str] = "report.html",
    *,
    validate: Iterable[Any] | None = None,
    example: Inputs = None,
    others: Mapping[str, nn.Module] | None = None,
    rows: Mapping[str, Row] | None = None,
    benchmark: Benchmark | None = None,
    files: Sequence[str] = (),
    title: str | None = None,
) -> Path:
    """Write a report on a pruned network, as one HTML file that loads nothing.

    Args:
        bnn: the Bayesian network before the cut.
        pruned: the Bayesian network after the cut.
        slim: its compacted form; if not given, the pruned network with its zeros in place stands for it.
        path: the file.
        validate: held-out data as a loader of batches; without them errors and calibration are left out.
        example: inputs; by default those of the first batch of `validate`. Without either, costs are left out.
        others: further plain networks for the overview by name, such as one pruned by magnitude.
        rows: the overview, if it was measured before (with the networks "dense" and "bayeslim").
        benchmark: of the dense against the slim network, from `bl.benchmark`; without it only the latency is measured.
        files: names of the files of a run, for the part on their use.
        title: the page's heading.

    Raises:
        ShapeMismatch: if the two are not the same network.
        NothingToCut: if nothing was cut.
        MissingExtra: if jinja2 is not installed.
    """
    _check(bnn, pruned, slim)
    html.environment()  # a missing extra is reported before the measurements, which take long
    batches = None if validate is None else collected(validate)
    if example is None and batches is not None:
        example = batches[0][0]
    plain = pruned.mean_network() if slim is None else slim
    if rows is None:
        networks = {DENSE: bnn.mean_network(), **(others or {}), SLIM: plain}
        seconds = None if benchmark is None else latencies(benchmark)
        rows = measure_rows(networks, bnn.likelihood, batches, example, seconds)
    prediction = None if batches is None else predict_all(pruned, batches)
    targets = None if batches is None else torch.cat([y for _, y in batches])
    figures, notes = _figures(bnn, pruned, slim, batches, example, rows, benchmark, prediction)
    page = html.Page(
        title=title or f"{_name(bnn)}, pruned by its posterior",
        lead=_lead(bnn, pruned, batches),
        highlights=highlights(pruned, rows, benchmark),
        summary=summarise(rows, benchmark, prediction, targets, ignored_class(pruned.likelihood)),
        overview=overview(rows, latency=benchmark is None),
        figures=figures,
        files=uses_of(files),
        plan="" if pruned.plan_ is None else str(pruned.plan_),
        notes=notes,
        colophon=f"Made with bayeslim {__version__} and PyTorch {torch.__version__}. Every number is from this run.",
    )
    target = Path(path)
    write_file(target, html.render(page).encode())
    return target


def _figures(
    bnn: Bayesian,
    pruned: Bayesian,
    slim: nn.Module | None,
    batches: Batches | None,
    example: Inputs,
    rows: Mapping[str, Row],
    benchmark: Benchmark | None,
    prediction: Prediction | None,
) -> tuple[list[Figure], list[str]]:
    left = {} if pruned.plan_ is None else dict(pruned.plan_.left)
    dense, small = rows[DENSE], rows[SLIM]
    figures: list[Figure] = []
    notes = [] if has_matplotlib() else [PLOTS_MISSING]
    quantities = counted(dense, small)
    if benchmark is not None:
        quantities = compared(benchmark, quantities)
        notes += [f"{runtime}: {why}" for runtime, why in benchmark.skipped.items()]
    if quantities:
        figures.append(draw_costs(quantities))
    else:
        notes.append("Size and latency: there was no example to run the networks on (example=x).")
    figures.append(draw_layers(measure_layers(pruned, slim), left))
    if batches is None or prediction is None:
        notes.append("Error against sparsity, reliability: no held-out data were given (validate=loader).")
    else:
        curves = measure_curves(bnn, pruned, batches, example)
        notes += [f"{name}: {why}" for name, why in curves.left_out.items()]
        scores = {name: row.scores for name, row in ((SLIM, small), (DENSE, dense)) if row.scores is not None}
        scores["pruned, over its posterior"] = score_prediction(prediction, pruned.likelihood, batches)
        certain = draw_certainty(prediction, batches, ignored_class(pruned.likelihood))
        figures += [draw_curves(curves), draw_reliability(scores), *([certain] if certain is not None else [])]
    figures += [draw_snr(measure_snr(bnn, pruned)), draw_weights(measure_weights(bnn, pruned))]
    figures += draw_masks(pruned, example)
    return figures, notes


def _lead(bnn: Bayesian, pruned: Bayesian, batches: Batches | None) -> str:
    words = f"{_name(bnn)} with the posterior of {type(bnn.method).__name__} over {bnn.sites.size:,} parameters"
    if pruned.plan_ is not None:
        words += f", cut by {pruned.plan_.criterion} of each {pruned.plan_.granularity}"
    data = "" if batches is None else f" Measured on {sum(len(y) for _, y in batches):,} held-out examples."
    return f"{words}; the survivors have the posterior given the zeros.{data}"


def _name(bnn: Bayesian) -> str:
    config = getattr(bnn.model, "zoo_config", None)
    return str(config["name"]) if isinstance(config, dict) else bnn.sites.model


def highlights(pruned: Bayesian, rows: Mapping[str, Row], benchmark: Benchmark | None) -> list[tuple[str, str]]:
    """List the headline numbers as (value, words); each compares like with like."""
    layers = measure_layers(pruned, None)
    gone = 1 - sum(layer.kept for layer in layers) / max(1, sum(layer.size for layer in layers))
    shown = [(percent(gone), "of the weights cut")]
    dense, slim = rows[DENSE], rows[SLIM]
    if dense.scores is not None and slim.scores is not None:
        name = "error" if dense.scores.is_fraction else "root mean squared error"
        errors = (scores.error_text.replace(" ", "\N{NO-BREAK SPACE}") for scores in (dense.scores, slim.scores))
        shown.append((" → ".join(errors), name))
    if dense.cost is not None and slim.cost is not None:
        shown.append((number(slim.cost.parameters), f"parameters, of {number(dense.cost.parameters)}"))
        shown.append((times(dense.cost.bytes / max(1, slim.cost.bytes)), "smaller when saved, zeros stored sparsely"))
    if benchmark is not None:
        sizes = benchmark.sizes
        if "onnxruntime" in sizes["dense"].file_bytes:
            whole, small = (sizes[name].file_bytes["onnxruntime"] for name in ("dense", "slim"))
            shown.append((times(whole / max(1, small)), "smaller ONNX file"))
        best, batch = fastest(benchmark)
        before, after = (benchmark.latency(name, best, batch) for name in ("dense", "slim"))
        shown.append((times(before / after), f"as fast as the dense network, both in {best}, batch {batch}"))
    elif dense.seconds and slim.seconds:
        shown.append((times(dense.seconds / slim.seconds), "as fast as the dense network, one input at a time"))
    return shown


def _check(bnn: Any, pruned: Any, slim: Any) -> None:
    for name, value in (("bnn", bnn), ("pruned", pruned)):
        if not isinstance(value, Bayesian):
            raise TypeError(f"{name} must be a Bayesian network, from bl.bayesianize or bl.prune. Got {value!r:.80}.")
    if slim is not None and (not isinstance(slim, nn.Module) or isinstance(slim, Bayesian)):
        raise TypeError(f"slim must be a plain network, from bl.compact. Got {type(slim).__name__}.")
    shapes = [{name: tuple(p.shape) for name, p in b.model.named_parameters()} for b in (bnn, pruned)]
    if shapes[0] != shapes[1]:
        odd = sorted(name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
        raise ShapeMismatch(
            f'bnn and pruned must be one network before and after the cut. "{odd[0]}" is {shapes[0].get(odd[0])} in '
            f"one and {shapes[1].get(odd[0])} in the other."
        )
    if not any(not bool(mask.all()) for mask in pruned.masks.values()):
        raise NothingToCut("A report needs a pruned network, and this one has no zeros. Pass the result of bl.prune.")
