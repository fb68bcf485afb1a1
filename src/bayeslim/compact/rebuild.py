"""Smaller networks: the user's own modules, or the traced graph, with new sizes."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from bayeslim.compact.graph import Structure
from bayeslim.compact.shapes import Shrinking
from bayeslim.compact.trace import quiet_copy, tensors_of
from bayeslim.curvature.layers import is_transposed_linear

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_Norm = nn.modules.batchnorm._NormBase
_MAX_SIZE_ATTRIBUTES = 4
"""The largest number of size attributes of which all subsets are tried."""


def put_tensors(model: nn.Module, tensors: dict[str, Tensor], names: dict[str, tuple[str, ...]]) -> None:
    """Replace parameters and buffers of a network, keeping tied ones tied.

    Args:
        model: changed in place.
        tensors: new values, each under one of the tensor's names.
        names: for a name, all names of its tensor.
    """
    for name, value in tensors.items():
        old = _get(model, name)
        new = nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
        for alias in names.get(name, (name,)):
            owner, _, attribute = alias.rpartition(".")
            setattr(model.get_submodule(owner), attribute, new)


def resize_modules(model: nn.Module, groups: dict[str, int]) -> None:
    """Set the size attributes of PyTorch's own modules to those of their tensors.

    Args:
        model: changed in place.
        groups: new numbers of groups, by the name of the weight.
    """
    for path, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED)):
            module.groups = groups.get(f"{path}.weight" if path else "weight", module.groups)
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = weight.shape
        elif isinstance(module, _CONVOLUTIONS):
            module.out_channels, module.in_channels = weight.shape[0], weight.shape[1] * module.groups
        elif isinstance(module, _TRANSPOSED):
            module.in_channels, module.out_channels = weight.shape[0], weight.shape[1] * module.groups
        elif isinstance(module, _Norm) and (weight is not None or module.running_mean is not None):
            statistics: Any = module.running_mean
            module.num_features = len(weight if weight is not None else statistics)
        elif isinstance(module, nn.GroupNorm) and weight is not None:
            module.num_groups = module.num_groups * len(weight) // module.num_channels
            module.num_channels = len(weight)
        elif isinstance(module, nn.Embedding):
            module.embedding_dim = weight.shape[1]
        elif is_transposed_linear(module):
            sizes: Any = module
            sizes.nx, sizes.nf = weight.shape
        elif isinstance(module, nn.PReLU):
            module.num_parameters = len(weight)
        elif isinstance(module, nn.RNNCellBase):
            module.input_size, module.hidden_size = module.weight_ih.shape[1], module.weight_hh.shape[1]
        elif isinstance(module, nn.RNNBase):
            below: Any = module.weight_ih_l0
            past: Any = module.weight_hh_l0
            module.input_size, module.hidden_size = below.shape[1], past.shape[1]
            if module.proj_size:
                projection: Any = module.weight_hr_l0
                module.proj_size, module.hidden_size = projection.shape


def new_groups(structure: Structure, shrinking: Shrinking) -> dict[str, int]:
    """Return the new numbers of groups of convolutions, by the weight's name."""
    result = {}
    for contraction in structure.channels.contractions:
        if contraction.node in structure.channels.groups:
            schema = [argument.name for argument in contraction.node.target._schema.arguments]  # type: ignore[union-attr]
            _, args, kwargs = shrinking.arguments(contraction.node)
            bound = dict(zip(schema, args, strict=False)) | kwargs
            result[contraction.weight] = bound["groups"]
    return result


def size_attributes(
    model: nn.Module, structure: Structure, shrinking: Shrinking
) -> list[dict[tuple[nn.Module, str], int]]:
    """Find attributes of modules that may hold a size that shrinks.

    Returns:
        Choices of new values, to be tried in turn: of two attributes with the same number only one may shrink.
    """
    candidates: dict[tuple[str, str], dict[tuple[nn.Module, str], int]] = {}
    for path, sizes in _new_sizes(structure, shrinking).items():
        module = model.get_submodule(path)
        for attribute, value in vars(module).items():
            if type(value) is int and len(sizes.get(value, ())) == 1:
                key = type(module).__qualname__, attribute
                candidates.setdefault(key, {})[module, attribute] = next(iter(sizes[value]))
    if len(candidates) > _MAX_SIZE_ATTRIBUTES:
        return []
    subsets = [
        subset for size in range(len(candidates), 0, -1) for subset in itertools.combinations(candidates.values(), size)
    ]
    return [{key: value for part in subset for key, value in part.items()} for subset in subsets]


