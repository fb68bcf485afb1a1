"""Networks, data and methods from their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from bayeslim import data, zoo
from bayeslim.bayesian import Bayesian
from bayeslim.cli.calls import BadSetting, parse
from bayeslim.data.dataset import Dataset
from bayeslim.data.loader import Loader
from bayeslim.likelihoods import LIKELIHOODS, Likelihood
from bayeslim.methods import METHODS, Method
from bayeslim.priors import PRIORS, Prior
from bayeslim.saving import load
from bayeslim.storage import check_fits
from bayeslim.types import Inputs, split_batch


@dataclass(frozen=True)
class Loaders:
    """Training and validation data, and test data if there are any."""

    train: Any
    val: Any
    test: Any = None

    @property
    def example(self) -> Inputs:
        """One batch of inputs."""
        return split_batch(next(iter(self.val)))[0]


def model_by_name(text: str, weights: Path | None = None, seed: int = 0) -> nn.Module:
    """A network from the zoo, `mlp(hidden=100)`, or from a factory, `package.module:factory`.

    Args:
        text: its name.
        weights: a safetensors file or a folder from `bl.save` with its trained weights.
        seed: of its initial weights.
    """
    call = parse(text, "model")
    torch.manual_seed(seed)
    model = call.imported("model") if call.module else call.of(zoo.registry.FACTORIES, "model")
    if not isinstance(model, nn.Module):
        raise BadSetting(f'model="{text}" must give a torch.nn.Module. Got {type(model).__name__}.')
    return model if weights is None else _with_weights(model, weights)


def _with_weights(model: nn.Module, weights: Path) -> nn.Module:
    if not weights.exists():
        raise BadSetting(f'weights="{weights}" does not exist.')
    if weights.is_dir():
        loaded: nn.Module = load(weights, model)
        return loaded.mean_network() if isinstance(loaded, Bayesian) else loaded
    try:
        state = load_file(weights)
    except (SafetensorError, OSError) as error:
        raise BadSetting(
            f'weights="{weights}" is not a safetensors file ({error}). Write it with safetensors.torch.save_file, or '
            "with bl.save(model, folder). Pickled files are not read."
        ) from error
    check_fits(model.state_dict(), state, type(model).__name__)
    model.load_state_dict(state)
    return model


def data_by_name(text: str, batch_size: int, validation: float, seed: int) -> Loaders:
    """A data set by name, `mnist`, or from a function, `package.module:loaders`.

    The function gives loaders `(train, val)` or `(train, val, test)`, a dict of them, or a `bayeslim.data.Dataset`.

    Args:
        text: its name.
        batch_size: of the loaders of a data set.
        validation: the fraction of a data set's training part that is held out.
        seed: of the split and of the order.
    """
    call = parse(text, "data")
    if call.module:
        found = call.imported("data")
    else:
        table = {name: (lambda name=name, **options: data.load(name, **options)) for name in data.names()}
        found = call.of(table, "data")
    if isinstance(found, Dataset):
        return _loaders(found, batch_size, validation, seed)
    if isinstance(found, Mapping) and {"train", "val"} <= found.keys() <= {"train", "val", "test"}:
        return Loaders(**found)
    if isinstance(found, (tuple, list)) and len(found) in (2, 3):
        return Loaders(*found)
    raise BadSetting(
        f'data="{text}" must give loaders (train, val) or (train, val, test), a dict of them, or a '
        f"bayeslim.data.Dataset. Got {type(found).__name__}."
    )


def _loaders(found: Dataset, batch_size: int, validation: float, seed: int) -> Loaders:
    if not len(found.valid_x):
        found = found.with_validation(float(validation), seed)
    test = Loader(found.test_x, found.test_y, 1000, shuffle=False) if len(found.test_x) else None
    train = Loader(found.train_x, found.train_y, batch_size, seed=seed)
    return Loaders(train, Loader(found.valid_x, found.valid_y, 1000, shuffle=False), test)


def method_by_name(text: str) -> Method:
    """A method: `laplace`, `laplace(structure="diag")`, `variational`."""
    method: Method = parse(text, "method").of(METHODS, "method")
    return method


def likelihood_by_name(text: str) -> Likelihood:
    """A likelihood: `categorical`, `gaussian(noise="learned")`."""
    likelihood: Likelihood = parse(text, "likelihood").of(LIKELIHOODS, "likelihood")
    return likelihood


def prior_by_name(text: str) -> Prior:
    """A prior: `normal(0.2)`."""
    prior: Prior = parse(text, "prior").of(PRIORS, "prior")
    return prior
