"""Plain networks in a folder: their configuration, and how they are built again.

Tensors are packed without their zeros, so that the file shrinks with the non-zeros. A compacted network has sizes that
its class does not know. It is read in one of these ways, none of which unpickles or runs code of the file:

* as the given `model`, or the network of `bayeslim.zoo` that the file names, cut to the sizes in the file;
* as the graph of its operations (`portable`), which needs no class at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from bayeslim.compact.example import EXAMPLE, batches, run_example
from bayeslim.compact.quiet import one_thread_at_a_time
from bayeslim.compact.rebuild import put_tensors
from bayeslim.compact.sparse import SEPARATOR, pack, unpack
from bayeslim.compact.trace import evaluating_copy
from bayeslim.errors import BayeslimError, CorruptFile, ShapeMismatch, UnsupportedModel
from bayeslim.export.check import ExportFailed, prove
from bayeslim.export.portable import as_graph, build, describe
from bayeslim.io.networks import config_of, create
from bayeslim.types import Inputs, Params, to_device

_OF_A_GRAPH = "graph"
"""The entry in place of the sizes of modules, for a network that is a traced graph."""
_TENSOR, _CONSTANT = "network:", "constant:"
_MIN_CLAIMED_BYTES = 64 << 20
"""Tensors up to this many bytes are unpacked without a check."""
_MAX_EXPANSION_FACTOR = 4096
"""The largest ratio of unpacked to packed bytes."""


def architecture_of(model: nn.Module) -> dict[str, Any]:
    """Describe a network: class, entry in the zoo, sizes if it was compacted."""
    found = {"class": type(model).__name__, "zoo": config_of(model)}
    if isinstance(model, fx.GraphModule):
        found["sizes"] = _OF_A_GRAPH
    elif hasattr(model, EXAMPLE) or _is_cut(model, found["zoo"]):
        found["sizes"] = {path: _integers(module) for path, module in model.named_modules() if _integers(module)}
    return found


@one_thread_at_a_time
def write_plain(network: nn.Module, example: Inputs | None) -> tuple[dict[str, Any], Params]:
    """Return the config and the tensors of a plain network, for a folder.

    Args:
        network: the network.
        example: inputs to trace its graph on; by default those that it was compacted with.

    Raises:
        UnsupportedModel: if an example is given and the network cannot be stored as a graph.
    """
    state = network.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise BayeslimError(
                f'"{name}" of {type(network).__name__} is a {type(value).__name__}, not a tensor, and cannot be saved '
                "without pickle."
            )
    config: dict[str, Any] = {"architecture": architecture_of(network)}
    tensors = {f"{_TENSOR}{name}": tensor for name, tensor in state.items()}
    if example is not None or config["architecture"]["zoo"] is None:
        try:
            traced_on = example if example is not None else getattr(network, EXAMPLE, None)
            config["program"], constants = _program(network, state, traced_on)
            tensors |= {f"{_CONSTANT}{name}": tensor for name, tensor in constants.items()}
        except (UnsupportedModel, ShapeMismatch, ExportFailed) as error:
            if example is not None:
                raise
            config["no_program"] = str(error)
    unique, config["tied"] = _without_tied(tensors)
    return config, pack(unique)


def unpacked(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Params:
    """Unpack the tensors of a folder, tied ones under each of their names.

    Raises:
        CorruptFile: if they are damaged, or would take far more memory than the file.
    """
    stored = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if _claimed(tensors) > max(_MIN_CLAIMED_BYTES, _MAX_EXPANSION_FACTOR * stored):
        raise CorruptFile("The file claims tensors far larger than a file of its size can hold.")
    full = unpack(tensors)
    tied = config.get("tied", {})
    if not isinstance(tied, dict) or not all(isinstance(name, str) and name in full for name in tied.values()):
        raise CorruptFile("The file refers to a tied tensor that is not there.")
    return full | {alias: full[name] for alias, name in tied.items()}


def read_program(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """Build the network of a folder from its graph."""
    if config.get("program") is None:
        architecture, reason = config["architecture"], config.get("no_program")
        raise BayeslimError(
            f"The weights of a {architecture.get('class')} were saved, not its code. Pass the architecture: "
            f"load(path, model=YourModel()).{f' There is no graph of it to run instead: {reason}' if reason else ''}"
        )
    named = {name.partition(":")[2]: tensor for name, tensor in tensors.items() if name.startswith(_CONSTANT)}
    named |= {name.removeprefix(_TENSOR): tensor for name, tensor in tensors.items() if name.startswith(_TENSOR)}
    return build(config["program"], named)


def resize_(network: nn.Module, state: Mapping[str, Tensor], sizes: Any) -> None:
    """Cut a network to the sizes in a file, in place.

    Tensors that do not fit are left for the check that follows.

    Raises:
        UnsupportedModel: if the file holds a graph, which has constants of its own in place of the class's code.
        CorruptFile: if the sizes are not a table.
    """
    if sizes == _OF_A_GRAPH:
        raise UnsupportedModel(
            f"The file holds a graph that was traced from {type(network).__name__}: it was compacted to sizes that the "
            "forward of the class does not take. Load it without model=."
        )
    own = dict(network.named_parameters(remove_duplicate=False)) | dict(network.named_buffers(remove_duplicate=False))
    smaller = {
        name: state[name].to(old)
        for name, old in own.items()
        if name in state and state[name].shape != old.shape and _is_within(state[name], old)
    }
    if not smaller:
        return
    if not isinstance(sizes, dict):
        raise CorruptFile("The file's sizes are not a table.")
    names = {name: tuple(other for other, tensor in own.items() if tensor is own[name]) for name in smaller}
    put_tensors(network, smaller, names)
    modules = dict(network.named_modules())
    for path, attributes in sizes.items():
        known = _integers(modules[path]) if path in modules else {}
        for attribute, value in attributes.items() if isinstance(attributes, dict) else ():
            if attribute in known and type(value) is int:
                setattr(modules[path], attribute, value)
    object.__setattr__(network, EXAMPLE, None)  # it counts as compacted when it is saved again


def _program(network: nn.Module, state: Mapping[str, Tensor], example: Inputs | None) -> tuple[dict[str, Any], Params]:
    """Describe the network's graph and check it; return also the other tensors."""
    if example is None:
        program, tensors = describe(as_graph(network, []))
    else:
        plain, example = evaluating_copy(network).cpu(), to_device(example, "cpu")
        run_example(plain, example)
        inputs = batches(plain, example)
        program, tensors = describe(as_graph(plain, inputs))
        again = build(program, tensors)
        prove(plain, lambda x: run_example(again, x), inputs, "saved", 1e-5)
    return program, {name: tensor for name, tensor in tensors.items() if name not in state}


