"""From a fitted network to integers: 4-bit weights by its posterior, 8-bit activations, a temperature, a threshold."""

from __future__ import annotations

import math
import re

import numpy as np
import torch
from integers import BIAS_BITS, CONFIDENCE_BITS, FRACTION_BITS, Array, Layer, Network
from torch import Tensor, nn

import bayeslim as bl

BITS = 4
MAX_RISK = 0.002
"""The largest fraction of wrong answers among the answers to validation digits."""
TEMPERATURES = np.geomspace(0.25, 4, 200)


def rounded(bnn: bl.Bayesian, sample: Tensor, images: Array, labels: Array) -> Network:
    """Round a fitted network to integers.

    Args:
        bnn: convolutions and ReLUs in turn.
        sample: training digits, which set the range of the activations.
        images: validation digits, uint8, which set the temperature and the threshold.
        labels: their labels.
    """
    quantised = bl.quantise(bnn, bits={re.compile(r".*weight"): BITS, "all": 16}, per="unit")
    ranges = activation_ranges(quantised.network, sample)
    network = in_integers(quantised, ranges, 1.0)
    network = in_integers(quantised, ranges, fitted_temperature(network, images, labels))
    _, digits, confidences = network.read(images)
    return Network(network.layers, fitted_threshold(confidences, digits == labels))


def activation_ranges(network: nn.Module, sample: Tensor) -> list[float]:
    """Measure the largest activation after each ReLU."""
    found = []
    with torch.no_grad():
        for module in network.children():
            sample = module(sample)
            if isinstance(module, nn.ReLU):
                found.append(float(sample.flatten().topk(max(1, sample.numel() // 100_000)).values[-1]))
    return found


def in_integers(quantised: bl.Quantised, ranges: list[float], temperature: float) -> Network:
    """Turn scales into multipliers and biases of 16 bits, as large as 32-bit sums allow."""
    units = [1 / 255, *(largest / 255 for largest in ranges), math.log(2) * temperature / (1 << FRACTION_BITS)]
    layers: list[Layer] = []
    for name, module in quantised.network.named_children():
        if not isinstance(module, nn.Conv2d):
            continue
        before, after = units[len(layers)], units[len(layers) + 1]
        codes = quantised.codes[f"{name}.weight"].numpy().astype(np.int8)
        factors = quantised.grids[f"{name}.weight"].scale.flatten().double().numpy() * before / after
        assert module.bias is not None
        biases = module.bias.detach().double().numpy() / after
        if len(layers) < len(ranges):
            biases = biases + 0.5  # so that the shift rounds to the nearest
        layers.append(_with_largest_shift(codes, factors, biases, module.stride[0]))
    return Network(tuple(layers), 0)


def _with_largest_shift(codes: Array, factors: Array, biases: Array, stride: int) -> Layer:
    rounded_biases = np.rint(biases * (1 << BIAS_BITS))
    if np.abs(rounded_biases).max() >= 1 << 15:
        raise ValueError(f"A bias of {np.abs(biases).max():.4g} output steps does not fit into 16 bits.")
    for shift in range(30, BIAS_BITS - 1, -1):
        multipliers = np.rint(factors * (1 << shift))
        if multipliers.max() >= 1 << 15:
            continue
        layer = Layer(codes, multipliers.astype(np.int16), rounded_biases.astype(np.int16), stride, shift)
        if layer.largest() < 1 << 31:
            return layer
    raise ValueError("No shift keeps the sums of a layer within 32 bits.")


def fitted_temperature(network: Network, images: Array, labels: Array) -> float:
    """Find the temperature of the least mean NLL of validation digits."""
    last = network.layers[-1]
    logits = network.logits(images) / (1 << (last.shift + FRACTION_BITS)) * math.log(2)
    targets = torch.from_numpy(labels).long()

    def nll(temperature: float) -> float:
        return float(nn.functional.cross_entropy(torch.from_numpy(logits / temperature), targets))

    return float(min(TEMPERATURES, key=nll))


def fitted_threshold(confidences: Array, correct: Array) -> int:
    """Find the least confidence above which at most MAX_RISK of the answers are wrong."""
    for threshold in range(1 << CONFIDENCE_BITS):
        answered = confidences >= threshold
        if not answered.any():
            break
        if (~correct[answered]).mean() <= MAX_RISK:
            return threshold
    raise ValueError(f"No threshold brings the validation risk to {MAX_RISK:.2%}.")
