"""Configs of Hugging Face models: the smaller network as an instance of its own class.

Such a model is built from its config: `type(model)(config)`. After a cut that leaves the same width in every layer, the
same config with smaller numbers describes the smaller network, and `save_pretrained` and `from_pretrained` work on it.
The numbers are read off the units that stay and then proven: a new instance with these numbers and the tensors of the
smaller network gives the outputs of the masked network.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bayeslim.compact.graph import UnitGraph
from bayeslim.compact.proof import Reference
from bayeslim.errors import BayeslimWarning
from bayeslim.noise import kept_random_state

NEURON_FIELDS = (
    "intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "ffn_hidden_size", "encoder_ffn_dim",
    "decoder_ffn_dim",
)  # fmt: skip
"""Names that configs give to the number of hidden neurons of a block."""
HEAD_FIELDS = (
    "num_attention_heads", "num_key_value_heads", "num_heads", "num_decoder_heads", "n_head", "n_heads",
    "encoder_attention_heads", "decoder_attention_heads",
)  # fmt: skip
"""Names that configs give to a number of attention heads."""


def is_built_from_config(model: nn.Module) -> bool:
    """Return whether a model is an instance that its class builds from a config."""
    return hasattr(getattr(model, "config", None), "to_dict") and hasattr(model, "save_pretrained")


def update_config_(network: Any, units: UnitGraph, removed: Iterable[int], reference: Reference) -> str:
    """Give a smaller network the config that describes it, if there is one.

    Args:
        network: the compacted network, of the user's own modules. Its config changes only if the new one is proven.
        units: the units of the network before.
        removed: indices of the removed units.
        reference: the outputs that an instance of the new config has to give.

    Returns:
        A sentence that says whether the config describes the network, or why not.
    """
    config = copy.deepcopy(network.config)
    name = type(config).__name__
    try:
        for part in (config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))):
            _set_widths(part, units, set(removed))  # a model of images and text has a config for each inside
        with kept_random_state(), torch.device("meta"):
            fresh = type(network)(config)
        _take_tensors(fresh, network)
    except Exception as error:  # the class belongs to another library, and may refuse its config in any way
        return _undescribed(name, _first_line(error))
    if not reference.compare(fresh.eval()).holds:
        return _undescribed(name, "a model of the new config gives other outputs")
    modules = dict(network.named_modules())
    for path, module in fresh.named_modules():
        own = modules[path]
        if "config" in vars(module):
            own.config = module.config
        sizes = {key: value for key, value in vars(module).items() if type(value) is int}
        own.__dict__.update({key: value for key, value in sizes.items() if type(vars(own).get(key)) is int})
    return f"its {name} has the new sizes"


def _set_widths(config: Any, units: UnitGraph, removed: set[int]) -> None:
    """Set the numbers of neurons and heads in a config to those that stay.

    Raises:
        ValueError: if layers that share a number have different widths.
    """
    widths: dict[str, set[tuple[int, int]]] = {"neuron": set(), "head": set()}
    for places in units.by_layer().values():
        kind = units.units[places[0]].kind
        widths.setdefault(kind, set()).add((len(places), sum(place not in removed for place in places)))
    for field in (field for field in NEURON_FIELDS if hasattr(config, field)):
        old = getattr(config, field)
        if old is None:  # the class derives it from another number, which stays
            old = max((before for before, _ in widths["neuron"]), default=0)
        found = {after for before, after in widths["neuron"] if before == old}
        if len(found) > 1:
            raise ValueError(f"layers have different widths, and {field} is one number")
        if found and found != {old}:
            setattr(config, field, found.pop())
    heads = {field: getattr(config, field) for field in HEAD_FIELDS if isinstance(getattr(config, field, None), int)}
    if all(before == after for before, after in widths["head"]) or not heads:
        return
    if getattr(config, "head_dim", None) is None and hasattr(config, "hidden_size"):
        config.head_dim = config.hidden_size // next(iter(heads.values()))
    for field, old in heads.items():
        if len(widths["head"]) > 1:
            raise ValueError(f"layers have different numbers of heads, and {field} is one number")
        before, after = next(iter(widths["head"]))
        setattr(config, field, old * after // before)


def _take_tensors(fresh: nn.Module, network: nn.Module) -> None:
    """Put the tensors of a network into an instance of its class without values."""
    sizes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    for name, tensor in fresh.state_dict().items():
        if tuple(tensor.shape) != sizes.get(name):
            raise ValueError(f'"{name}" would have shape {tuple(tensor.shape)} instead of {sizes.get(name)}')
    fresh.load_state_dict(network.state_dict(), assign=True)
    saved = set(sizes)
    for name, buffer in network.named_buffers():  # those that a state dict leaves out, such as rotary frequencies
        if name not in saved:
            owner, _, attribute = name.rpartition(".")
            if tuple(fresh.get_buffer(name).shape) != tuple(buffer.shape):
                raise ValueError(f'"{name}" would have another shape')
            setattr(fresh.get_submodule(owner), attribute, buffer)


def _undescribed(name: str, reason: str) -> str:
    """Warn that a config does not describe the smaller network, and say why."""
    sentence = f"{name} cannot describe it: {reason}"
    warnings.warn(
        f"The smaller network is exact, but {sentence}. from_pretrained cannot read it: store it with bl.save or "
        "bl.export. Budget(..., uniform=True) cuts like layers alike, which most configs can describe.",
        BayeslimWarning,
        stacklevel=4,
    )
    return sentence


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0].rstrip(".")
