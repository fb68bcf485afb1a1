"""Networks by name: functions that build them, and their arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from bayeslim.io.registry import all_registered, register, registered
from bayeslim.noise import kept_random_state
from bayeslim.stochastic import plain_type

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)

_SIZES = ("normalized_shape", "unflattened_size")
_COUNTS = ("kernel_size", "stride", "padding", "dilation", "output_padding", "start_dim", "end_dim", "num_layers")


def register_network(factory: Callable[P, M]) -> Callable[P, M]:
    """Register a function that builds networks, under its own name.

    Each network remembers the arguments, defaults included, as `module.zoo_config`: a plain dict that
    `create(**module.zoo_config)` turns into the same architecture again. Arguments must be numbers, strings or None, so
    that the dict can be written as JSON.
    """
    name = factory.__name__
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def build(*args: P.args, **kwargs: P.kwargs) -> M:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        module = factory(*args, **kwargs)
        object.__setattr__(module, "zoo_config", {"name": name, **bound.arguments})
        return module

    return register("network", name)(build)


def create(name: str, **arguments: Any) -> nn.Module:
    """Build a network by one of `names()`, with the arguments of its function.

    >>> create("lenet5", classes=5).fc2
    Linear(in_features=500, out_features=5, bias=True)
    """
    factory = registered("network", name)
    accepted = inspect.signature(factory).parameters
    unknown = [key for key in arguments if key not in accepted]
    if unknown:
        raise TypeError(f"{name} does not take {', '.join(unknown)}. It takes: {', '.join(accepted)}.")
    network: nn.Module = factory(**arguments)
    return network


def names() -> list[str]:
    """List the names that `create` knows, sorted."""
    return sorted(all_registered("network"))


def config_of(network: nn.Module) -> dict[str, Any] | None:
    """Return the name and arguments of a network that was only cut since it was built."""
    config: dict[str, Any] | None = getattr(network, "zoo_config", None)
    if config is None:
        return None
    with torch.device("meta"), kept_random_state():
        whole = create(**config)
    return config if _settings(network) == _settings(whole) else None


def _settings(network: nn.Module) -> dict[str, tuple[type[nn.Module], dict[str, Any]]]:
    """Collect the class and the settings of every module, but for sizes."""
    return {
        path: (plain_type(module), {name: value for name, value in vars(module).items() if _is_setting(name, value)})
        for path, module in network.named_modules()
    }


def _is_setting(name: str, value: Any) -> bool:
    if name == "forward" or type(value) in (bool, float, str):
        return name != "training"
    return name in _COUNTS if type(value) is int else type(value) is tuple and name not in _SIZES
