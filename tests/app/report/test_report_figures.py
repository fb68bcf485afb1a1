"""The numbers of the figures, against slow and simple answers."""

from __future__ import annotations

import ast
import copy
import re
import sys
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis.extra.numpy import array_shapes
from report_cases import laplace, variational

import bayeslim as bl
from bayeslim.app.report.certainty import IMAGES_PER_ROW, draw_certainty
from bayeslim.app.report.costs import LATENCY, Quantity, compared, counted, draw_costs
from bayeslim.app.report.curves import draw_curves, measure_curves
from bayeslim.app.report.files import uses_of
from bayeslim.app.report.histograms import draw_snr, draw_weights, measure_snr, measure_weights
from bayeslim.app.report.layers import draw_layers, measure_layers
from bayeslim.app.report.masks import draw_masks, laid_out
from bayeslim.app.report.overview import HEADINGS, Row, measure_rows, overview
from bayeslim.app.report.quantities import number
from bayeslim.app.report.reliability import draw_reliability
from bayeslim.app.report.scores import predict_all, score_network
from bayeslim.app.report.summary import summarise, wilson_interval

CRITERIA = (
    "magnitude",
    "snr",
    "curvature",
    "density",
    "mass",
    "log_alpha",
    "savage_dickey",
    "sign_stability",
    "gates",
    "bmrs",
    "bmrs_uniform",
    "opd",
)
WEIGHTS = ("1.weight", "3.weight", "5.weight")


@cache
def curves_of(case):
    return measure_curves(case.bnn, case.pruned, case.held_out, case.example)


def error_of(network, case):
    x, y = torch.cat([x for x, _ in case.held_out]), torch.cat([y for _, y in case.held_out])
    return float((network(x).argmax(-1) != y).double().mean())


def test_the_curve_of_magnitude_is_what_sorting_weights_gives():
    case = variational()
    found = curves_of(case)
    curve = next(curve for curve in found.curves if "magnitude" in curve.name.split(" = "))
    dense = case.bnn.mean_network().eval()
    assert curve.points[0] == (0.0, error_of(dense, case))
    flat = torch.cat([dense.get_parameter(name).detach().abs().flatten() for name in WEIGHTS])
    for sparsity, error in curve.points[1:]:
        cut = copy.deepcopy(dense)
        cutoff = flat.sort().values[round(sparsity * len(flat)) - 1]
        with torch.no_grad():
            for name in WEIGHTS:
                weight = cut.get_parameter(name)
                weight[weight.abs() <= cutoff] = 0
        if sparsity < 0.9:  # beyond, a layer's best weight is spared
            assert error == error_of(cut, case)


@pytest.mark.parametrize("granularity", ["weight", "unit"])
def test_the_marked_network_and_the_moved_survivors_are_those_of_prune(granularity):
    case = laplace(granularity)
    found = curves_of(case)
    assert found.mark[1] == error_of(case.pruned.mean_network().eval(), case)
    size = sum(case.bnn.model.get_parameter(name).numel() for name in WEIGHTS)
    gone = sum(int((~case.pruned.masks[name]).sum()) for name in WEIGHTS)
    assert found.mark[0] == pytest.approx(gone / size)
    moved = found.curves[0]
    assert moved.chosen
    assert moved.name == "curvature, survivors moved"
    # one cut without a refresh: the pruned network is on this curve
    assert (pytest.approx(found.mark[0]), found.mark[1]) in moved.points


def test_criteria_that_rank_alike_are_one_line_and_others_are_named_with_the_reason():
    found = curves_of(variational())
    names = [name for curve in found.curves for name in curve.name.split(" = ")]
    assert sorted([*names, *found.left_out]) == sorted(CRITERIA)
    assert any({"snr", "curvature", "log_alpha"} <= set(curve.name.split(" = ")) for curve in found.curves)
    units = curves_of(laplace("unit"))
    assert "log_alpha" in units.left_out
    figure = draw_curves(units)
    assert "Not applicable here" in figure.caption
    assert "this network" in [row[0] for row in figure.table.rows]


def test_layers_count_what_is_left_and_know_the_compacted_shapes():
    case = laplace("unit")
    layers = {layer.name: layer for layer in measure_layers(case.pruned, case.slim)}
    assert set(layers) == set(WEIGHTS)
    for name, layer in layers.items():
        assert layer.kept == int(case.pruned.masks[name].sum())
        assert layer.compacted == "×".join(str(n) for n in case.slim.get_parameter(name).shape)
    figure = draw_layers(list(layers.values()), {"1.weight": "protected"})
    assert figure.table.rows[0][-1] == "protected"


