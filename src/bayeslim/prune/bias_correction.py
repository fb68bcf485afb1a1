"""Bias correction: the mean output of every cut layer is brought back to its value before the cut.

A cut shifts the mean of a layer's outputs. On each batch the layers are corrected in the order in which they run, so
that a layer sees the corrected outputs of those before it,

    b ← b + mean over data of (E[y before the cut] − E[y]),

with means over examples and positions that are no padding. Layers with a batch norm behind them need none of this once
the statistics of the norm are measured anew (`batch_norms.py`). A layer that runs more than once on a batch stays as it
is: its calls have means of their own, and one bias cannot bring all of them back.

Nagel et al. 2019, arXiv:1906.04721
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from bayeslim.bayesian import Bayesian
from bayeslim.curvature.padding import real_positions, without_padding
from bayeslim.posteriors import Particles
from bayeslim.types import call, device_of, split_batch, to_device

Hook = Callable[[str, Tensor], Tensor | None]


def correct_biases(before: nn.Module, bnn: Bayesian, loader: Iterable[Any]) -> int:
    """Correct the biases of all cut layers of a network, in place.

    Layers that run more than once on a batch are left alone.

    Returns:
        the number of corrected layers.
    """
    if isinstance(bnn.posterior_, Particles):
        raise TypeError("Bias correction moves one network, and particles are many. Leave bias_correction out.")
    network = bnn.mean_network().eval()
    before = before.eval()
    layers = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, (nn.Linear, _ConvNd)) and module.bias is not None and f"{name}.weight" in bnn.masks
    }
    device = device_of(network)
    wanted: dict[str, list[Tensor]] = {}  # of one batch, by layer
    shifts: dict[str, list[Tensor]] = {}  # of all batches
    left_alone: set[str] = set()
    real: Tensor | None = None

    def record(name: str, output: Tensor) -> None:
        wanted.setdefault(name, []).append(_mean(layers[name], output, real))

    def correct(name: str, output: Tensor) -> Tensor | None:
        means = wanted.pop(name, [])
        if len(means) != 1:  # more calls before the cut, or a further call after it
            left_alone.add(name)
            return None
        shift = means[0] - _mean(layers[name], output, real)
        shifts.setdefault(name, []).append(shift)
        return output + _along(layers[name], shift.to(output.dtype), output.ndim)

    with torch.no_grad():
        for batch in loader:
            inputs = to_device(split_batch(batch)[0], device)
            real = real_positions(inputs)
            if real is not None and not bool(real.any()):
                continue
            wanted.clear()
            with _hooked(before, layers, record):
                call(before, inputs)
            with _hooked(network, layers, correct):
                call(network, inputs)
        corrected = shifts.keys() - left_alone
        for name in corrected:
            bias = bnn.model.get_parameter(f"{name}.bias")
            bias.add_(torch.stack(shifts[name]).mean(0).to(bias))
    bnn.keep_zeros()
    return len(corrected)


def _channel_dim(layer: nn.Module, ndim: int) -> int:
    return ndim - 1 if isinstance(layer, nn.Linear) else ndim - 1 - len(layer.kernel_size)  # type: ignore[arg-type]


def _mean(layer: nn.Module, output: Tensor, real: Tensor | None) -> Tensor:
    """Average the outputs of each channel, in float64.

    Of a linear layer, only the `real` positions count if they are given.
    """
    if isinstance(layer, nn.Linear):
        output = without_padding(output, real)
    return output.movedim(_channel_dim(layer, output.ndim), -1).flatten(0, -2).double().mean(0)


def _along(layer: nn.Module, shift: Tensor, ndim: int) -> Tensor:
    """Shape values of channels so that they broadcast over outputs."""
    dim = _channel_dim(layer, ndim)
    return shift.view(-1, *[1] * (ndim - dim - 1))


@contextmanager
def _hooked(network: nn.Module, names: Iterable[str], hook: Hook) -> Iterator[None]:
    """Call `hook` with the outputs of layers while they run; its result replaces them."""
    handles = [
        network.get_submodule(name).register_forward_hook(lambda _, __, output, name=name: hook(name, output))
        for name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
