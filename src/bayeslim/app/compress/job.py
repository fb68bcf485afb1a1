"""The settings of a compression, checked before any work is done, and the identity of a run."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bayeslim.bayesian import Bayesian, bayesianize
from bayeslim.compact import units
from bayeslim.compact.example import run_example
from bayeslim.errors import BayeslimError, MissingExtra, closest
from bayeslim.io.digest import digest
from bayeslim.likelihoods import Categorical, Likelihood
from bayeslim.methods.base import Method
from bayeslim.methods.laplace import Laplace
from bayeslim.methods.variational import Variational
from bayeslim.posteriors import Posterior
from bayeslim.priors import PriorSpec
from bayeslim.prune import Budget, Plan
from bayeslim.prune.candidates import pattern
from bayeslim.recipes import Recipe
from bayeslim.train.fingerprint import fingerprint, is_batches
from bayeslim.train.fit import fit as training
from bayeslim.train.loaders import Loader, size_of_data
from bayeslim.types import Inputs, device_of, split_batch, to_device

FORMATS = ("onnx", "pt2", "c")


@dataclass(frozen=True)
class Job:
    """The settings of a compression; `compress` documents them."""

    budget: Budget | Plan | None
    granularity: str = "weight"
    criterion: Any = "auto"
    steps: int = 10
    fit: Mapping[str, Any] | None = None
    fine_tune: Mapping[str, Any] | None = None
    formats: tuple[str, ...] | None = None
    baseline: bool = True
    seed: int = 0
    starts_trained: bool = False
    """Whether the network to compare with is the one that training to be sparse starts from."""

    def __post_init__(self) -> None:
        if self.budget is None and pattern(self.granularity) is None:
            raise TypeError("compress needs a budget, such as bl.Budget(sparsity=0.9).")
        if not isinstance(self.budget, Budget | Plan | None):
            raise TypeError(f"budget must be a bl.Budget or a bl.Plan. Got {self.budget!r}.")
        if type(self.steps) is not int or self.steps < 1:
            raise ValueError(f"steps must be a whole number, at least 1. Got {self.steps!r}.")
        for name, options in (("fit", self.fit), ("fine_tune", self.fine_tune)):
            if options is not None and not isinstance(options, Mapping):
                raise TypeError(f'{name} holds options of training, such as {{"epochs": 3}}. Got {options!r}.')
        if self.fine_tune is not None and "epochs" not in self.fine_tune:
            raise ValueError('fine_tune needs epochs, such as {"epochs": 3, "lr": 1e-3}.')
        for name in self.formats or ():
            if name not in FORMATS:
                raise ValueError(f"formats must be some of {', '.join(FORMATS)}. Got {name!r}.")
            if name == "onnx" and not has_onnx():
                raise MissingExtra("onnx, onnxscript or onnxruntime", "onnx", "Export to ONNX")


def has_onnx() -> bool:
    """Check whether the packages that write and check ONNX files are installed."""
    return all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))


def readable(loader: Iterable[Any], name: str) -> Iterable[Any]:
    """Return a loader that can be read many times; a generator is read into memory."""
    if not isinstance(loader, Iterable):
        raise TypeError(f"{name} must be a loader of batches (inputs, targets). Got {type(loader).__name__}.")
    loader = list(loader) if iter(loader) is loader else loader
    if next(iter(loader), None) is None:
        raise BayeslimError(f"The {name} loader gave no batches.")
    return loader


def start_over(seed: int, loader: Any) -> Callable[[], None]:
    """Build a function that resets all random numbers and a loader's order.

    It seeds the random numbers with `seed`, and restores the present state of the loader's order.
    """
    generator = getattr(loader, "generator", None)
    order = loader.state_dict() if isinstance(loader, Loader) else None
    state = generator.get_state() if isinstance(generator, torch.Generator) else None

    def prepare() -> None:
        torch.manual_seed(seed)
        if order is not None:
            loader.load_state_dict(order)
        if generator is not None and state is not None:
            generator.set_state(state)

    return prepare


def prepared(
    model: nn.Module | Bayesian,
    method: Method | None,
    likelihood: Likelihood | None,
    prior: PriorSpec | None,
    train: Iterable[Any],
    job: Job,
) -> Bayesian:
    """Make a plain network Bayesian, not fitted yet; return a Bayesian one as it is."""
    if isinstance(model, Bayesian):
        if method is not None or likelihood is not None or prior is not None:
            raise TypeError("A Bayesian network has its method, likelihood and prior already. Leave them out.")
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or a Bayesian. Got {type(model).__name__}.")
    method = Laplace() if method is None else method
    if isinstance(method, Variational) and "epochs" not in (job.fit or {}):
        raise ValueError('A variational posterior is trained: pass fit={"epochs": 20}, or use method=bl.Laplace().')
    return bayesianize(model, method, likelihood=likelihood or guessed_likelihood(train), prior=prior)


def refuse_with_recipe(
    recipe: Recipe,
    method: Method | None,
    prior: PriorSpec | None,
    granularity: str,
    fit: Mapping[str, Any] | None,
) -> None:
    """Refuse settings that a recipe fixes: method, prior, granularity and epochs."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be one of bayeslim.recipes, such as recipes.sparse_vd(). Got {recipe!r}.")
    if method is not None or prior is not None:
        raise TypeError(f"The recipe {recipe.name} has its method and prior already. Leave method and prior out.")
    if recipe.budget is not None and granularity != "weight":
        raise ValueError(
            f'The recipe {recipe.name} fixes the granularity, which is weights or gates. Leave granularity="'
            f'{granularity}" out.'
        )

    epochs = (fit or {}).get("epochs", recipe.fit["epochs"])
    if epochs != recipe.fit["epochs"]:
        raise ValueError(
            f"The recipe {recipe.name} was made for {recipe.fit['epochs']} epochs, over which its KL warms up. Leave "
            f"epochs out of fit and give them to it: recipes.{recipe.name}(epochs={epochs})."
        )


