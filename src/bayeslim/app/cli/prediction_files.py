"""The files of `bayeslim predict`: examples from .npy, predictions to .csv or .npz."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayeslim.app.cli.calls import BadSetting
from bayeslim.app.data.formats import read_npy
from bayeslim.io.files import write_file
from bayeslim.results import Prediction
from bayeslim.train.dataset import Scale

FORMATS = (".csv", ".npz")

DIGITS = 12
"""Significant digits of numbers in a table, at most."""

Columns = dict[str, NDArray[Any]]


def columns(
    prediction: Prediction,
    targets: Tensor | None,
    interval: float | None = None,
    labels: Sequence[str] | None = None,
) -> Columns:
    """List the columns of a prediction: arrays by name, with a row for every example.

    For classes and yes/no targets the uncertainties are entropies in nats; for values and counts they are standard
    deviations, whose squares add up to that of `std`. Values have the bounds of the central interval of this
    probability, `lower` and `upper`.
    """
    if prediction.probs is not None:
        chosen = prediction.probs
        confidence = chosen.max(-1).values if prediction.kind == "classes" else torch.maximum(chosen, 1 - chosen)
        found = {
            "class": prediction.classes,
            "confidence": confidence,
            "entropy": prediction.entropy,
            "aleatoric": prediction.aleatoric,
            "epistemic": prediction.epistemic,
            "probability": prediction.probs,
        }
    else:
        found = {
            "mean": prediction.mean,
            "std": prediction.variance.sqrt(),
            "aleatoric_std": prediction.aleatoric.sqrt(),
            "epistemic_std": prediction.epistemic.sqrt(),
            "entropy": prediction.entropy,
        }
    if interval is not None:
        found["lower"], found["upper"] = prediction.interval(interval)
    if targets is not None:
        found = {"target": targets, **found}
    arrays: Columns = {name: tensor.numpy() for name, tensor in found.items()}
    if labels is not None:
        names = np.array(labels)
        arrays |= {name: names[arrays[name]] for name in ("target", "class") if name in arrays}
        shares = arrays.pop("probability").T
        arrays |= {f"probability_{label}": share for label, share in zip(labels, shares, strict=True)}
    return arrays


def write_prediction(
    prediction: Prediction,
    targets: Tensor | None,
    to: Path | None,
    interval: float | None = None,
    labels: Sequence[str] | None = None,
) -> None:
    """Write a prediction as a table (.csv) or as arrays (.npz), or nothing at all.

    Without a file the table goes to standard output.
    """
    found = columns(prediction, targets, interval, labels)
    if to is None:
        sys.stdout.write(_csv(found, Path("predictions")).decode())
    else:
        write_file(to, _npz(found) if to.suffix == ".npz" else _csv(found, to))


def _npz(found: Columns) -> bytes:
    file = io.BytesIO()
    arrays: dict[str, Any] = {**found}
    np.savez(file, **arrays)
    return file.getvalue()


def _csv(found: Columns, to: Path) -> bytes:
    if any(array.ndim > 2 for array in found.values()):
        raise BadSetting(
            f"Each example has many predictions, which do not fit in a row. Write --to {to.with_suffix('.npz')}."
        )
    names, values = ["example"], [np.arange(len(next(iter(found.values()))))]
    for name, array in found.items():
        flat = array.reshape(len(array), -1)
        names += [name] if flat.shape[1] == 1 else [f"{name}_{i}" for i in range(flat.shape[1])]
        values += list(flat.T)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in zip(*values, strict=True):
        writer.writerow([_decimal(value) if isinstance(value, np.floating) else value for value in row])
    return text.getvalue().encode()


def _decimal(value: np.floating[Any]) -> str:
    """Write a number with the digits of its dtype: 0.1 of float32, not 0.100000001490."""
    return f"{float(str(value)):.{DIGITS}g}"


def read_inputs(file: Path, scale: Scale | None, dtype: torch.dtype) -> Tensor:
    """Read examples from a .npy file, as the network takes them.

    With the scale of the training data, the file is in the data's own units.
    """
    try:
        with file.open("rb") as opened:
            array = read_npy(opened, file.stat().st_size)
    except OSError as error:
        raise BadSetting(f"Could not read {file}: {error.strerror or 'it is no .npy file'}.") from error
    except (ValueError, EOFError) as error:
        raise BadSetting(f"{file} is no .npy file of numbers ({error}): write it with numpy.save.") from error
    if array.dtype.kind not in "fiub" or not array.ndim or not len(array):
        raise BadSetting(f"{file} must hold one array of numbers, with a row for each example.")
    if array.dtype == np.uint8:
        raise BadSetting(
            f"{file} holds bytes. Scale them as the training data were: for images of 8 bits, "
            "array.astype('float32') / 255."
        )
    inputs = torch.from_numpy(np.ascontiguousarray(array))
    if not inputs.is_floating_point() and scale is None:
        return inputs.long()
    if not bool(torch.isfinite(inputs).all()):
        raise BadSetting(f"{file} holds NaN or infinity.")
    if scale is not None:
        if inputs.ndim != 2 or inputs.shape[1] != len(scale.mean):
            raise BadSetting(
                f"{file} must hold examples of {len(scale.mean)} features, (N, {len(scale.mean)}). "
                f"Got an array of shape {tuple(inputs.shape)}."
            )
        inputs = scale.standardise(inputs.double())
    return inputs.to(dtype)