def _new_sizes(structure: Structure, shrinking: Shrinking) -> dict[str, dict[int, set[int]]]:
    """Collect, by module, the old and new integers in its operations."""
    changes: dict[str, dict[int, set[int]]] = {}
    for node in structure.channels.trace.module.graph.nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        if node.op != "call_function" or not stack or node not in structure.channels.of:
            continue
        new = shrinking.arguments(node)[1]
        for old_value, new_value in zip(_integers(node.args), _integers(new), strict=False):
            if old_value != new_value and new_value > 0:
                changes.setdefault(stack[-1][0], {}).setdefault(old_value, set()).add(new_value)
    return changes


def rewrite_graph(
    structure: Structure, shrinking: Shrinking, model: nn.Module, tensors: dict[str, Tensor]
) -> fx.GraphModule:
    """Rewrite the traced graph with smaller tensors and new constants.

    Args:
        structure: the labelled channels.
        shrinking: which of them stay.
        model: the network, for the names and flags of its tensors.
        tensors: new values of those that shrink.
    """
    trace = structure.channels.trace
    graph = quiet_copy(trace.module.graph)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    twins = dict(zip(trace.module.graph.nodes, graph.nodes, strict=True))
    for node, twin in twins.items():
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        twin.target, args, kwargs = shrinking.arguments(node)
        twin.args = fx.node.map_arg(args, lambda n: twins[n])
        twin.kwargs = fx.node.map_arg(kwargs | ({"device": device} if "device" in kwargs else {}), lambda n: twins[n])
    graph.eliminate_dead_code()
    root = quiet_copy(trace.module)
    put_tensors(
        root, {name: tensor.detach().cpu() for name, tensor in tensors_of(model).items() if has_tensor(root, name)}, {}
    )
    put_tensors(root, tensors, structure.channels.trace.names)
    result = fx.GraphModule(root, graph, class_name=type(model).__name__)
    for aliases in trace.names.values():
        for alias in aliases[1:]:
            owner, _, attribute = alias.rpartition(".")
            if has_tensor(result, aliases[0]) and owner in dict(result.named_modules()):
                setattr(result.get_submodule(owner), attribute, _get(result, aliases[0]))
    _name_modules(result, model, new_groups(structure, shrinking))
    return result.to(device)


def _name_modules(graph: fx.GraphModule, model: nn.Module, groups: dict[str, int]) -> None:
    """Give the submodules of a graph their classes, or the names of these.

    A graph reads tensors of its submodules and never calls them. With their classes and settings they can be read,
    printed and indexed as before. A class of the user may compute with settings that no longer hold, so its modules
    only print its name.
    """
    originals = dict(model.named_modules())
    for path, module in graph.named_modules():
        original = originals.get(path)
        if type(module) is not nn.Module or original is None or isinstance(original, nn.RNNBase):
            continue
        if not type(original).__module__.startswith("torch.nn."):
            module.__dict__["_get_name"] = partial(str, type(original).__name__)
            continue
        settings = {
            name: value
            for name, value in vars(original).items()
            if isinstance(value, (bool, int, float, str, tuple, type(None))) and name not in vars(module)
        }
        module.__dict__.update(settings)
        module.__class__ = type(original)
        if isinstance(module, nn.MultiheadAttention) and "in_proj_weight" in module._parameters:
            module.num_heads = len(module.in_proj_weight) // (3 * module.head_dim)
    resize_modules(graph, groups)


def _integers(args: Any) -> list[int]:
    """List the integers in the arguments of a node; -2 stands for dynamic ones."""
    flat: list[int] = []
    for arg in args:
        if isinstance(arg, (list, tuple)):
            flat += _integers(arg)
        else:
            flat.append(arg if type(arg) is int else -2)
    return flat


def _get(model: nn.Module, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(owner), attribute)


def has_tensor(model: nn.Module, name: str) -> bool:
    """Return whether a model has an attribute of this dotted name."""
    try:
        _get(model, name)
    except AttributeError:
        return False
    return True
