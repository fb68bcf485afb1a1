"""`save` and `load`: Bayesian networks and plain ones, to a folder and back."""

from __future__ import annotations

import copy
import os
import re
from typing import Any

import torch
from torch import nn

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, CorruptFile, NotRegistered
from bayeslim.export.stored import architecture_of, read_program, resize_, unpacked, write_plain
from bayeslim.families import Family
from bayeslim.io.frozen import describe_frozen, take_frozen
from bayeslim.io.networks import create
from bayeslim.io.registry import entry_of, registered
from bayeslim.io.storage import check_fits, decode, encode, read_folder, write_folder
from bayeslim.noise import kept_random_state
from bayeslim.posteriors import Posterior
from bayeslim.prune.plan import Plan
from bayeslim.sites import check_has_values
from bayeslim.types import Inputs, Params, device_of

_MAX_EXTRA_ARGUMENT = 10_000
"""An argument of a network, such as an image's size, may exceed the number of its weights by this much."""

_MAX_CUT_FACTOR = 4096
"""The largest ratio of weights before and after compaction."""


def save(
    network: Bayesian | nn.Module,
    path: str | os.PathLike[str],
    *,
    example: Inputs | None = None,
    frozen: bool = True,
) -> None:
    """Write a Bayesian or plain network to a folder, as safetensors and JSON.

    A plain network's tensors are stored without their zeros where that is smaller.

    Args:
        network: the network to save.
        path: the folder; its old content is replaced only once the new content is complete.
        example: inputs of a plain network, to store the graph of its operations as well: `load` then needs no `model`.
            A network from `compact` needs none.
        frozen: whether to store parameters of a Bayesian network that do not train. Without them the file of a Bayesian
            adapter is small, and `load` takes them from the `model` it is given.
    """
    if not isinstance(network, nn.Module):
        raise TypeError(
            f"save takes a Bayesian or a torch.nn.Module. Got {type(network).__name__}. Of a quantised network, save "
            "its .network, or write it with bl.encode, a far smaller file."
        )
    check_has_values(network)
    if not isinstance(network, Bayesian):
        if not frozen:
            raise ValueError("frozen=False is for Bayesian networks: a plain network is stored whole.")
        write_folder(path, "network", *write_plain(network, example))
        return
    if example is not None:
        raise ValueError("example is for plain networks: the graph of a Bayesian one is not stored.")
    tensors: Params = {f"network:{name}": tensor for name, tensor in network.state_dict().items()}
    config = _bayesian_config(network, tensors)
    if not frozen:
        config["frozen"] = describe_frozen(network.model)
        for name in config["frozen"]["names"]:
            tensors.pop(f"network:{name}", None)
    write_folder(path, "bayesian", config, tensors)


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> Any:
    """Read a network back.

    Args:
        path: the folder that `save` wrote.
        model: a plain network of the architecture that was saved (its weights do not matter and are not changed).
            A network from `compact` is made of the original architecture, cut to the sizes in the file. Not needed for
            networks of `bayeslim.zoo`, nor for plain networks that were saved with their graph: those come back as a
            plain graph module that needs no class.

    Returns:
        a `Bayesian` or a plain module, as was saved, on the CPU or on the given model's device.
    """
    if isinstance(model, Bayesian) or not isinstance(model, nn.Module | None):
        raise TypeError(f"model must be a plain torch.nn.Module, such as was made Bayesian. Got {model!r}.")
    with torch.inference_mode(False):  # tensors made under inference mode could not be used outside of it
        return _load(path, model)


