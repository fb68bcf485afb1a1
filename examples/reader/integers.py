"""The digit reader in integers: its arithmetic in numpy, its file, and its tables for C.

`Network.read` computes what `reader.c` computes, number for number.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIGITS = 10
SIDE = 28
UNKNOWN = -1
CONFIDENCE_BITS = 12
FRACTION_BITS = 8
"""Fraction bits of logits in base 2."""
BIAS_BITS = 4
"""Fraction bits of biases, in units of a layer's outputs."""
IMAGES_PER_CHUNK = 500

Array = NDArray[Any]


@dataclass(frozen=True)
class Layer:
    """A convolution without padding.

    Attributes:
        codes: weights from −7 to 7, int8, (outputs, inputs, kernel, kernel).
        multipliers: int16, one per output.
        biases: int16, one per output, in units of 2^(shift − BIAS_BITS).
        stride: the stride.
        shift: the bits that sums lose.
    """

    codes: Array
    multipliers: Array
    biases: Array
    stride: int
    shift: int

    def sums(self, x: Array) -> Array:
        """Convolve, scale and add biases, in 32-bit integers."""
        kernel = self.codes.shape[-1]
        windows = np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), axis=(2, 3))
        windows = windows[:, :, :: self.stride, :: self.stride].transpose(0, 2, 3, 1, 4, 5)
        count, rows, columns = windows.shape[:3]
        taps = self.codes.reshape(len(self.codes), -1).astype(np.float32)
        # exact in any order, and far faster than in integers: no partial sum reaches 2^24
        assert 255 * np.abs(taps).sum(1).max() < 1 << 24
        total = (windows.reshape(-1, taps.shape[1]).astype(np.float32) @ taps.T).astype(np.int32)
        total = total * self.multipliers.astype(np.int32) + (self.biases.astype(np.int32) << (self.shift - BIAS_BITS))
        return total.reshape(count, rows, columns, -1).transpose(0, 3, 1, 2)

    def largest(self) -> int:
        """Bound the absolute value of any sum, for any image."""
        taps = 255 * np.abs(self.codes.astype(np.int64)).reshape(len(self.codes), -1).sum(1)
        biases = np.abs(self.biases.astype(np.int64)) << (self.shift - BIAS_BITS)
        return int((taps * self.multipliers.astype(np.int64) + biases).max())


