"""Networks, data and methods by their names."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from bayeslim.app import data
from bayeslim.app.cli.calls import BadSetting, first_line, parse
from bayeslim.app.compress.job import guessed_likelihood
from bayeslim.app.data.cells import is_table
from bayeslim.app.data.load import IMAGE_SETS
from bayeslim.bayesian import Bayesian, bayesianize
from bayeslim.distill.student import Student
from bayeslim.families import Point
from bayeslim.io.registry import all_registered
from bayeslim.io.saving import load
from bayeslim.io.storage import INDEX, check_fits
from bayeslim.likelihoods import Likelihood
from bayeslim.methods.base import Method
from bayeslim.methods.subnetwork import Subnetwork
from bayeslim.methods.variational import Variational
from bayeslim.priors import Normal, Prior
from bayeslim.recipes import RECIPES, Recipe
from bayeslim.train.dataset import Dataset, Scale
from bayeslim.train.loaders import Loader
from bayeslim.types import Inputs, Params, split_batch

FITTED = {name: method for name, method in all_registered("method").items() if method is not Student}
"""Methods that find a posterior from data; a student learns from a teacher."""
PARTS = {**all_registered("family"), **all_registered("gate"), **all_registered("schedule"), "subnetwork": Subnetwork}
"""Parts of methods, by name."""

SPARSE = [name.replace("_", "-") for name, recipe in RECIPES.items() if recipe().budget is not None]
"""Recipes with a cut of their own, as a person writes them."""

PICKLED = (".pt", ".pth")
"""Endings of files that torch.save writes."""

NETWORK = "network"
"""The folder of the network in a run of `bayeslim fit`."""


@dataclass(frozen=True)
class Loaders:
    """Training and validation data, and test data if there are any.

    Attributes:
        train: batches to train on.
        val: validation batches.
        test: test batches.
        input_scale: the scale that standardised the inputs, if it is known.
        target_scale: the scale that standardised the targets, if it is known.
    """

    train: Any
    val: Any
    test: Any = None
    input_scale: Scale | None = None
    target_scale: Scale | None = None

    @property
    def example(self) -> Inputs:
        """One batch of inputs."""
        return split_batch(next(iter(self.val)))[0]

    @property
    def held_out(self) -> tuple[str, Any]:
        """The data to measure on, with their name: the test part if any, else validation."""
        return ("validation", self.val) if self.test is None else ("test", self.test)


def model_by_name(text: str, weights: Path | None = None, seed: int = 0) -> nn.Module:
    """Build a network of the zoo or of the user's own code, or load its weights too.

    Examples of names: `mlp(hidden=100)`, `package.module:factory`.
    """
    call = parse(text, "model")
    torch.manual_seed(seed)
    model = call.imported("model") if call.module else call.of(all_registered("network"), "model")
    if not isinstance(model, nn.Module):
        raise BadSetting(f'model="{text}" must give a torch.nn.Module. Got {type(model).__name__}.')
    return model if weights is None else _with_weights(model, weights)


def _with_weights(model: nn.Module, weights: Path) -> nn.Module:
    if not weights.exists():
        raise BadSetting(f'weights="{weights}" does not exist.')
    if weights.is_dir():
        loaded: nn.Module = load(network_in(weights), model)
        return loaded.mean_network() if isinstance(loaded, Bayesian) else loaded
    state = _pickled_state(weights) if weights.suffix in PICKLED else _safetensors_state(weights)
    check_fits(model.state_dict(), state, type(model).__name__)
    model.load_state_dict(state)
    return model


def _safetensors_state(weights: Path) -> Params:
    try:
        return load_file(weights)
    except (SafetensorError, OSError) as error:
        raise BadSetting(
            f'weights="{weights}" is not a safetensors file ({error}). Write it with safetensors.torch.save_file, with '
            f"bl.save(model, folder), or as a state dict in a file that ends in {' or '.join(PICKLED)}."
        ) from error


def _pickled_state(weights: Path) -> Params:
    """Read a state dict that torch.save wrote, by torch's reader that runs no code."""
    try:
        found = torch.load(weights, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError) as error:
        raise BadSetting(
            f'weights="{weights}" cannot be read as plain weights ({first_line(error).rstrip(".")}). Write only the '
            "state dict: torch.save(model.state_dict(), file)."
        ) from error
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]  # as training frameworks write their checkpoints
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise BadSetting(
            f'weights="{weights}" must hold a state dict: tensors by name. Write it with '
            "torch.save(model.state_dict(), file)."
        )
    return dict(found)


def network_in(folder: Path) -> Path:
    """Find the folder with the network: this one, or one in a run of `bayeslim fit`."""
    inside = folder / NETWORK
    return inside if (inside / INDEX).is_file() and not (folder / INDEX).is_file() else folder


