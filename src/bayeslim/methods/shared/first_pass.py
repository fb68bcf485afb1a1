"""A first pass over a network, which shows the layers where noise can be drawn at the pre-activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bayeslim.attention import ExplicitAttention
from bayeslim.errors import UnsupportedModel
from bayeslim.noise import kept_random_state
from bayeslim.replica import Uses
from bayeslim.stochastic import LINEAR_LAYERS, ForeignSubstitute, is_linear
from bayeslim.types import Inputs, Params, arguments, call_with

CHECKED_OUTPUTS = 8
"""Outputs of a declared layer whose variance is compared with its definition."""


def seen_once(model: nn.Module, inputs: Inputs, candidates: Iterable[str]) -> set[str]:
    """Find the modules that run exactly once on `inputs` and share no weights.

    The pass is in the model's own mode, since a module may behave differently in another. It changes no
    gradients, no random state and no buffers.
    """
    runs: dict[str, int] = dict.fromkeys(candidates, 0)
    declared: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def counter(path: str) -> Callable[..., None]:
        def count(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            runs[path] += 1
            if is_linear(layer) and type(layer) not in LINEAR_LAYERS:
                declared[layer] = args, kwargs

        return count

    layers = {path: model.get_submodule(path) for path in runs}
    uses = Uses(p for layer in layers.values() for p in layer.parameters(recurse=False))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    handles = [layer.register_forward_pre_hook(counter(path), with_kwargs=True) for path, layer in layers.items()]
    args, kwargs = arguments(inputs)
    try:
        with torch.no_grad(), kept_random_state(), ExplicitAttention(), uses:
            call_with(model, buffers, args, kwargs)
    finally:
        for handle in handles:
            handle.remove()
    with torch.no_grad(), kept_random_state():
        for layer, (given, named) in declared.items():
            _check_variance(layer, *given, **named)
    return {
        path
        for path, layer in layers.items()
        if runs[path] == 1 and all(uses.counts[id(p)] <= 1 for p in layer.parameters(recurse=False))
    }


def _check_variance(layer: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> None:
    """Raise if f(x²; σ²) is not the variance of the outputs of a declared layer.

    The variance of f(x; w) is Σ_j (∂f/∂w_j)² σ_j².
    """
    kind = type(layer)
    named = {leaf: getattr(layer, leaf, None) for leaf in ("weight", "bias")}
    own = {leaf: p.detach().clone() for leaf, p in named.items() if p is not None}

    def run(params: Params, x: Tensor) -> Tensor:
        other: Any = ForeignSubstitute(layer, params["weight"], params.get("bias"))
        output: Tensor = kind.forward(other, x, *args, **kwargs)
        return output.flatten()

    variances = {leaf: torch.rand_like(p) for leaf, p in own.items()}
    claimed = run(variances, x.square())
    for place in torch.linspace(0, len(claimed) - 1, CHECKED_OUTPUTS).long().tolist():
        with torch.enable_grad():
            params = {leaf: p.requires_grad_() for leaf, p in own.items()}
            slopes = torch.autograd.grad(run(params, x)[place], list(params.values()), materialize_grads=True)
        found = torch.stack([(s.square() * v).sum() for s, v in zip(slopes, variances.values(), strict=True)]).sum()
        if not torch.allclose(found, claimed[place], rtol=1e-2, atol=1e-6):
            raise UnsupportedModel(
                f"{kind.__name__} is declared linear in its parameters, but f(x²; σ²) is not the variance of its "
                f"outputs: {float(claimed[place]):.4g} instead of {float(found):.4g}. Every output must be a sum of "
                "products of one input and one weight, each with the factor 1, plus a bias. Remove "
                '@bl.linear_in_parameters, or use Variational(estimator="shared").'
            )