@dataclass(frozen=True)
class Network:
    """The layers, and the least confidence of an answer in units of 2^−CONFIDENCE_BITS."""

    layers: tuple[Layer, ...]
    threshold: int

    def logits(self, images: Array) -> Array:
        """Compute the sums of the last layer, (N, classes), for images (N, 28, 28), uint8."""
        found = []
        for start in range(0, len(images), IMAGES_PER_CHUNK):
            x = images[start : start + IMAGES_PER_CHUNK].reshape(-1, 1, SIDE, SIDE)
            for layer in self.layers[:-1]:
                x = np.clip(layer.sums(x) >> layer.shift, 0, 255).astype(np.uint8)
            found.append(self.layers[-1].sums(x)[:, :, 0, 0])
        return np.concatenate(found)

    def read(self, images: Array) -> tuple[Array, Array, Array]:
        """Read images.

        Returns:
            the answers, with UNKNOWN below the threshold; the most probable digits; their confidences.
        """
        powers, digits = self._powers(images)
        best, total = powers[np.arange(len(digits)), digits], powers.sum(1)
        confidences = np.minimum((best << CONFIDENCE_BITS) // total, (1 << CONFIDENCE_BITS) - 1)
        return np.where(confidences >= self.threshold, digits, UNKNOWN), digits, confidences

    def probabilities(self, images: Array) -> Array:
        """Compute the probabilities of the classes, (N, classes), float64: quotients of integers."""
        powers, _ = self._powers(images)
        found: Array = powers / powers.sum(1, keepdims=True)
        return found

    def _powers(self, images: Array) -> tuple[Array, Array]:
        """Compute powers of two in proportion to the probabilities, and the digit of the largest logit."""
        logits = self.logits(images).astype(np.int64)
        powers = power((logits.max(1, keepdims=True) - logits) >> self.layers[-1].shift)
        return powers, logits[:, :DIGITS].argmax(1)

    def save(self, path: Path) -> None:
        """Write the network as JSON, with packed codes in base 64."""
        layers = [
            {
                "shape": list(layer.codes.shape),
                "stride": layer.stride,
                "shift": layer.shift,
                "codes": base64.b64encode(packed(layer.codes.ravel()).tobytes()).decode(),
                "multipliers": layer.multipliers.tolist(),
                "biases": layer.biases.tolist(),
            }
            for layer in self.layers
        ]
        path.write_text(json.dumps({"threshold": self.threshold, "layers": layers}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Network:
        """Read a file of `save`."""
        content = json.loads(path.read_text())
        layers = [
            Layer(
                unpacked(np.frombuffer(base64.b64decode(layer["codes"]), np.uint8), layer["shape"]),
                np.array(layer["multipliers"], np.int16),
                np.array(layer["biases"], np.int16),
                layer["stride"],
                layer["shift"],
            )
            for layer in content["layers"]
        ]
        return cls(tuple(layers), content["threshold"])

    def header(self) -> str:
        """Write the tables that `reader.c` includes.

        Raises:
            ValueError: if a sum could leave 32 bits.
        """
        side, rows, areas, maps, taps = SIDE, [], [], [], []
        for number, layer in enumerate(self.layers):
            if layer.largest() >= 1 << 31:
                raise ValueError(f"Sums of layer {number} may reach {layer.largest():,}, more than 32 bits hold.")
            outputs, inputs, kernel, _ = layer.codes.shape
            after = (side - kernel) // layer.stride + 1
            rows.append(f"{{{inputs}, {side}, {kernel}, {layer.stride}, {outputs}, {after}, {layer.shift}}}")
            areas.append(after * after)
            maps.append(outputs * after * after)
            taps.append(inputs * kernel * kernel)
            side = after
        every = np.concatenate([layer.codes.ravel() for layer in self.layers])
        constants = {
            "LAYERS": len(self.layers),
            "DIGITS": DIGITS,
            "CLASSES": len(self.layers[-1].codes),
            "BIAS_BITS": BIAS_BITS,
            "THRESHOLD": self.threshold,
            "MAX_MAP": max(maps[:-1]),
            "MAX_TAPS": max(taps),
            "MAX_AREA": max(areas),
        }
        tables = {
            "uint8_t codes": packed(every),
            "int16_t multipliers": np.concatenate([layer.multipliers for layer in self.layers]),
            "int16_t biases": np.concatenate([layer.biases for layer in self.layers]),
        }
        lines = [f"#define {name} {value}" for name, value in constants.items()]
        lines.append(f"static const layer layers[LAYERS] = {{{', '.join(rows)}}};")
        for name, values in tables.items():
            lines.append(f"static const {name}[{len(values)}] = {{{', '.join(map(str, values.tolist()))}}};")
        return "\n".join(lines) + "\n"


def power(d: Array) -> Array:
    """Compute 2^16 · 2^(−d / 2^FRACTION_BITS), by a parabola between whole powers."""
    whole, part = d >> FRACTION_BITS, d & ((1 << FRACTION_BITS) - 1)
    return np.where(whole > 16, 0, (65536 - part * (172 - (part * 44 >> 8))) >> np.minimum(whole, 16))


def packed(codes: Array) -> Array:
    """Pack codes from −8 to 7, two a byte, the first in the low bits."""
    nibbles = np.pad((codes + 8).astype(np.uint8), (0, len(codes) % 2))
    return nibbles[::2] | nibbles[1::2] << 4


def unpacked(data: Array, shape: list[int]) -> Array:
    """Unpack codes of a shape."""
    nibbles = np.stack([data & 15, data >> 4], 1).ravel()[: int(np.prod(shape))]
    return (nibbles.astype(np.int8) - 8).reshape(shape)
