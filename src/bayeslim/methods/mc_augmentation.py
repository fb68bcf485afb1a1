"""Augmentation at test time: predictions for shifted, mirrored or noisy copies of an input.

    p(y|x, D) ≈ (1/S) Σ_s p(y|T_s(x), w)

The variation of the predictions over transformations that should not matter is a measure of uncertainty. Training is
plain training; augmentation in training is left to the loader.

Ayhan & Berens 2018 · Wang et al. 2019, arXiv:1807.07356
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.errors import ShapeMismatch
from bayeslim.io.registry import register
from bayeslim.methods.shared.noisy_network import NoisyNetwork
from bayeslim.noise import current_generator, standard_normal_like
from bayeslim.types import Inputs, call


@register("method")
@dataclass(frozen=True)
class MCAugmentation(NoisyNetwork):
    """Random transformations of the inputs.

    Each draw has one transformation for all inputs; with `how="local"` one for every example.

    Attributes:
        noise: the standard deviation of Gaussian noise on floating-point inputs, in their own units.
        shift: the largest shift of an image (..., height, width) in pixels, in both directions, padded with zeros.
        flip: whether images are mirrored from left to right with probability ½.
    """

    noise: float = 0.0
    shift: int = 0
    flip: bool = False

    name: ClassVar[str] = "mc-augmentation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise < 0:
            raise ValueError(f"noise is a standard deviation and must not be negative. Got {self.noise}.")
        if type(self.shift) is not int or self.shift < 0:
            raise ValueError(f"shift is a whole number of pixels and must not be negative. Got {self.shift!r}.")
        if not (self.noise or self.shift or self.flip):
            raise ValueError(
                "MCAugmentation needs a transformation. Pass noise=0.1, shift=2 or flip=True, or several of them."
            )

    def noisy_pass(self, bnn: Bayesian, batches: list[Inputs], local: bool) -> Tensor:
        """Compute the outputs for inputs transformed alike, or one by one."""
        move = None if local else self._drawn_move()
        return torch.cat([call(bnn.model, self._transformed(inputs, move)) for inputs in batches])

    def _transformed(self, inputs: Inputs, move: tuple[int, int, bool] | None) -> Inputs:
        if isinstance(inputs, dict):
            return {key: self._transformed(value, move) for key, value in inputs.items()}
        if type(inputs) in (tuple, list):
            return tuple(self._transformed(value, move) for value in inputs)
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            return inputs
        moved = inputs
        if self.shift or self.flip:
            if inputs.ndim < 3:
                raise ShapeMismatch(
                    f"shift and flip are for images, (examples, ..., height, width). Got {tuple(inputs.shape)}. "
                    "Use noise for other inputs."
                )
            if move is None:
                moved = torch.stack([_moved(image, *self._drawn_move()) for image in inputs])
            else:
                moved = _moved(inputs, *move)
        return moved + self.noise * standard_normal_like(moved) if self.noise else moved

    def _drawn_move(self) -> tuple[int, int, bool]:
        generator = current_generator()
        right, down = torch.randint(-self.shift, self.shift + 1, (2,), generator=generator).tolist()
        return right, down, self.flip and bool(torch.rand((), generator=generator) < 0.5)


def _moved(images: Tensor, right: int, down: int, flipped: bool) -> Tensor:
    shifted = F.pad(images, (right, -right, down, -down))
    return shifted.flip(-1) if flipped else shifted
