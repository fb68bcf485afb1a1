"""The traced graph of a network as steps in C; unsupported operations are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from bayeslim.compact.example import rows_of, takes, tensors_in
from bayeslim.compact.ops import Call, read_call, words
from bayeslim.compact.trace import trace
from bayeslim.errors import UnsupportedModel
from bayeslim.export.c.steps import (
    Activation,
    Add,
    Affine,
    Floats,
    Pad,
    Program,
    Shape,
    Slope,
    Softmax,
    Step,
    Weighted,
    Window,
)
from bayeslim.types import Inputs, with_batch_size

_SAME = words(
    "dropout feature_dropout alpha_dropout contiguous alias detach clone lift_fresh_copy view _unsafe_view reshape "
    "flatten unflatten squeeze unsqueeze to _to_copy identity"
)
"""Operations that leave the entries of a sample, and their order in memory, as they are."""

_ACTIVATIONS: dict[str, Callable[[dict[str, Any]], Activation]] = {
    "relu": lambda _: Activation("relu"),
    "relu6": lambda _: Activation("clamp", (0.0, 6.0)),
    "hardtanh": lambda a: Activation("clamp", (float(a["min_val"]), float(a["max_val"]))),
    "leaky_relu": lambda a: Activation("leaky_relu", (float(a["negative_slope"]),)),
    "elu": lambda a: Activation("elu", tuple(float(a[key]) for key in ("alpha", "scale", "input_scale"))),
    "selu": lambda _: Activation("elu", (1.6732632423543772 * 1.0507009873554805, 1.0507009873554805, 1.0)),
    "celu": lambda a: Activation("elu", (float(a["alpha"]), 1.0, 1.0 / float(a["alpha"]))),
    "gelu": lambda a: Activation("gelu" if a["approximate"] == "none" else "gelu_tanh"),
    "sigmoid": lambda _: Activation("sigmoid"),
    "tanh": lambda _: Activation("tanh"),
    "silu": lambda _: Activation("silu"),
    "softplus": lambda a: Activation("softplus", (float(a["beta"]), float(a["threshold"]))),
    "hardsigmoid": lambda _: Activation("hardsigmoid"),
    "hardswish": lambda _: Activation("hardswish"),
    "abs": lambda _: Activation("abs"),
    "neg": lambda _: Activation("scale", (-1.0, 0.0)),
}
_SUPPORTED = (
    "Linear, Conv1d, Conv2d, max, average and adaptive average pooling, batch norm, ReLU and its relatives, GELU, "
    "sigmoid, tanh, softmax, sums of two tensors, and reshaping"
)
_TRACED_ROWS = 2


def read_program(network: nn.Module, example: Inputs) -> Program:
    """Translate a plain network in eval mode to steps, by the shapes of an example.

    Raises:
        UnsupportedModel: if an operation, a type or a shape is not supported; the message names it.
    """
    inputs = tensors_in(example)
    if len(inputs) != 1 or inputs[0].dtype != torch.float32 or inputs[0].ndim < 1 or not inputs[0].numel():
        found = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in inputs)
        raise UnsupportedModel(f"A network in C takes one float32 tensor with a batch dimension. Got {found}.")
    for name, tensor in network.named_parameters():
        if tensor.dtype != torch.float32:
            raise UnsupportedModel(f'A network in C computes in float32. "{name}" is {tensor.dtype}: call .float().')
        if not tensor.numel():
            raise UnsupportedModel(f'A network in C needs weights in every layer. "{name}" is empty.')
    rows = with_batch_size(example, _TRACED_ROWS) if rows_of(example) != _TRACED_ROWS else example
    if not takes(network, rows):
        raise UnsupportedModel(
            f"A network in C takes any number of samples. {type(network).__name__} takes {rows_of(example)} at once, "
            f"and not {_TRACED_ROWS}: take sizes from x.shape in its forward, not from constants."
        )
    traced = trace(network, rows)
    reader = _Reader(traced.module)
    with torch.no_grad():
        reader.run(*traced.inputs)
    assert reader.program is not None
    return reader.program


class _Reader(fx.Interpreter):
    """Runs the graph on the example and adds a step for every operation on activations."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.extra_traceback = False  # errors are for the user, and name the operation themselves
        self.steps: list[Step] = []
        self.sizes: dict[int, int] = {}
        self.tensors: dict[fx.Node, int] = {}
        self.input_shape: tuple[int, ...] = ()
        self.program: Program | None = None

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and translate it if it depends on the input."""
        result = super().run_node(n)
        if n.op == "placeholder":
            self._check_result(n.name, result)
            self.tensors[n] = self._new_tensor(result)
            self.input_shape = tuple(result.shape[1:])
        elif n.op == "output":
            self._finish(n, result)
        elif isinstance(result, (int, float, bool)) or result is None:
            pass  # a size, which is known, or a check
        elif n.op == "call_function" and any(parent in self.tensors for parent in n.all_input_nodes):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self._translate(read_call(n, args, kwargs, result))
        elif n.op == "call_module":
            raise UnsupportedModel(f'The graph keeps the module "{n.target}" whole, which C export does not support.')
        return result

    def _finish(self, node: fx.Node, result: Any) -> None:
        outputs = [parent for parent in node.all_input_nodes if parent in self.tensors]
        found = tensors_in(result)
        if len(outputs) != 1 or len(found) != 1:
            raise UnsupportedModel(
                f"A network in C returns one tensor computed from the input. Got {len(found)}, {len(outputs)} of them "
                "computed from it."
            )
        ends = next(iter(self.tensors.values())), self.tensors[outputs[0]]
        self.program = Program(tuple(self.steps), *ends, self.input_shape, tuple(found[0].shape[1:]), self.sizes)

    def _new_tensor(self, result: Tensor) -> int:
        number = len(self.sizes)
        self.sizes[number] = result[0].numel()
        return number

    @staticmethod
    def _check_result(name: str, result: Any) -> None:
        if not isinstance(result, Tensor) or result.dtype != torch.float32:
            raise UnsupportedModel(f'"{name}" gives {_described(result)}. C export supports float32 tensors only.')
        if result.ndim < 1 or result.shape[0] != _TRACED_ROWS:
            raise UnsupportedModel(
                f'"{name}" gives the shape {tuple(result.shape)}, whose first dimension is not the batch. '
                "C export computes each sample on its own."
            )

    def _translate(self, call: Call) -> None:
        read = _READERS.get(call.name)
        if call.name not in _SAME and call.name not in _ACTIVATIONS and read is None:
            raise UnsupportedModel(
                f"{_label(call)} is the operation {call.name}, which C export does not support. It supports "
                f'{_SUPPORTED}. Export to ".onnx" instead.'
            )
        self._check_result(_label(call), call.result)
        if call.name in _SAME:
            self.tensors[call.node] = self._operand(call, "self", "input")
        elif call.name in _ACTIVATIONS:
            self._elementwise(call, _ACTIVATIONS[call.name](call.values))
        elif read is not None:
            read(self, call)

    def _operand(self, call: Call, *names: str) -> int:
        """Find the argument that holds the activations."""
        for name in names:
            node = call.nodes.get(name)
            if isinstance(node, fx.Node) and node in self.tensors:
                return self.tensors[node]
        raise _refused(call, f"it reads activations in an argument other than {names[0]}")

    def _constant(self, call: Call, name: str) -> Tensor | None:
        node, value = call.nodes.get(name), call.values.get(name)
        if isinstance(node, fx.Node) and node in self.tensors:
            raise _refused(call, f"its {name} depends on the input")
        return value if isinstance(value, Tensor) else None

    def _weights(self, call: Call) -> tuple[Floats, dict[str, Any]]:
        """Read the weight of a layer, and the fields of a step that its parameters fill."""
        weight, bias = self._constant(call, "weight"), self._constant(call, "bias")
        assert weight is not None
        biases = np.zeros(len(weight), np.float32) if bias is None else _floats(bias)
        node = call.nodes["weight"]
        name = str(node.target) if isinstance(node, fx.Node) and node.op == "get_attr" else ""
        return _floats(weight), {"bias": biases, "parameter": name}

    def _add(
        self, call: Call, step: type[Step], inputs: tuple[int, ...], shapes: tuple[Shape, Shape], **own: Any
    ) -> None:
        """Add the step of an operation."""
        output = self._new_tensor(call.result)
        self.steps.append(step(_label(call), inputs, output, shapes[0], shapes[1], **own))
        self.tensors[call.node] = output

    def _elementwise(self, call: Call, activation: Activation) -> None:
        shape = (call.result[0].numel(), 1, 1)
        once = {"scale": np.ones(1, np.float32), "shift": np.zeros(1, np.float32), "activation": activation}
        self._add(call, Affine, (self._operand(call, "self", "input"),), (shape, shape), **once)

    def _linear(self, call: Call) -> None:
        node, source = self._operand(call, "input"), call.values["input"]
        if source.ndim != 2:
            raise _refused(call, f"it maps inputs of shape {tuple(source.shape)}; C export takes (batch, features)")
        weight, fields = self._weights(call)
        shapes = _shape(source, call), _shape(call.result, call)
        self._add(call, Weighted, (node,), shapes, weight=weight[:, :, None, None], **fields)

    def _convolution(self, call: Call) -> None:
        inputs, shape = self._operand(call, "input"), _shape(call.values["input"], call)
        values, rank = call.values, _rank(call)
        weight, fields = self._weights(call)
        stride, dilation = _pair(values["stride"], rank), _pair(values["dilation"], rank)
        kernel = _pair(list(weight.shape[2:]), rank)
        if isinstance(values["padding"], str):
            total = [d * (k - 1) if values["padding"] == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
            before = (total[0] // 2, total[1] // 2)
        else:
            before = _pair(values["padding"], rank, 0)
            total = [2 * before[0], 2 * before[1]]
        if any(total):
            padded = (shape[0], shape[1] + total[0], shape[2] + total[1])
            number = len(self.sizes)
            self.sizes[number] = math.prod(padded)
            self.steps.append(Pad(f"{_label(call)}: padding", (inputs,), number, shape, padded, None, *before))
            inputs, shape = number, padded
        fields |= {"stride": stride, "dilation": dilation, "groups": values["groups"]}
        matrix = weight.reshape(*weight.shape[:2], *kernel)
        self._add(call, Weighted, (inputs,), (shape, _shape(call.result, call)), weight=matrix, **fields)
        step = self.steps[-1]
        if isinstance(step, Weighted) and step.conv_shape != step.out_shape:
            raise _refused(call, "its output has an unexpected shape")

    def _batch_norm(self, call: Call) -> None:
        mean, variance = self._constant(call, "running_mean"), self._constant(call, "running_var")
        if mean is None or variance is None or call.values["training"]:
            raise _refused(call, "it computes statistics of the batch. Use running statistics in eval mode")
        scale = (variance.double() + call.values["eps"]).rsqrt()
        weight, bias = self._constant(call, "weight"), self._constant(call, "bias")
        scale = scale if weight is None else scale * weight.double()
        shift = -mean.double() * scale + (0 if bias is None else bias.double())
        inputs = (self._operand(call, "input"),)
        shapes = _shape(call.values["input"], call), _shape(call.result, call)
        self._add(call, Affine, inputs, shapes, scale=_floats(scale), shift=_floats(shift))

    def _pooling(self, call: Call) -> None:
        values, rank = call.values, _rank(call)
        size = _pair(values["kernel_size"], rank)
        stride = _pair(values["stride"], rank) if values["stride"] else size
        padding = _pair(values["padding"], rank, 0)
        dilation = _pair(values.get("dilation") or 1, rank)
        source, out = _shape(values["self"], call), _shape(call.result, call)
        for place in (0, 1):
            span = source[place + 1] + 2 * padding[place] - dilation[place] * (size[place] - 1) - 1
            if span // stride[place] + 1 != out[place + 1]:
                raise _refused(call, "ceil_mode adds windows that reach over the edge")
        if values.get("divisor_override"):
            raise _refused(call, "it has a divisor_override")
        fields = {"kind": call.name[:3], "size": size, "stride": stride, "padding": padding, "dilation": dilation}
        counts_padding = bool(values.get("count_include_pad", True))
        inputs = (self._operand(call, "self", "input"),)
        self._add(call, Window, inputs, (source, out), counts_padding=counts_padding, **fields)

    def _average(self, call: Call) -> None:
        """Average over equal windows, or all pixels."""
        source, out = _shape(call.values["self"], call), _shape(call.result, call)
        if source[1] % out[1] or source[2] % out[2]:
            raise _refused(call, f"{source[1:]} pixels do not divide into {out[1:]} equal windows")
        size = (source[1] // out[1], source[2] // out[2])
        self._add(call, Window, (self._operand(call, "self"),), (source, out), kind="avg", size=size, stride=size)

    def _mean(self, call: Call) -> None:
        rank = call.values["self"].ndim
        dims = sorted(d % rank for d in (call.values.get("dim") or range(rank)))
        if dims != list(range(2, rank)) or rank < 3:
            raise _refused(call, f"it averages over the dimensions {dims}, not over all pixels")
        self._average(call)

    def _sum(self, call: Call) -> None:
        factor = float(call.values.get("alpha") or 1) * (-1 if call.name == "sub" else 1)
        first, second = call.nodes["self"], call.nodes["other"]
        if isinstance(call.values["other"], (int, float)):
            self._elementwise(call, Activation("scale", (1.0, factor * float(call.values["other"]))))
            return
        if not all(isinstance(node, fx.Node) and node in self.tensors for node in (first, second)):
            raise _refused(call, "it adds a constant tensor")
        if call.values["self"].shape != call.values["other"].shape:
            raise _refused(call, "its operands are broadcast")
        shape = (call.result[0].numel(), 1, 1)
        self._add(call, Add, (self.tensors[first], self.tensors[second]), (shape, shape), factor=factor)

    def _scale(self, call: Call) -> None:
        divides, other = call.name == "div", call.values["other"]
        if not isinstance(other, (int, float)):
            raise _refused(call, f"it {'divides' if divides else 'multiplies'} tensors")
        if call.values.get("rounding_mode") is not None:
            raise _refused(call, "it rounds")
        self._elementwise(call, Activation("scale", (1.0 / float(other) if divides else float(other), 0.0)))

    def _clamp(self, call: Call) -> None:
        low, high = call.values["min"], call.values["max"]
        if not all(isinstance(bound, int | float | None) for bound in (low, high)):
            raise _refused(call, "its bounds are tensors")
        bounds = (-math.inf if low is None else float(low)), (math.inf if high is None else float(high))
        self._elementwise(call, Activation("clamp", bounds))

    def _prelu(self, call: Call) -> None:
        weight = self._constant(call, "weight")
        assert weight is not None
        slopes = _floats(weight)
        if len(slopes) == 1:
            self._elementwise(call, Activation("leaky_relu", (float(slopes[0]),)))
            return
        shape = _shape(call.result, call)
        self._add(call, Slope, (self._operand(call, "self", "input"),), (shape, shape), slopes=slopes)

    def _softmax(self, call: Call) -> None:
        source = call.values["self"]
        dim = call.values["dim"] % source.ndim
        if dim == 0 or dim not in (1, source.ndim - 1):
            raise _refused(call, f"it is over dimension {dim}, neither the channels nor the last one")
        if dim > 1 and source.shape[dim] == 1:
            raise _refused(call, "its dimension has a size of one")
        inputs, shapes = (self._operand(call, "self"),), (_shape(source, call), _shape(call.result, call))
        self._add(call, Softmax, inputs, shapes, over_channels=dim == 1, is_log=call.name == "log_softmax")


_READERS: dict[str, Callable[[_Reader, Call], None]] = {
    "linear": _Reader._linear,
    **dict.fromkeys(words("conv1d conv2d"), _Reader._convolution),
    "batch_norm": _Reader._batch_norm,
    **dict.fromkeys(words("max_pool1d max_pool2d avg_pool1d avg_pool2d"), _Reader._pooling),
    **dict.fromkeys(words("adaptive_avg_pool1d adaptive_avg_pool2d"), _Reader._average),
    "mean": _Reader._mean,
    **dict.fromkeys(words("add sub"), _Reader._sum),
    **dict.fromkeys(words("mul div"), _Reader._scale),
    "clamp": _Reader._clamp,
    **dict.fromkeys(words("prelu _prelu_kernel"), _Reader._prelu),
    **dict.fromkeys(words("softmax log_softmax"), _Reader._softmax),
}
"""The translation of each operation; those on images go by their names, such as "max_pool2d"."""


def _floats(tensor: Tensor) -> Floats:
    found: Floats = tensor.detach().cpu().float().contiguous().numpy()
    if not np.isfinite(found).all():
        raise UnsupportedModel("A weight is infinite or not a number, which C export does not support.")
    return found


def _rank(call: Call) -> int:
    """Read the dimensions of an image from the name of an operation."""
    return int(call.name[-2])


def _pair(value: Any, rank: int, fill: int = 1) -> tuple[int, int]:
    """Read a size of one or two dimensions as lines and places."""
    values = [value] * rank if isinstance(value, int) else list(value)
    values = values * rank if len(values) < rank else values
    return (fill, int(values[0])) if rank == 1 else (int(values[0]), int(values[1]))


def _shape(tensor: Tensor, call: Call) -> Shape:
    shape = tuple(tensor.shape[1:])
    if len(shape) > 3:
        raise _refused(call, f"it works on tensors of shape {tuple(tensor.shape)}, with more than three dimensions")
    channels, *places = shape or (1,)
    height, width = (places if len(places) == 2 else [1, *places, 1][:2]) if places else (1, 1)
    return (channels, height, width)


def _label(call: Call) -> str:
    """Name an operation by the module that it comes from."""
    stack = call.node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()), ("",))[0] if stack else ""
    return f'"{path}" ({call.name})' if path else f"{call.name}"


def _described(result: Any) -> str:
    return f"a {result.dtype} tensor" if isinstance(result, Tensor) else f"a {type(result).__name__}"


def _refused(call: Call, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f'{_label(call)} cannot be exported to C: {reason}. Export to ".onnx" instead.')