def test_histograms_count_every_weight_once():
    case = laplace()
    mean = torch.cat([case.bnn.posterior_.mean[name].flatten() for name in WEIGHTS])
    std = torch.cat([case.bnn.posterior_.std[name].flatten() for name in WEIGHTS])
    kept = torch.cat([case.pruned.masks[name].flatten() for name in WEIGHTS])
    snr, weights = measure_snr(case.bnn, case.pruned), measure_weights(case.bnn, case.pruned)
    for found in (snr, weights):
        assert int(found.all.sum()) == len(mean)
        assert int(found.kept.sum()) == int(kept.sum())
        assert float(found.cumulative[-1]) == 1
        assert bool((found.kept <= found.all).all())
    (cutoff,) = snr.cutoffs
    assert int((mean.abs() / std <= cutoff * (1 + 1e-6)).sum()) == int((~kept).sum())
    assert weights.cutoffs[0] == -weights.cutoffs[1]
    assert int((mean.abs() <= weights.cutoffs[1] * (1 + 1e-6)).sum()) == int((~kept).sum())
    assert weights.moved is not None
    assert int(weights.moved.sum()) == int(kept.sum())
    for figure in (draw_snr(snr), draw_weights(weights)):
        assert sum(int(row[1].replace(",", "")) for row in figure.table.rows) == len(mean)


def test_independent_survivors_do_not_move():
    case = variational()
    assert measure_weights(case.bnn, case.pruned).moved is None


