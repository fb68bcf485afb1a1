"""`save` and `load`: Bayesian networks and plain ones, to a folder and back."""

from __future__ import annotations

import copy
import os
import re
from typing import Any

import torch
from torch import nn

from bayeslim import zoo
from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, CorruptFile
from bayeslim.noise import kept_random_state
from bayeslim.posteriors import POSTERIORS, Posterior
from bayeslim.storage import check_fits, decode, encode, read_folder, write_folder
from bayeslim.types import Params, device_of

_LARGEST_PLAIN_ARGUMENT = 10_000
"""An argument of a network, such as an image's size, may exceed the number of its weights, but not by much."""


def save(network: Bayesian | nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a Bayesian or plain network to a folder, as safetensors and JSON.

    Args:
        network: what to save.
        path: the folder; what it held before is replaced only once the new content is complete.
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"save takes a Bayesian or a torch.nn.Module. Got {type(network).__name__}.")
    tensors: Params = {f"network:{name}": tensor for name, tensor in network.state_dict().items()}
    if isinstance(network, Bayesian):
        config = _bayesian_config(network, tensors)
        write_folder(path, "bayesian", config, tensors)
    else:
        write_folder(path, "network", {"architecture": _architecture(network)}, tensors)


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> Any:
    """Read a network back.

    Args:
        path: the folder that `save` wrote.
        model: a plain network of the architecture that was saved (its weights do not matter and are not changed).
            Not needed for networks of `bayeslim.zoo`.

    Returns:
        a `Bayesian` or a plain module, as was saved, on the CPU or on the given model's device.
    """
    if isinstance(model, Bayesian) or not isinstance(model, nn.Module | None):
        raise TypeError(f"model must be a plain torch.nn.Module, such as was made Bayesian. Got {model!r}.")
    kind, config, tensors = read_folder(path, ("bayesian", "network"))
    state = {n.removeprefix("network:"): t for n, t in tensors.items() if n.startswith("network:")}
    network = _network(config.get("architecture"), model, state)
    what = type(network).__name__
    if kind == "network":
        check_fits(network.state_dict(), state, what)
        network.load_state_dict(state)
        return network
    try:
        return _bayesian(network, config, tensors, state)
    except CorruptFile:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CorruptFile(f"{path} does not describe a Bayesian {what}: {error!r}.") from error


def _bayesian(network: nn.Module, config: dict[str, Any], tensors: Params, state: Params) -> Bayesian:
    """Build a Bayesian network of settings that are not trusted."""
    what, device = type(network).__name__, device_of(network)
    names, priors = list(config["sites"]), decode(config["priors"], tensors)
    method, likelihood = decode(config["method"], tensors), decode(config["likelihood"], tensors)
    # A name is itself here, not the regular expression that it also is.
    exact = {re.compile(re.escape(name)): priors[name] for name in names}
    bnn = Bayesian(network, method, likelihood, exact, list(exact), config["num_data"])
    if bnn.sites.names != tuple(names):
        unlike = sorted(set(bnn.sites.names) ^ set(names)) or names
        raise CorruptFile(f'The file does not fit {what}: "{unlike[0]}" is random in one of the two only.')
    check_fits(bnn.state_dict(), state, what)
    masks = {n.removeprefix("mask:"): t for n, t in tensors.items() if n.startswith("mask:")}
    parameters = dict(bnn.model.named_parameters())
    for name, mask in masks.items():
        if name not in parameters or mask.shape != parameters[name].shape or mask.dtype != torch.bool:
            raise CorruptFile(f'The file holds a mask of "{name}" that does not fit {what}.')
    bnn.step, bnn.steps_per_epoch = _count(config["step"]), _count(config["steps_per_epoch"] or 0) or None
    bnn.state.update({key: _restore(key, entry, tensors) for key, entry in dict(config["posteriors"]).items()})
    bnn.masks = {name: mask.to(device) for name, mask in masks.items()}
    bnn.load_state_dict(state)
    return bnn.eval()


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise CorruptFile(f"The file counts {value!r} steps.")
    return value


def _bayesian_config(bnn: Bayesian, tensors: Params) -> dict[str, Any]:
    posteriors = {}
    for key, value in bnn.state.items():
        if isinstance(value, Posterior):
            posteriors[key] = {"kind": value.kind, "config": encode(value.config(), tensors)}
            tensors.update({f"posterior:{key}:{name}": tensor for name, tensor in value.tensors().items()})
    tensors.update({f"mask:{name}": mask for name, mask in bnn.masks.items()})
    return {
        "architecture": _architecture(bnn.model) | {"class": bnn.sites.model},
        "method": encode(bnn.method, tensors),
        "likelihood": encode(bnn.likelihood, tensors),
        "priors": encode(bnn.priors, tensors),
        "sites": list(bnn.sites.names),
        "num_data": bnn.num_data,
        "step": bnn.step,
        "steps_per_epoch": bnn.steps_per_epoch,
        "posteriors": posteriors,
    }


def _restore(key: str, entry: Any, tensors: Params) -> Posterior:
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or kind not in POSTERIORS:
        raise CorruptFile(f"The file holds a posterior of a kind that this bayeslim does not have: {kind!r}.")
    prefix = f"posterior:{key}:"
    own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    return POSTERIORS[kind].restore(decode(entry["config"], tensors), own)


def _architecture(model: nn.Module) -> dict[str, Any]:
    return {"class": type(model).__name__, "zoo": getattr(model, "zoo_config", None)}


def _network(architecture: Any, model: nn.Module | None, state: Params) -> nn.Module:
    if not isinstance(architecture, dict):
        raise CorruptFile("The file does not say which architecture it holds.")
    if model is not None:
        return copy.deepcopy(model)
    if architecture.get("zoo") is None:
        raise BayeslimError(
            f"The weights of a {architecture.get('class')} were saved, not its code. Pass the architecture: "
            "load(path, model=YourModel())."
        )
    room = sum(tensor.numel() for tensor in state.values()) + _LARGEST_PLAIN_ARGUMENT
    try:
        if any(isinstance(value, int) and abs(value) > room for value in dict(architecture["zoo"]).values()):
            raise CorruptFile("The file names a network far larger than the weights it holds.")
        with torch.device("meta"):
            # Without memory first: a file must not make us allocate more than it holds.
            outline = zoo.create(**architecture["zoo"]).state_dict()
        check_fits(outline, {name: state[name] for name in outline if name in state}, "the architecture it names")
        with kept_random_state():
            return zoo.create(**architecture["zoo"])
    except CorruptFile:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        raise CorruptFile(f"The file names a network that bayeslim.zoo does not have: {error}.") from error
