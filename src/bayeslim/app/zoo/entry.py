"""A check that a network of the zoo still has its registered architecture: layers may have been replaced or changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bayeslim.app.zoo.registry import create
from bayeslim.noise import kept_random_state
from bayeslim.stochastic import plain_type

_SIZES = ("normalized_shape", "unflattened_size")
_COUNTS = ("kernel_size", "stride", "padding", "dilation", "output_padding", "start_dim", "end_dim", "num_layers")


def entry_of(network: nn.Module) -> dict[str, Any] | None:
    """Return the name and arguments of a zoo network that was at most made smaller since."""
    config: dict[str, Any] | None = getattr(network, "zoo_config", None)
    if config is None:
        return None
    with torch.device("meta"), kept_random_state():
        whole = create(**config)
    return config if _settings(network) == _settings(whole) else None


def _settings(network: nn.Module) -> dict[str, tuple[type[nn.Module], dict[str, Any]]]:
    """List the classes and settings of modules, without sizes."""
    return {path: (plain_type(module), _settings_of(module)) for path, module in network.named_modules()}


def _settings_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name != "training" and _is_setting(name, value)}


def _is_setting(name: str, value: Any) -> bool:
    if name == "forward" or type(value) in (bool, float, str):
        return True
    return name in _COUNTS if type(value) is int else type(value) is tuple and name not in _SIZES
