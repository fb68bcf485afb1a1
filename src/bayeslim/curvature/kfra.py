"""Kronecker-factored recursive approximation (KFRA).

For a feed-forward network of linear layers h_l = W_l a_{l−1} and elementwise activations a_l = f(h_l), the
Gauss-Newton matrix of each pre-activation follows from that of the next layer's, without any backward pass through
the data:

    𝒢_L = E[−∇²_f log p(y|f)]          𝒢_{l−1} = (W_lᵀ 𝒢_l W_l) ⊙ E[f'(h_{l−1}) f'(h_{l−1})ᵀ]

taking the next layer's curvature and this layer's slopes as independent. One forward pass collects E[a aᵀ], E[f' f'ᵀ]
and the curvature of the outputs; the recursion runs once, on averages over all the data, so the size of the batches
does not matter. Exact for a single example and for linear networks with a Gaussian likelihood.

Botev, Ritter & Barber 2017, arXiv:1706.03662
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from bayeslim.curvature.columns import output_columns
from bayeslim.curvature.factors import Factors, LayerFactors
from bayeslim.curvature.layers import matrix_layer
from bayeslim.curvature.moments import InputMoment, add_outer_products, symmetric
from bayeslim.curvature.sweep import (
    accumulation_dtype,
    batches,
    chosen_parameters,
    seeded,
    sum_over_processes,
)
from bayeslim.errors import ShapeMismatch, UnsupportedModel
from bayeslim.likelihoods import Likelihood
from bayeslim.noise import kept_random_state
from bayeslim.posteriors.layer_matrix import LayerMatrix
from bayeslim.replica import replicate
from bayeslim.types import Batch

ELEMENTWISE: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign,
    nn.Tanh, nn.Tanhshrink, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.LogSigmoid,
)  # fmt: skip
"""Activations without parameters that act on each unit alone."""

IDENTITIES: tuple[type[nn.Module], ...] = (nn.Identity, nn.Dropout, nn.AlphaDropout)
"""Modules that do nothing in eval mode."""


@torch.inference_mode(False)
def kfra(
    model: nn.Module,
    loader: Iterable[Batch],
    likelihood: Likelihood,
    *,
    names: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = False,
) -> Factors:
    """Compute Kronecker factors of a feed-forward network, by recursion.

    Args:
        model: an `nn.Sequential` (of such) of linear layers, elementwise activations, dropout and a first flattening.
        loader: batches of inputs and targets.
        likelihood: of the model's outputs.
        names: the parameters wanted; by default every trainable one.
        dtype: to accumulate in, float64 by default.
        progress: whether to show a progress bar.
    """
    steps = _checked_steps(replicate(model))
    chosen = chosen_parameters(model, names)
    with kept_random_state(), torch.no_grad():
        known = {id(p): name for name, p in chosen.items()}
        sums = _Sums(steps, known, accumulation_dtype(model, dtype or torch.float64))
        for inputs, targets in batches(model, loader, "curvature", progress):
            sums.add(inputs, targets, likelihood)
    sum_over_processes(*sums.tensors())
    layers = {layer.weight: layer for layer in sums.recursion()}
    held = {name for layer in layers.values() for name in layer.names}
    unsupported = {name: "is a bias without its weight" for name in chosen if name not in held}
    return Factors(layers, unsupported, int(sums.count))


class _Sums:
    """The sums over the data that the recursion needs."""

    def __init__(self, steps: list[tuple[str, nn.Module]], names: dict[int, str], dtype: torch.dtype):
        self.steps, self.names, self.dtype = steps, names, dtype
        self.count = torch.zeros((), dtype=torch.float64)
        self.moments: dict[int, InputMoment] = {}
        self.slopes: dict[int, Tensor] = {}
        device = next(p.device for _, module in steps for p in module.parameters())
        width = 0
        for n, (_, module) in enumerate(steps):
            if isinstance(module, nn.Linear):
                view = matrix_layer(module)
                assert view is not None
                bias = module.bias is not None and id(module.bias) in names
                self.moments[n] = InputMoment(view, bias, dtype)
                width = module.out_features
            elif isinstance(module, ELEMENTWISE) and width:
                self.slopes[n] = torch.zeros(1, width, width, dtype=dtype, device=device)
        self.output = torch.zeros(1, width, width, dtype=dtype, device=device)

    def add(self, inputs: object, targets: Tensor, likelihood: Likelihood) -> None:
        if not isinstance(inputs, Tensor):
            raise ShapeMismatch(f"kfra needs batches of one input tensor. Got {type(inputs).__name__}.")
        h = inputs
        for n, (path, module) in enumerate(self.steps):
            if isinstance(module, nn.Linear):
                if h.ndim != 2:
                    raise ShapeMismatch(
                        f'kfra needs inputs (B, features) at "{path}". Got {tuple(h.shape)}. Put nn.Flatten() first, '
                        "or use kfac, which shares weights between positions."
                    )
                self.moments[n].add_rows(h.unsqueeze(1))
                h = module(h)
            elif n in self.slopes:
                with torch.enable_grad():
                    x = h.detach().requires_grad_()
                    y = module(x.clone())  # the clone lets an in-place activation work on it
                    (slope,) = torch.autograd.grad(y.sum(), x)
                h = y.detach()
                add_outer_products(self.slopes[n], slope.unsqueeze(1).to(self.dtype))
            else:
                h = module(h)
        self.count += h.shape[0]
        for column in output_columns(likelihood, h, targets, "exact", seeded(0)):
            add_outer_products(self.output, column.reshape(h.shape[0], 1, -1).to(self.dtype))

    def tensors(self) -> list[Tensor]:
        inputs = [tensor for moment in self.moments.values() for tensor in moment.tensors()]
        return [*inputs, *self.slopes.values(), self.output, self.count]

    def recursion(self) -> Iterator[LayerFactors]:
        G, examples = symmetric(self.output)[0], float(self.count)
        found = []
        for n, (_, module) in reversed(list(enumerate(self.steps))):
            if n in self.slopes:
                G = G * symmetric(self.slopes[n])[0] / examples
            elif isinstance(module, nn.Linear):
                weight = self.names.get(id(module.weight))
                if weight is not None:
                    bias = self.names.get(id(module.bias)) if module.bias is not None else None
                    layer = LayerMatrix(weight, bias, tuple(module.weight.shape))
                    found.append(LayerFactors(layer, self.moments[n].mean(), ((G + G.T) / 2).unsqueeze(0)))
                W = module.weight.detach().to(self.dtype)
                G = W.T @ G @ W
        yield from reversed(found)


def _checked_steps(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the modules in the order they run, each linear layer's weight used once."""
    steps = list(_steps(model, type(model).__name__))
    weights = [id(module.weight) for _, module in steps if isinstance(module, nn.Linear)]
    if not weights:
        raise UnsupportedModel("kfra needs at least one nn.Linear in the network. Got none.")
    if len(set(weights)) < len(weights):
        raise UnsupportedModel(
            "kfra needs each linear layer's weight to be used once. Use kfac, which counts every use."
        )
    return steps


def _steps(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of nested Sequentials in the order they run."""
    if type(module).forward is nn.Sequential.forward and isinstance(module, nn.Sequential):
        for name, child in module._modules.items():  # not named_children, which leaves out a module's second use
            assert child is not None
            yield from _steps(child, f"{path}.{name}")
    elif isinstance(module, (nn.Linear, *ELEMENTWISE, *IDENTITIES, nn.Flatten)) and (
        not isinstance(module, nn.Linear) or matrix_layer(module) is not None
    ):
        yield path, module
    else:
        raise UnsupportedModel(
            f"kfra needs nn.Sequential of nn.Linear and elementwise activations. Got {type(module).__name__} at "
            f'"{path}". Use kfac, which works for every network.'
        )
