"""`bayeslim predict`: the predictions of a fitted network, as a table or as arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bayeslim.app.cli.calls import BadSetting, parse
from bayeslim.app.cli.fits import run_on
from bayeslim.app.cli.networks import data_name, fit_settings, needed_rules, saved_bayesian
from bayeslim.app.cli.prediction_files import FORMATS, read_inputs, write_prediction
from bayeslim.app.cli.sources import device_by_name, held_out_by_name
from bayeslim.app.data.load import IMAGE_SETS
from bayeslim.app.data.tables import is_table, read_table
from bayeslim.app.report.scores import Batches, collected
from bayeslim.bayesian import Bayesian
from bayeslim.predict.links import concatenate
from bayeslim.predict.predict import predict
from bayeslim.results import Prediction
from bayeslim.train.dataset import Scale
from bayeslim.train.progress import progress
from bayeslim.types import Inputs, batch_size, device_of

EXAMPLES_PER_GROUP = 2000
"""Examples that are predicted together: enough to use the hardware, few enough to show progress."""


def predict_folder(
    network: Path,
    table: Path | None,
    to: Path,
    model: str | None,
    data: str | None,
    inputs: Path | None,
    interval: float | None,
    samples: int,
    how: str,
    seed: int,
    device: str,
) -> str:
    """Predict with the network in a folder; see `bayeslim predict --help`."""
    if table is not None and (data is not None or inputs is not None):
        raise BadSetting(f"predict needs either the table {table}, --data or --inputs. Got several.")
    if interval is not None and not 0 < interval < 1:
        raise BadSetting(f"interval is a probability, between 0 and 1. Got {interval}.")
    if to.suffix not in FORMATS:
        raise BadSetting(f"{to} must end in {' or '.join(FORMATS)}: a table, or arrays for numpy.")
    place = device_by_name(device)
    bnn = saved_bayesian(network, model, "predict", place)
    name = data_name(network, data) if table is None else None
    if name is None and inputs is None and table is None:
        raise BadSetting("predict needs inputs: name a table, or pass --data NAME, or --inputs FILE.npy.")
    settings = fit_settings(network)
    own = (settings.validation, settings.seed) if settings else (0.1, 0)
    target_scale: Scale | None = None
    targets: Tensor | None = None
    labels: tuple[str, ...] | None = None
    if table is not None or (name is not None and is_table(name)):
        file = table or Path(str(name))
        rules, cells = needed_rules(network), read_table(file)
        rows = rules.inputs(cells).to(next(bnn.model.parameters()).dtype)
        batches: Batches = [(part, part) for part in rows.split(EXAMPLES_PER_GROUP)]
        targets = rules.targets(cells) if rules.target.name in cells else None
        target_scale, labels, what = rules.target_scale, rules.target.categories, str(file)
        run_on(bnn, rows[:2], f"The network in {network}", what)
    elif inputs is not None:
        input_scale = None
        if name is not None and _has_scale(name):
            known = held_out_by_name(name, *own)
            input_scale, target_scale = known.input_scale, known.target_scale
        given = read_inputs(inputs, input_scale, next(bnn.model.parameters()).dtype)
        run_on(bnn, given[:2], f"The network in {network}", str(inputs))
        batches = [(part, part) for part in given.split(EXAMPLES_PER_GROUP)]
        what = str(inputs)
    else:
        assert name is not None
        loaders = held_out_by_name(name, *own, place)
        part, loader = loaders.held_out
        batches, target_scale, what = collected(loader), loaders.target_scale, f"{name}, {part} part"
        targets = torch.cat([y for _, y in batches]).cpu()
        run_on(bnn, batches[0][0], f"The network in {network}", name)
    prediction = predict_batches(bnn, batches, samples, how, seed)
    if target_scale is not None:
        prediction = in_units_of(prediction, target_scale)
        targets = None if targets is None else target_scale.restore(targets)
    if interval is not None and prediction.probs is not None:
        raise BadSetting("--interval is for values, and the network predicts classes.")
    write_prediction(prediction, targets, to, interval, labels)
    return f"{to}: {what}. {prediction}"


def predict_batches(bnn: Bayesian, batches: Batches, samples: int, how: str, seed: int) -> Prediction:
    """Predict all batches with the same draws; the result is on the CPU."""
    groups = list(_grouped(batches))
    parts = []
    for group in progress(groups, "predict", enabled=len(groups) > 1):
        generator = torch.Generator(device_of(bnn.model)).manual_seed(seed)
        parts.append(predict(bnn, iter(group), samples, how, generator=generator).to("cpu"))
    return concatenate(parts)


def _grouped(batches: Batches) -> Iterator[Batches]:
    group: list[tuple[Inputs, Tensor]] = []
    count = 0
    for batch in batches:
        group.append(batch)
        count += batch_size(batch[0])
        if count >= EXAMPLES_PER_GROUP:
            yield group
            group, count = [], 0
    if group:
        yield group


def in_units_of(prediction: Prediction, scale: Scale) -> Prediction:
    """Convert a prediction of standardised values to the data's own units."""
    if prediction.kind != "values":
        return prediction
    std = scale.std.to(prediction.mean)
    return dataclasses.replace(
        prediction,
        mean=scale.restore(prediction.mean),
        aleatoric=prediction.aleatoric * std**2,
        epistemic=prediction.epistemic * std**2,
    )


def _has_scale(name: str) -> bool:
    call = parse(name, "data")
    return bool(call.module) or call.name not in IMAGE_SETS
