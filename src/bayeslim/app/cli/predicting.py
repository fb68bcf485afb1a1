"""`bayeslim predict`: the predictions of a fitted network, as a table or as arrays."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bayeslim.app.cli.calls import BadSetting, parse
from bayeslim.app.cli.fits import run_on
from bayeslim.app.cli.networks import data_name, fit_settings, needed_rules, saved_bayesian
from bayeslim.app.cli.prediction_files import FORMATS, read_inputs, write_prediction
from bayeslim.app.cli.sources import device_by_name, held_out_by_name
from bayeslim.app.data.cells import BadTable, is_missing, is_table, read_table
from bayeslim.app.data.load import IMAGE_SETS
from bayeslim.app.data.tables import TableRules
from bayeslim.app.report.scores import Batches, collected
from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimWarning
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
    to: Path | None,
    model: str | None,
    data: str | None,
    inputs: Path | None,
    interval: float | None,
    samples: int,
    how: str,
    seed: int,
    device: str,
) -> str:
    """Predict with the network in a folder; see `bayeslim predict --help`.

    Without a file to write, the table goes to standard output.
    """
    if table is not None and (data is not None or inputs is not None):
        raise BadSetting(f"predict needs either the table {table}, --data or --inputs. Got several.")
    if interval is not None and not 0 < interval < 1:
        raise BadSetting(f"interval is a probability, between 0 and 1. Got {interval}.")
    if to is not None and to.suffix not in FORMATS:
        raise BadSetting(f"{to} must end in {' or '.join(FORMATS)}: a table, or arrays for numpy.")
    place = device_by_name(device)
    bnn = saved_bayesian(network, model, "predict", place)
    name = data_name(network, data) if table is None else None
    if name is None and inputs is None and table is None:
        raise BadSetting("predict needs inputs: name a table, or pass --data NAME, or --inputs FILE.npy.")
    settings = fit_settings(network)
    own = (settings.validation, settings.seed) if settings else (0.1, 0)
    dtype = next(bnn.model.parameters()).dtype
    if table is not None or (name is not None and is_table(name)):
        asked = _in_table(network, table or Path(str(name)), dtype)
    elif inputs is not None:
        known = held_out_by_name(name, *own) if name is not None and _has_scale(name) else None
        given = read_inputs(inputs, None if known is None else known.input_scale, dtype)
        asked = Examples(str(inputs), _split(given), target_scale=None if known is None else known.target_scale)
    else:
        assert name is not None
        loaders = held_out_by_name(name, *own, place)
        part, loader = loaders.held_out
        batches = collected(loader)
        targets = torch.cat([y for _, y in batches]).cpu()
        asked = Examples(name, batches, targets, loaders.target_scale, part=f", {part} part")
    run_on(bnn, asked.batches[0][0], f"The network in {network}", asked.name)
    prediction, found = predict_batches(bnn, asked.batches, samples, how, seed), asked.targets
    if asked.target_scale is not None:
        prediction = in_units_of(prediction, asked.target_scale)
        found = None if found is None else asked.target_scale.restore(found.double())
    if interval is not None and prediction.probs is not None:
        raise BadSetting("--interval is for values, and the network predicts classes.")
    write_prediction(prediction, found, to, interval, asked.labels)
    return f"{to or 'standard output'}: {asked.name}{asked.part}. {prediction}"


@dataclass(frozen=True)
class Examples:
    """Examples to predict: the name and the part of their data, batches, and what is known of their targets."""

    name: str
    batches: Batches
    targets: Tensor | None = None
    target_scale: Scale | None = None
    labels: tuple[str, ...] | None = None
    part: str = ""


def _in_table(network: Path, file: Path, dtype: torch.dtype) -> Examples:
    """Read a table by the rules of the fit."""
    rules, cells = needed_rules(network), read_table(file)
    batches = _split(rules.inputs(cells).to(dtype))
    return Examples(str(file), batches, _targets(rules, cells), rules.target_scale, rules.target.categories)


def _targets(rules: TableRules, cells: Mapping[str, Sequence[str]]) -> Tensor | None:
    """Read the targets of a table; None, with a warning, if they cannot be read.

    There is no warning for a table without the column, or without a value in it.
    """
    if all(map(is_missing, cells.get(rules.target.name, ()))):
        return None
    try:
        return rules.targets(cells)
    except BadTable as error:
        warnings.warn(f"The predictions are written without the targets. {error}", BayeslimWarning, stacklevel=2)
        return None


def _split(inputs: Tensor) -> Batches:
    return [(part, part) for part in inputs.split(EXAMPLES_PER_GROUP)]


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
    """Convert a prediction of standardised values to the data's own units, in float64."""
    if prediction.kind != "values":
        return prediction
    mean, samples, std = prediction.mean.double(), prediction.samples.double(), scale.std.double()
    if samples.shape[1:] == mean.shape:
        samples = scale.restore(samples)
    else:  # heteroscedastic
        means, log_variances = samples.chunk(2, -1)
        samples = torch.cat([scale.restore(means), log_variances + 2 * std.log()], -1)
    return dataclasses.replace(
        prediction,
        mean=scale.restore(mean),
        samples=samples,
        aleatoric=prediction.aleatoric.double() * std**2,
        epistemic=prediction.epistemic.double() * std**2,
    )


def _has_scale(name: str) -> bool:
    call = parse(name, "data")
    return bool(call.module) or call.name not in IMAGE_SETS