def guessed_likelihood(train: Iterable[Any]) -> Likelihood:
    """Guess the likelihood: classes, if the targets are whole numbers, else an error."""
    _, targets = split_batch(next(iter(train)))
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise BayeslimError(
            f"The likelihood of targets of {targets.dtype} cannot be guessed. Pass likelihood=..., such as "
            "likelihoods.Gaussian() for values or likelihoods.Bernoulli() for binary targets."
        )
    return Categorical()


def check(bnn: Bayesian, job: Job, example: Inputs) -> None:
    """Refuse settings that would fail later, before any work is done."""
    _check_fine_tune(job.fine_tune or {}, bnn.method)
    plain = bnn.plain_copy().eval()
    for name, parameter in plain.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise BayeslimError(
                f'"{name}" of {bnn.sites.model} holds NaN or infinite values. Repair or retrain the network first.'
            )
    if isinstance(job.budget, Plan):
        job.budget.check(plain)
    run_example(plain, to_device(example, device_of(plain)))
    units(plain, example)


def _check_fine_tune(options: Mapping[str, Any], method: Method) -> None:
    known = options_of(training)
    if not isinstance(method, Laplace):  # its fine-tuning is plain training; its own fit then takes no options
        known = list(dict.fromkeys([*known, *options_of(method.fit)]))
    unknown = [str(name) for name in options if name not in known]
    if unknown:
        alike = closest(unknown[0], known)
        hint = f" Closest: {alike}." if alike else ""
        raise TypeError(f"fine_tune does not take {', '.join(unknown)}.{hint} It takes: {', '.join(known)}.")


def options_of(function: Callable[..., Any]) -> list[str]:
    """List the keyword-only arguments of a function."""
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def identity(bnn: Bayesian, train: Any, val: Any, job: Job) -> dict[str, str]:
    """List the facts that identify a run: network, posterior, method, prior, data."""
    return {
        "network": bnn.sites.model,
        "weights": digest_of_weights(bnn),
        "posterior": _digest_of_posteriors(bnn),
        "sites": digest(sorted(bnn.sites.names))[:16],
        "num_data": str(bnn.num_data),
        "masks": _digest_of(dict(sorted(bnn.masks.items()))) if bnn.masks else "none",
        "method": words(bnn.method),
        "likelihood": repr(bnn.likelihood),
        "prior": digest(f"{n}: {p!r}" for n, p in sorted(bnn.priors.items()))[:16],
        "training": words(job.fit or {}),
        "data": described_both(train, val),
        "seed": str(job.seed),
    }


def digest_of_weights(network: nn.Module) -> str:
    """Hash the weights of a network."""
    return _digest_of(network.state_dict())


def _digest_of_posteriors(bnn: Bayesian) -> str:
    """Hash the posteriors that a network keeps beside its weights, or "none"."""
    kept = {key: value for key, value in bnn.state.items() if isinstance(value, Posterior)}
    tensors = {f"{key} {value.kind} {name}": t for key, value in kept.items() for name, t in value.tensors().items()}
    return _digest_of(dict(sorted(tensors.items()))) if tensors else "none"


def _digest_of(tensors: Mapping[str, Tensor]) -> str:
    return digest(part for named in tensors.items() for part in named)[:16]


def size_of(loader: Any) -> str:
    """Describe the number of examples of a loader."""
    size = size_of_data(loader)
    return "unknown" if size is None else f"{size} examples"


def described(loader: Any) -> str:
    """Describe data by their size, and by a hash if they can be read without drawing."""
    content = fingerprint(loader)
    return size_of(loader) if content is None else f"{size_of(loader)} (content {content})"


def described_both(train: Any, val: Any) -> str:
    """Describe the data of a run."""
    return f"{described(train)} for training, {described(val)} for validation"


def words(value: Any) -> str:
    """Describe a setting, in words that are the same in every run."""
    if isinstance(value, Loader | DataLoader) or is_batches(value):
        return described(value)
    if isinstance(value, Plan):
        return value.to_json()
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={words(value[key])}" for key in sorted(value))
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
