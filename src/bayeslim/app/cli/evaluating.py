"""`bayeslim evaluate`: the quality of a fitted network on held-out data, and of its uncertainty on other data.

A network should be less certain of inputs unlike its data. For every other data set the table shows how well its
uncertainty separates the two: the AUROC, 1 for perfect separation and ½ for none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayeslim.app.cli.calls import BadSetting
from bayeslim.app.cli.fits import run_on
from bayeslim.app.cli.networks import data_name, fit_settings, needed_rules, saved_bayesian
from bayeslim.app.cli.predicting import in_units_of, predict_batches
from bayeslim.app.cli.sources import Loaders, device_by_name, held_out_by_name
from bayeslim.app.data.cells import is_table, read_table
from bayeslim.app.report.scores import Batches, Scores, collected, score_prediction
from bayeslim.bayesian import Bayesian
from bayeslim.io.files import write_file
from bayeslim.metrics import auroc, brier
from bayeslim.results import Prediction
from bayeslim.train.dataset import Scale
from bayeslim.train.loaders import Loader

MEAN = "mean network"
POSTERIOR = "posterior"


@dataclass(frozen=True)
class Quality:
    """The quality of predictions; `brier` only where there are probabilities."""

    scores: Scores
    brier: float | None

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name, as they are written to a file."""
        if self.brier is None:
            return {"rmse": self.scores.error, "nll": self.scores.nll, "calibration": self.scores.ece}
        scores = self.scores
        return {"error": scores.error, "nll": scores.nll, "brier": self.brier, "ece": scores.ece}


@dataclass(frozen=True)
class Evaluation:
    """The result of `bayeslim evaluate`: the quality of the mean network and of the posterior.

    `against` has the AUROC by kind of uncertainty for every other data set.
    """

    data: str
    part: str
    examples: int
    rows: dict[str, Quality]
    against: dict[str, dict[str, float]]


def evaluate_folder(
    network: Path,
    model: str | None,
    data: str | None,
    against: Sequence[str],
    samples: int,
    how: str,
    seed: int,
    device: str,
    to: Path | None,
) -> Evaluation:
    """Measure the network in a folder; see `bayeslim evaluate --help`."""
    place = device_by_name(device)
    bnn = saved_bayesian(network, model, "evaluate", place)
    name = data_name(network, data)
    if name is None:
        raise BadSetting("evaluate needs data: pass --data NAME.")
    settings = fit_settings(network)
    own = (settings.validation, settings.seed) if settings else (0.1, 0)
    loaders = held_out_table(network, name, place) if is_table(name) else held_out_by_name(name, *own, place)
    others = {other: held_out_by_name(other, *own, place) for other in against}
    words = f"The network in {network}"
    sets: dict[str, Batches] = {}
    for title, found in {name: loaders, **others}.items():
        sets[title] = collected(found.held_out[1])
        run_on(bnn, sets[title][0][0], words, title)
    rows, prediction = quality(bnn, sets[name], loaders.target_scale, samples, how, seed)
    told = {other: _told_apart(prediction, predict_batches(bnn, sets[other], samples, how, seed)) for other in others}
    result = Evaluation(name, loaders.held_out[0], len(prediction), rows, told)
    if to is not None:
        _write(result, network, samples, how, seed, to)
    return result


def held_out_table(network: Path, table: str, device: torch.device) -> Loaders:
    """Read a table by the rules of the fit; all its rows are test data."""
    rules = needed_rules(network)
    found = rules.dataset(read_table(Path(table)), table)
    test = Loader(found.train_x, found.train_y, 1000, shuffle=False, device=device)
    return Loaders(test, test, test, None, rules.target_scale)


def quality(
    bnn: Bayesian, batches: Batches, target_scale: Scale | None, samples: int = 32, how: str = "auto", seed: int = 0
) -> tuple[dict[str, Quality], Prediction]:
    """Measure the mean network and the posterior, in the data's own units.

    The prediction of the posterior is returned too. `target_scale` is the scale that standardised the targets.
    """
    rows: dict[str, Quality] = {}
    targets = torch.cat([y for _, y in batches]).cpu()
    _check_kind(bnn, targets)
    for title, way, count in ((MEAN, "mean", 1), (POSTERIOR, how, samples)):
        prediction = found = predict_batches(bnn, batches, count, way, seed)
        truth = targets
        if target_scale is not None:
            found, truth = in_units_of(prediction, target_scale), target_scale.restore(targets.double())
        scores = score_prediction(found, bnn.likelihood, [(None, truth)])
        rows[title] = Quality(scores, _brier(found, truth, bnn) if scores.is_fraction else None)
    return rows, prediction


def _check_kind(bnn: Bayesian, targets: Tensor) -> None:
    if bnn.likelihood.name == "categorical" and targets.is_floating_point():
        raise BadSetting("The network predicts classes, and the targets of these data are values.")
    bnn.likelihood.check_targets(targets)


def _brier(prediction: Prediction, targets: Tensor, bnn: Bayesian) -> float:
    probs = prediction.probs
    assert probs is not None
    if prediction.kind == "binary":
        probs, targets = torch.stack([1 - probs, probs], -1), targets.reshape(probs.shape).long()
    known = targets != getattr(bnn.likelihood, "ignore_index", -100)
    return brier(probs[known], targets[known])


def _told_apart(inside: Prediction, outside: Prediction) -> dict[str, float]:
    return {
        "entropy": auroc(inside.entropy, outside.entropy),
        "epistemic": auroc(inside.epistemic, outside.epistemic),
    }


def _write(result: Evaluation, network: Path, samples: int, how: str, seed: int, to: Path) -> None:
    content: dict[str, Any] = {
        "network": str(network),
        "data": result.data,
        "part": result.part,
        "examples": result.examples,
        "samples": samples,
        "how": how,
        "seed": seed,
        "mean_network": result.rows[MEAN].as_dict(),
        "posterior": result.rows[POSTERIOR].as_dict(),
        "auroc_against": result.against,
    }
    write_file(to, (json.dumps(content, indent=1) + "\n").encode())