@given(array_shapes(min_dims=1, max_dims=5, max_side=6))
def test_laying_out_a_mask_keeps_every_weight(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.5
    picture, words = laid_out(mask)
    assert picture.ndim == 2
    assert int(picture.sum()) == int(mask.sum())
    assert words


def test_masks_are_shown_for_first_layers_with_the_readers_of_each_pixel():
    case = variational()
    figures = draw_masks(case.pruned, case.example)
    assert [figure.title for figure in figures] == [f"Mask of {name}" for name in WEIGHTS]
    images = [figure.picture.count("<img ") for figure in figures]
    assert images == [2, 1, 1], "the first layer reads images"
    counted_rows = sum(int(row[2]) for row in figures[0].table.rows)
    assert counted_rows == int(case.pruned.masks["1.weight"].sum())
    assert draw_masks(case.pruned, {"x": 1})[0].picture.count("<img ") == 1


def test_reliability_says_the_calibration_errors():
    case = laplace()
    scores = {"a": score_network(case.slim, case.bnn.likelihood, case.held_out)}
    figure = draw_reliability(scores)
    assert f"{100 * scores['a'].ece:.2f} %" in figure.picture
    assert sum(int(row[2]) for row in figure.table.rows) == 80


def test_certainty_is_ordered_by_entropy_and_needs_images():
    case = laplace()
    prediction = predict_all(case.pruned, case.held_out)
    figure = draw_certainty(prediction, case.held_out)
    assert len(figure.table.rows) == figure.picture.count("<img ") == 2 * IMAGES_PER_ROW
    wrong = sum(row[1] != row[2] for row in figure.table.rows)
    assert figure.picture.count('class="wrong"') == wrong
    probabilities = [float(row[3].split()[0]) for row in figure.table.rows]
    assert min(probabilities[:IMAGES_PER_ROW]) > max(probabilities[IMAGES_PER_ROW:])
    flat = [(x.flatten(1), y) for x, y in case.held_out]
    assert draw_certainty(prediction, flat) is None


def test_ignored_targets_are_not_shown_and_are_no_errors():
    case = laplace()
    prediction = predict_all(case.pruned, case.held_out)
    kept = prediction.entropy.argsort() % 2 == 0
    batches, start = [], 0
    for x, y in case.held_out:
        batches.append((x, torch.where(kept[start : start + len(y)], y, -1)))
        start += len(y)
    figure = draw_certainty(prediction, batches, ignored=-1)
    assert all(row[1] != -1 for row in figure.table.rows)
    assert f"among {int(kept.sum())} held-out inputs" in figure.caption
    assert draw_certainty(prediction, [(x, torch.full_like(y, -1)) for x, y in batches], ignored=-1) is None
    targets = torch.cat([y for _, y in batches])
    words = dict(summarise({"dense": Row(), "bayeslim": Row()}, None, prediction, targets, -1))["What is uncertain"]
    wrong = (prediction.classes != targets)[kept]
    assert f"of {int(wrong.sum())} errors" in words


def test_the_report_leaves_out_what_the_likelihood_ignores(tmp_path, monkeypatch):
    case, seen, module = laplace(), [], sys.modules[bl.report.__module__]
    monkeypatch.setattr(module, "summarise", lambda *args: seen.append(args[-1]) or [])
    monkeypatch.setattr(module, "draw_certainty", lambda *args: seen.append(args[-1]))
    bl.report(case.bnn, case.pruned, case.slim, tmp_path / "report.html", validate=case.held_out)
    assert seen == [-100, -100]


def test_costs_compare_dense_and_slim():
    case = laplace("unit")
    networks = {"dense": case.bnn.mean_network(), "bayeslim": case.slim}
    rows = measure_rows(networks, case.bnn.likelihood, case.held_out, case.example)
    quantities = {q.name: q for q in counted(rows["dense"], rows["bayeslim"])}
    assert quantities["parameters"].slim == sum(p.numel() for p in case.slim.parameters())
    assert quantities["parameters"].dense > quantities["parameters"].slim
    assert rows["dense"].seconds > 0
    timed = bl.benchmark(networks["dense"], case.slim, example=case.example, runtimes=["eager"], rounds=2)
    listed = compared(timed, list(quantities.values()))
    names = [q.name for q in listed]
    assert {"parameters", "stored", "eager, batch 1", "eager, batch 64"} <= set(names)
    assert LATENCY in quantities
    assert LATENCY not in names, "one latency is shown once"
    assert len(set(names)) == len(names)
    assert len(draw_costs(listed).table.rows) == len(names)
    assert counted(Row(), Row()) == []
    assert overview(rows).headings == HEADINGS
    assert overview({"x": Row()}).rows == (("x", *["–"] * 7),)


def test_a_cost_that_rose_has_a_bar_beyond_the_dense_one():
    figure = draw_costs([Quantity("cost", 10.0, 25.0, number), Quantity("other", 10.0, 1.0, number)])
    assert [row[3] for row in figure.table.rows] == ["0.4×", "10×"]
    assert "10 → 25,  0.4×" in figure.picture
    ticks = [int(word) for word in re.findall(r">(\d+)</text>", figure.picture)]
    assert max(ticks) > 100, "the axis reaches as far as the longest bar"


def test_a_benchmark_takes_the_place_of_the_latency_in_the_overview():
    assert overview({"x": Row()}, latency=False).headings == HEADINGS[:-1]
    assert overview({"x": Row()}, latency=False).rows == (("x", *["–"] * 6),)


@pytest.mark.parametrize(("wrong", "count"), [(0, 50), (3, 50), (23, 500), (50, 50)])
def test_the_interval_holds_the_rates_that_the_errors_do_not_contradict(wrong, count):
    low, high = wilson_interval(wrong, count)
    rates = torch.linspace(0.0005, 0.9995, 4001, dtype=torch.float64)
    plausible = rates[(wrong / count - rates).abs() <= 1.959964 * (rates * (1 - rates) / count).sqrt()]
    assert low == pytest.approx(float(plausible.min()), abs=6e-4)
    assert high == pytest.approx(float(plausible.max()), abs=6e-4)


def test_the_summary_says_size_speed_error_and_doubt():
    case = laplace("unit")
    networks = {"dense": case.bnn.mean_network(), "bayeslim": case.slim, "magnitude": case.slim}
    rows = measure_rows(networks, case.bnn.likelihood, case.held_out, case.example, {"dense": 2e-3, "bayeslim": 1e-3})
    prediction = predict_all(case.pruned, case.held_out)
    targets = torch.cat([y for _, y in case.held_out])
    found = dict(summarise(rows, None, prediction, targets))
    assert list(found) == ["Size", "Speed", "Error", "What is uncertain"]
    assert f"{sum(p.numel() for p in case.slim.parameters()):,} of" in found["Size"]
    assert "1 ms instead of 2 ms in eager PyTorch: 2× as fast" in found["Speed"]
    assert rows["bayeslim"].scores.error_text in found["Error"]
    assert "magnitude" in found["Error"]
    wrong = prediction.classes != targets
    unsure = prediction.entropy.argsort()[-8:]
    assert f"holds {int(wrong[unsure].sum())} of {int(wrong.sum())} errors" in found["What is uncertain"]
    assert "95 % interval" in found["What is uncertain"]
    assert summarise({"dense": Row(), "bayeslim": Row()}, None, None, None) == []


def test_files_are_described_with_code_that_parses():
    found = uses_of(["slim", "slim.onnx", "slim.c", "slim.pt2", "tuned", "benchmark.json", "other"])
    assert [use.name for use in found] == ["slim", "slim.onnx", "slim.c", "slim.pt2", "tuned", "benchmark.json"]
    for use in found:
        ast.parse(use.code)
        assert use.name in use.code or use.name == "benchmark.json"