def _load(path: str | os.PathLike[str], model: nn.Module | None) -> Any:
    kind, config, tensors = read_folder(path, ("bayesian", "network"))
    tensors = unpacked(config, tensors) if kind == "network" else tensors
    state = {n.removeprefix("network:"): t for n, t in tensors.items() if n.startswith("network:")}
    state |= take_frozen(config.get("frozen"), model)
    network = _network(config.get("architecture"), model, state)
    if network is None:
        return read_program(config, tensors)
    what = type(network).__name__
    if kind == "network":
        check_fits(network.state_dict(), state, what)
        network.load_state_dict(state)
        return network
    own = network.state_dict()
    check_fits(own, {name: state[name] for name in own if name in state}, what)
    try:
        return _bayesian(network, config, tensors, state)
    except CorruptFile:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CorruptFile(f"{path} does not describe a Bayesian {what}: {error!r}.") from error


def _bayesian(network: nn.Module, config: dict[str, Any], tensors: Params, state: Params) -> Bayesian:
    """Build a Bayesian network from settings that are not trusted."""
    what, device = type(network).__name__, device_of(network)
    names = list(config["sites"])
    # One object for all parameters that share a prior, so that they share its hyperparameters.
    priors = {name: prior for prior, group in decode(config["priors"], tensors) for name in group}
    method, likelihood = decode(config["method"], tensors), decode(config["likelihood"], tensors)
    _check_family(method, network, names, state)
    # A name is itself here, not the regular expression that it also is.
    exact = {re.compile(re.escape(name)): priors[name] for name in names}
    bnn = Bayesian(network, method, likelihood, exact, list(exact), config["num_data"])
    if bnn.sites.names != tuple(names):
        unlike = sorted(set(bnn.sites.names) ^ set(names)) or names
        raise CorruptFile(f'The file does not fit {what}: "{unlike[0]}" is random in one of the two only.')
    _take_precision_(bnn, state)
    check_fits(bnn.state_dict(), state, what)
    masks = {n.removeprefix("mask:"): t for n, t in tensors.items() if n.startswith("mask:")}
    parameters = dict(bnn.model.named_parameters())
    for name, mask in masks.items():
        if name not in parameters or mask.shape != parameters[name].shape or mask.dtype != torch.bool:
            raise CorruptFile(f'The file holds a mask of "{name}" that does not fit {what}.')
    bnn.step, bnn.steps_per_epoch = _count(config["step"]), _count(config["steps_per_epoch"] or 0) or None
    found = {key: _restore(key, entry, tensors) for key, entry in dict(config["posteriors"]).items()}
    if "posterior" in found:
        _check_posterior(found["posterior"], bnn)
    bnn.state.update({key: posterior.to(device) for key, posterior in found.items()})
    bnn.masks = {name: mask.to(device) for name, mask in masks.items()}
    bnn.plan_ = None if config["plan"] is None else Plan.from_json(config["plan"], bnn.model)
    bnn.num_data_given = config.get("num_data_given") is True
    bnn.load_state_dict(state)
    return bnn.eval()


def _check_posterior(posterior: Posterior, bnn: Bayesian) -> None:
    """Refuse a posterior over other parameters than the network's."""
    parameters = dict(bnn.model.named_parameters())
    if not posterior.mean:
        raise CorruptFile("The file holds a posterior of no parameters.")
    for name, mean in posterior.mean.items():
        if name not in parameters or parameters[name].shape != mean.shape:
            raise CorruptFile(
                f'The file holds a posterior of "{name}" with shape {tuple(mean.shape)}, which is no parameter of '
                f"{bnn.sites.model}."
            )


def _check_family(method: Any, network: nn.Module, names: list[str], state: Params) -> None:
    """Refuse a family that would add far more parameters than the file holds."""
    family = getattr(method, "family", None)
    if not isinstance(family, Family):
        return
    random = sum(network.get_parameter(name).numel() for name in names)
    if family.numbers_per_weight * random > sum(tensor.numel() for tensor in state.values()):
        raise CorruptFile(f"The file names a family with far more parameters than it holds: {family!r}.")


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise CorruptFile(f"The file counts {value!r} steps.")
    return value


