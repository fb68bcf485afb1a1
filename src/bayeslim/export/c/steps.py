"""The steps of a network in C: each reads one or two tensors and writes one.

Shapes are those of one sample. An image has the shape (channels, height, width), a signal of `Conv1d` a height of 1,
and a vector (features, 1, 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Activation:
    """An elementwise function.

    Attributes:
        kind: its name.
        constants: its arguments, such as the slope of a leaky ReLU.
    """

    kind: str
    constants: tuple[float, ...] = ()


@dataclass(frozen=True)
class Pool:
    """A pooling window without padding whose stride is its size.

    Attributes:
        kind: "max" or "avg".
        height: lines of the window.
        width: places of the window.
    """

    kind: str
    height: int
    width: int


@dataclass(frozen=True, eq=False)
class Step:
    """One operation.

    Attributes:
        name: of the module or the operation, for comments and errors.
        inputs: the tensors that it reads, by number.
        output: the tensor that it writes.
        in_shape: of its inputs.
        out_shape: of its output.
        activation: applied to its output.
    """

    name: str
    inputs: tuple[int, ...]
    output: int
    in_shape: Shape
    out_shape: Shape
    activation: Activation | None = None


@dataclass(frozen=True, eq=False)
class Weighted(Step):
    """A convolution without padding, or a linear layer, which is a convolution of one pixel.

    Attributes:
        weight: (outputs, inputs per group, height, width).
        bias: (outputs,).
        stride: lines and places between windows.
        dilation: lines and places between entries of a window.
        groups: of channels.
        pool: applied after the activation.
        parameter: the name of the weight in the network.
        levels: `weight` divided by `row_scale`, where that leaves fewer distinct values.
        row_scale: one factor per output.
    """

    weight: Floats = field(default_factory=lambda: np.zeros((0, 0, 1, 1), np.float32))
    bias: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    pool: Pool | None = None
    parameter: str = ""
    levels: Floats | None = None
    row_scale: Floats | None = None

    @property
    def conv_shape(self) -> Shape:
        """Shape before pooling."""
        _, height, width = self.in_shape
        outputs, _, kernel_height, kernel_width = self.weight.shape
        return (
            outputs,
            (height - self.dilation[0] * (kernel_height - 1) - 1) // self.stride[0] + 1,
            (width - self.dilation[1] * (kernel_width - 1) - 1) // self.stride[1] + 1,
        )

    @property
    def is_vector(self) -> bool:
        """Whether it has one input pixel and one output pixel per channel."""
        return self.in_shape[1:] == (1, 1)


@dataclass(frozen=True, eq=False)
class Pad(Step):
    """Zeros around an image.

    Attributes:
        top: lines of zeros above.
        left: places of zeros on the left.
    """

    top: int = 0
    left: int = 0


@dataclass(frozen=True, eq=False)
class Window(Step):
    """A pooling layer of any stride and padding.

    Attributes:
        kind: "max" or "avg".
        size: lines and places of the window.
        stride: between windows.
        padding: above and on the left.
        dilation: between entries of a window.
        counts_padding: whether an average counts the padding as zeros.
    """

    kind: str = "max"
    size: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    counts_padding: bool = True


@dataclass(frozen=True, eq=False)
class Affine(Step):
    """A scale and a shift per channel, such as a batch norm that follows no convolution.

    Attributes:
        scale: (channels,).
        shift: (channels,).
    """

    scale: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    shift: Floats = field(default_factory=lambda: np.zeros(0, np.float32))


@dataclass(frozen=True, eq=False)
class Slope(Step):
    """A leaky ReLU with a slope for each channel.

    Attributes:
        slopes: (channels,).
    """

    slopes: Floats = field(default_factory=lambda: np.zeros(0, np.float32))


@dataclass(frozen=True, eq=False)
class Add(Step):
    """The sum of two tensors, such as a residual connection.

    Attributes:
        factor: of the second tensor.
    """

    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class Softmax(Step):
    """A softmax over the channels of every pixel, or over the places of every line.

    Attributes:
        over_channels: whether over channels.
        is_log: whether its logarithm is written.
    """

    over_channels: bool = True
    is_log: bool = False


@dataclass(frozen=True, eq=False)
class Program:
    """A network as steps.

    Attributes:
        steps: in order.
        input: the number of the input tensor.
        output: the number of the output tensor.
        input_shape: of one sample, as the network takes it.
        output_shape: of one sample, as the network returns it.
        sizes: the entries of every tensor, by number.
    """

    steps: tuple[Step, ...]
    input: int
    output: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    sizes: dict[int, int]
