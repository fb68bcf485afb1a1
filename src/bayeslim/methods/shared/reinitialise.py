"""New random weights for a network, as its class would have drawn them, and functions that make its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from bayeslim.errors import ShapeMismatch, UnsupportedModel

RESET_METHODS = ("reset_parameters", "_reset_parameters")
"""The names of the method that draws the weights of a module; attention has the second."""

OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def check_optimizer_of(optimizer: Any, reason: str) -> None:
    """Raise unless it is a function that makes an optimizer, or None."""
    if optimizer is not None and (isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer)):
        raise TypeError(
            f"{reason} Pass a function that makes an optimizer, such as "
            f"optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1). Got {optimizer!r}."
        )


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters to optimise."""
    return [p for p in model.parameters() if p.requires_grad]


def check_resettable(model: nn.Module) -> None:
    """Raise unless every module with its own trainable parameters can draw new ones."""
    for path, module in model.named_modules():
        own = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad]
        if own and _reset_of(module) is None:
            name = f"{path}.{own[0]}" if path else own[0]
            raise UnsupportedModel(
                f'{type(module).__name__}, which holds "{name}", has no reset_parameters() to draw new random weights. '
                "Give it that method, or pass a function that makes a new network: "
                f"bnn.fit(loader, start=lambda: {type(model).__name__}(...))."
            )


def reinitialise_(model: nn.Module, factory: Callable[[], nn.Module] | None = None) -> None:
    """Draw new random weights for a model, in place; frozen parameters stay.

    The weights are those of a network that the factory makes, or every module draws its own.
    """
    frozen = [
        (tensor, tensor.detach().clone())
        for module in model.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if not any(p.requires_grad for p in module.parameters(recurse=False))
        or (isinstance(tensor, nn.Parameter) and not tensor.requires_grad)
    ]
    if factory is None:
        _reset_all(model)
    else:
        _load_made(model, factory)
    with torch.no_grad():
        for tensor, value in frozen:
            tensor.copy_(value)


def _reset_all(model: nn.Module) -> None:
    check_resettable(model)
    for module in reversed(list(model.modules())):  # a module may overwrite weights that its children have drawn
        reset = _reset_of(module)
        if reset is not None:
            with _written_through(module):
                reset()


@contextmanager
def _written_through(module: nn.Module) -> Iterator[None]:
    """Copy weights drawn inside to the parameters of old-style norms."""
    norms = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, (SpectralNorm, WeightNorm))]
    for norm in norms:
        whole = getattr(module, f"{norm.name}_{'orig' if isinstance(norm, SpectralNorm) else 'v'}")
        setattr(module, norm.name, whole.detach().clone())
    yield
    with torch.no_grad():
        for norm in norms:
            drawn: Tensor = getattr(module, norm.name)
            if isinstance(norm, WeightNorm):
                getattr(module, f"{norm.name}_v").copy_(drawn)
                getattr(module, f"{norm.name}_g").copy_(torch.norm_except_dim(drawn, 2, norm.dim))
                continue
            getattr(module, f"{norm.name}_orig").copy_(drawn)
            for side in ("u", "v"):  # as in a new layer
                vector = getattr(module, f"{norm.name}_{side}")
                vector.copy_(F.normalize(torch.randn_like(vector), dim=0, eps=norm.eps))


def _load_made(model: nn.Module, factory: Callable[[], nn.Module]) -> None:
    made = factory()
    if not isinstance(made, nn.Module):
        raise TypeError(f"start must be a function that makes a network. It made a {type(made).__name__}.")
    try:
        model.load_state_dict(made.state_dict())
    except RuntimeError as error:
        raise ShapeMismatch(f"start must make networks of the same architecture: {error}") from error


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    return next((found for name in RESET_METHODS if callable(found := getattr(module, name, None))), None)