def _bayesian_config(bnn: Bayesian, tensors: Params) -> dict[str, Any]:
    posteriors = {}
    for key, value in bnn.state.items():
        if isinstance(value, Posterior):
            entry = entry_of(value)
            if entry is None:
                name = type(value).__name__
                raise BayeslimError(f'{name} cannot be saved: decorate the class with @bl.register("posterior").')
            own = value.tensors()
            # A tensor file keeps no order, and a covariance between parameters, or a seeded draw of them, needs one.
            posteriors[key] = {"kind": entry[1], "config": encode(value.config(), tensors), "tensors": list(own)}
            tensors.update({f"posterior:{key}:{name}": tensor for name, tensor in own.items()})
    tensors.update({f"mask:{name}": mask for name, mask in bnn.masks.items()})
    return {
        "architecture": architecture_of(bnn.model) | {"class": bnn.sites.model},
        "method": encode(bnn.method, tensors),
        "likelihood": encode(bnn.likelihood, tensors),
        "priors": encode([[bnn.priors.given[group[0]], group] for group in bnn.priors.shared()], tensors),
        "sites": list(bnn.sites.names),
        "num_data": bnn.num_data,
        "num_data_given": bnn.num_data_given,
        "step": bnn.step,
        "steps_per_epoch": bnn.steps_per_epoch,
        "posteriors": posteriors,
        "plan": None if bnn.plan_ is None else bnn.plan_.to_json(),
    }


def _restore(key: str, entry: Any, tensors: Params) -> Posterior:
    if not isinstance(entry, dict):
        raise CorruptFile(f"The file does not describe its posterior: {entry!r}.")
    try:
        posterior_class = registered("posterior", entry["kind"])
    except NotRegistered as error:
        raise CorruptFile(f"The file holds a posterior that cannot be built here. {error}") from error
    own = {name: tensors[f"posterior:{key}:{name}"] for name in entry["tensors"]}
    posterior: Posterior = posterior_class.restore(decode(entry["config"], tensors), own)
    return posterior


def _network(architecture: Any, model: nn.Module | None, state: Params) -> nn.Module | None:
    """Build the network of a file, cut to its sizes; None if its class is not known."""
    if not isinstance(architecture, dict):
        raise CorruptFile("The file does not say which architecture it holds.")
    sizes = architecture.get("sizes")
    if model is None:
        return None if architecture.get("zoo") is None else _zoo_network(architecture["zoo"], sizes, state)
    network = copy.deepcopy(model)
    if sizes is not None:
        resize_(network, state, sizes)
    return network


def _zoo_network(arguments: Any, sizes: Any, state: Params) -> nn.Module:
    room = sum(tensor.numel() for tensor in state.values()) + _MAX_EXTRA_ARGUMENT
    try:
        if any(isinstance(value, int) and abs(value) > room for value in dict(arguments).values()):
            raise CorruptFile("The file names a network far larger than the weights it holds.")
        with torch.device("meta"):
            # On the meta device first: a file must not cause an allocation far larger than itself.
            outline = create(**arguments)
        if sizes is not None:
            if sum(tensor.numel() for tensor in outline.state_dict().values()) > _MAX_CUT_FACTOR * room:
                raise CorruptFile("The file names a network far larger than the weights it holds.")
            resize_(outline, state, sizes)
        _take_precision_(outline, state)
        whole = outline.state_dict()
        check_fits(whole, {name: state[name] for name in whole if name in state}, "the architecture it names")
        with kept_random_state():
            network = create(**arguments)
        if sizes is not None:
            resize_(network, state, sizes)
        _take_precision_(network, state)
        return network
    except CorruptFile:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        raise CorruptFile(f"The file names a network that bayeslim.zoo does not have: {error}.") from error


def _take_precision_(network: nn.Module, state: Params) -> None:
    """Convert floating parameters and buffers to the dtypes in a file."""
    for name, tensor in network.state_dict(keep_vars=True).items():
        if name in state and tensor.is_floating_point() and state[name].is_floating_point():
            tensor.data = tensor.data.to(state[name].dtype)