def _is_cut(model: nn.Module, zoo_config: Any) -> bool:
    """Return whether a network of the zoo is smaller than its entry."""
    if zoo_config is None:
        return False
    with torch.device("meta"):
        whole = create(**zoo_config).state_dict()
    state = model.state_dict()
    return any(name in state and state[name].shape != tensor.shape for name, tensor in whole.items())


def _claimed(tensors: Mapping[str, Tensor]) -> int:
    """Sum the bytes that packed tensors claim to take unpacked."""
    total = 0
    for name, tensor in tensors.items():
        if name.endswith(f"{SEPARATOR}shape"):
            sizes = tensor.tolist() if tensor.ndim == 1 and not tensor.is_floating_point() else [-1]
            if min(sizes, default=0) < 0:
                raise CorruptFile(f'The file gives "{name}" as {sizes}, which is not a shape.')
            total += math.prod(sizes) * 8
    return total


def _is_within(small: Tensor, large: Tensor) -> bool:
    return small.ndim == large.ndim and all(a <= b for a, b in zip(small.shape, large.shape, strict=True))


def _integers(module: nn.Module) -> dict[str, int]:
    return {name: value for name, value in vars(module).items() if type(value) is int}


def _without_tied(tensors: Mapping[str, Tensor]) -> tuple[Params, dict[str, str]]:
    """Return each tensor once, and the other names of tensors that share their memory."""
    unique: Params = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and key in seen:
            tied[name] = seen[key]
        else:
            seen[key] = name
            unique[name] = tensor
    return unique, tied