def data_by_name(
    text: str, batch_size: int, validation: float, seed: int, device: torch.device | None = None
) -> Loaders:
    """Load a data set by name, `mnist`, or from `package.module:loaders`.

    The function gives loaders `(train, val)` or `(train, val, test)`, a dict of them, or a `bayeslim.data.Dataset`.
    Loaders are taken as they are; of a data set, the fraction `validation` of the training part is held out.
    """
    found = _found(text)
    return loaders_of(found, batch_size, validation, seed, device) if isinstance(found, Dataset) else found


def held_out_by_name(text: str, validation: float, seed: int, device: torch.device | None = None) -> Loaders:
    """Load data to measure on.

    Of an image set only the test part is read, and it stands for all three parts.
    """
    call = parse(text, "data")
    in_parts = not call.module and call.name in IMAGE_SETS
    found = _found(text, {"part": "test"} if in_parts else {})
    if not isinstance(found, Dataset):
        return found
    if not len(found.test_x):
        return loaders_of(found, 1000, validation, seed, device)
    test = Loader(found.test_x, found.test_y, 1000, shuffle=False, device=device)
    return Loaders(test, test, test, found.input_scale, found.target_scale)


def _found(text: str, options: Mapping[str, Any] | None = None) -> Dataset | Loaders:
    """Load the data set or the loaders of a name."""
    if is_table(text):
        raise BadSetting(f'"{text}" is a table: bayeslim fit --data {text} --target NAME, then prune what it fitted.')
    call = parse(text, "data")
    if call.module:
        found = call.imported("data")
    else:
        table = {
            name: (lambda name=name, **own: data.load(name, **{**(options or {}), **own})) for name in data.names()
        }
        found = call.of(table, "data")
    if isinstance(found, Dataset):
        return found
    if isinstance(found, Mapping) and {"train", "val"} <= found.keys() <= {"train", "val", "test"}:
        return Loaders(**found)
    if isinstance(found, (tuple, list)) and len(found) in (2, 3):
        return Loaders(*found)
    raise BadSetting(
        f'data="{text}" must give loaders (train, val) or (train, val, test), a dict of them, or a '
        f"bayeslim.data.Dataset. Got {type(found).__name__}."
    )


def loaders_of(
    found: Dataset, batch_size: int, validation: float, seed: int, device: torch.device | None = None
) -> Loaders:
    """Make loaders of a data set; validation data are held out if it has none."""
    if not len(found.train_x):
        raise BadSetting(f"{found.name} has only a test part, and cannot be trained on.")
    if not len(found.valid_x):
        found = found.with_validation(float(validation), seed)
    return Loaders(
        Loader(found.train_x, found.train_y, batch_size, seed=seed, device=device),
        Loader(found.valid_x, found.valid_y, 1000, shuffle=False, device=device),
        Loader(found.test_x, found.test_y, 1000, shuffle=False, device=device) if len(found.test_x) else None,
        found.input_scale,
        found.target_scale,
    )


def method_by_name(text: str) -> Method:
    """Build a method: `laplace`, `variational(kl_schedule=warmup(end=5))`."""
    method: Method = parse(text, "method", PARTS).of(FITTED, "method")
    return method


def recipe_by_name(text: str, epochs: int | None = None) -> Recipe:
    """Build a recipe: `sparse-vd`, `bottleneck(strength=0.2)`; its own epochs count."""
    call = parse(text, "recipe", all_registered("prior"))
    if epochs is not None and "epochs" not in (call.kwargs or {}):
        call = replace(call, kwargs={**(call.kwargs or {}), "epochs": epochs})
    recipe: Recipe = call.of(RECIPES, "recipe")
    return recipe


def trained_as_usual(
    model: nn.Module, loaders: Loaders, likelihood: Likelihood | None, recipe: Recipe, lr: float, seed: int
) -> nn.Module:
    """Train a network for a recipe to start from, for a fifth of the recipe's epochs."""
    bnn = bayesianize(
        model, Variational(Point()), likelihood=likelihood or guessed_likelihood(loaders.train), prior=Normal(1.0)
    )
    epochs = max(1, round(recipe.fit["epochs"] / 5))
    bnn.fit(loaders.train, epochs=epochs, lr=lr, lr_schedule="cosine", seed=seed)
    return bnn.mean_network()


def likelihood_by_name(text: str) -> Likelihood:
    """Build a likelihood: `categorical`, `gaussian(noise="learned")`."""
    likelihood: Likelihood = parse(text, "likelihood").of(all_registered("likelihood"), "likelihood")
    return likelihood


def prior_by_name(text: str) -> Prior:
    """Build a prior: `normal(0.2)`, `normal(learn=True, hyperprior=student_t())`."""
    prior: Prior = parse(text, "prior", all_registered("prior")).of(all_registered("prior"), "prior")
    return prior


def device_by_name(text: str) -> torch.device:
    """Find a device: `cpu`, `cuda`, `cuda:1`, or `auto` for a GPU if there is one."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadSetting(
            f'device="{text}" cannot be used: torch finds no such device here. Use "cpu" or "auto".'
        ) from error
    return device
