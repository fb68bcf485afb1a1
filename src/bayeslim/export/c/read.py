"""The traced graph of a network as steps in C; unsupported operations are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from bayeslim.compact.example import rows_of, tensors_in
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
    """Translate a network to steps.

    Args:
        network: a plain network in eval mode.
        example: inputs, with a batch dimension.

    Raises:
        UnsupportedModel: if an operation, a type or a shape is not supported; the message names it.
    """
    inputs = tensors_in(example)
    if len(inputs) != 1 or inputs[0].dtype != torch.float32 or inputs[0].ndim < 1:
        found = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in inputs)
        raise UnsupportedModel(f"A network in C takes one float32 tensor with a batch dimension. Got {found}.")
    for name, tensor in network.named_parameters():
        if tensor.dtype != torch.float32:
            raise UnsupportedModel(f'A network in C computes in float32. "{name}" is {tensor.dtype}: call .float().')
    traced = trace(network, with_batch_size(example, _TRACED_ROWS) if rows_of(example) != _TRACED_ROWS else example)
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
        elif isinstance(result, (int, float, bool)):
            pass  # a size, which is known
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
            raise UnsupportedModel(f"A network in C returns one tensor computed from the input. Got {len(found)}.")
        entry = next(iter(self.tensors.values()))
        self.program = Program(
            tuple(self.steps),
            entry,
            self.tensors[outputs[0]],
            self.input_shape,
            tuple(found[0].shape[1:]),
            self.sizes,
        )

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
        translate = getattr(self, f"_read_{call.name}", None)
        if call.name not in _SAME and call.name not in _ACTIVATIONS and translate is None:
            raise UnsupportedModel(
                f"{_label(call)} is the operation {call.name}, which C export does not support. It supports "
                f'{_SUPPORTED}. Export to ".onnx" instead.'
            )
        self._check_result(_label(call), call.result)
        if call.name in _SAME:
            self.tensors[call.node] = self.tensors[self._operand(call, "self", "input")]
        elif call.name in _ACTIVATIONS:
            self._elementwise(call, _ACTIVATIONS[call.name](call.values))
        elif translate is not None:
            translate(call)

    def _operand(self, call: Call, *names: str) -> fx.Node:
        """Find the argument that holds the activations."""
        for name in names:
            node = call.nodes.get(name)
            if isinstance(node, fx.Node) and node in self.tensors:
                return node
        raise _refused(call, f"it reads activations in an argument other than {names[0]}")

    def _constant(self, call: Call, name: str) -> Tensor | None:
        node, value = call.nodes.get(name), call.values.get(name)
        if isinstance(node, fx.Node) and node in self.tensors:
            raise _refused(call, f"its {name} depends on the input")
        return value if isinstance(value, Tensor) else None

    def _add(self, call: Call, step: type[Step], source: Tensor, inputs: tuple[int, ...], **fields: Any) -> int:
        output = self._new_tensor(call.result)
        shapes = _shape(source, call), _shape(call.result, call)
        self.steps.append(step(_label(call), inputs, output, *shapes, **fields))
        self.tensors[call.node] = output
        return output

    def _elementwise(self, call: Call, activation: Activation) -> None:
        node = self._operand(call, "self", "input")
        count = call.result[0].numel()
        output = self._new_tensor(call.result)
        shape = (count, 1, 1)
        ones, zeros = np.ones(1, np.float32), np.zeros(1, np.float32)
        inputs = (self.tensors[node],)
        self.steps.append(
            Affine(_label(call), inputs, output, shape, shape, activation=activation, scale=ones, shift=zeros)
        )
        self.tensors[call.node] = output

    def _read_linear(self, call: Call) -> None:
        node, source = self._operand(call, "input"), call.values["input"]
        if source.ndim != 2:
            raise _refused(call, f"it maps inputs of shape {tuple(source.shape)}; C export takes (batch, features)")
        weight = self._constant(call, "weight")
        assert weight is not None
        bias = _bias(self._constant(call, "bias"), len(weight))
        fields = {"weight": _floats(weight)[:, :, None, None], "bias": bias, "parameter": _name(call, "weight")}
        self._add(call, Weighted, source, (self.tensors[node],), **fields)

    def _read_conv1d(self, call: Call) -> None:
        self._convolution(call, 1)

    def _read_conv2d(self, call: Call) -> None:
        self._convolution(call, 2)

    def _convolution(self, call: Call, rank: int) -> None:
        node, source, values = self._operand(call, "input"), call.values["input"], call.values
        weight = self._constant(call, "weight")
        assert weight is not None
        stride, dilation = _pair(values["stride"], rank), _pair(values["dilation"], rank)
        kernel = _pair(list(weight.shape[2:]), rank)
        if isinstance(values["padding"], str):
            total = [d * (k - 1) if values["padding"] == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
            before = (total[0] // 2, total[1] // 2)
        else:
            before = _pair(values["padding"], rank, 0)
            total = [2 * before[0], 2 * before[1]]
        inputs, shape = self.tensors[node], _shape(source, call)
        if any(total):
            padded = (shape[0], shape[1] + total[0], shape[2] + total[1])
            self.sizes[len(self.sizes)] = padded[0] * padded[1] * padded[2]
            number = len(self.sizes) - 1
            self.steps.append(Pad(f"{_label(call)}: padding", (inputs,), number, shape, padded, None, *before))
            inputs, shape = number, padded
        output = self._new_tensor(call.result)
        matrix = _floats(weight).reshape(*weight.shape[:2], *kernel)
        bias = _bias(self._constant(call, "bias"), len(weight))
        step = Weighted(
            _label(call),
            (inputs,),
            output,
            shape,
            _shape(call.result, call),
            weight=matrix,
            bias=bias,
            stride=stride,
            dilation=dilation,
            groups=values["groups"],
            parameter=_name(call, "weight"),
        )
        if step.conv_shape != step.out_shape:
            raise _refused(call, "its output has an unexpected shape")
        self.steps.append(step)
        self.tensors[call.node] = output

    def _read_batch_norm(self, call: Call) -> None:
        node = self._operand(call, "input")
        mean, variance = self._constant(call, "running_mean"), self._constant(call, "running_var")
        if mean is None or variance is None or call.values["training"]:
            raise _refused(call, "it computes statistics of the batch. Use running statistics in eval mode")
        scale = (variance.double() + call.values["eps"]).rsqrt()
        weight, bias = self._constant(call, "weight"), self._constant(call, "bias")
        scale = scale if weight is None else scale * weight.double()
        shift = -mean.double() * scale + (0 if bias is None else bias.double())
        fields = {"scale": _floats(scale), "shift": _floats(shift)}
        self._add(call, Affine, call.values["input"], (self.tensors[node],), **fields)

    def _read_max_pool2d(self, call: Call) -> None:
        self._pooling(call, "max", 2)

    def _read_max_pool1d(self, call: Call) -> None:
        self._pooling(call, "max", 1)

    def _read_avg_pool2d(self, call: Call) -> None:
        self._pooling(call, "avg", 2)

    def _read_avg_pool1d(self, call: Call) -> None:
        self._pooling(call, "avg", 1)

    def _pooling(self, call: Call, kind: str, rank: int) -> None:
        node, values = self._operand(call, "self", "input"), call.values
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
        counts_padding = bool(values.get("count_include_pad", True))
        self._add(
            call,
            Window,
            values["self"],
            (self.tensors[node],),
            kind=kind,
            size=size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            counts_padding=counts_padding,
        )

    def _read_adaptive_avg_pool2d(self, call: Call) -> None:
        self._adaptive(call, "avg")

    def _read_adaptive_avg_pool1d(self, call: Call) -> None:
        self._adaptive(call, "avg")

    def _adaptive(self, call: Call, kind: str) -> None:
        node = self._operand(call, "self")
        source, out = _shape(call.values["self"], call), _shape(call.result, call)
        if source[1] % out[1] or source[2] % out[2]:
            raise _refused(call, f"{source[1:]} pixels do not divide into {out[1:]} equal windows")
        size = (source[1] // out[1], source[2] // out[2])
        fields: dict[str, Any] = {"kind": kind, "size": size, "stride": size}
        self._add(call, Window, call.values["self"], (self.tensors[node],), **fields)

    def _read_mean(self, call: Call) -> None:
        node, source = self._operand(call, "self"), call.values["self"]
        dims = sorted(d % source.ndim for d in (call.values.get("dim") or range(source.ndim)))
        if dims != list(range(2, source.ndim)) or source.ndim < 3:
            raise _refused(call, f"it averages over the dimensions {dims}, not over all pixels")
        shape = _shape(source, call)
        output = self._new_tensor(call.result)
        fields: dict[str, Any] = {"kind": "avg", "size": shape[1:], "stride": shape[1:]}
        inputs = (self.tensors[node],)
        self.steps.append(Window(_label(call), inputs, output, shape, (shape[0], 1, 1), **fields))
        self.tensors[call.node] = output

    def _read_add(self, call: Call) -> None:
        self._sum(call, float(call.values.get("alpha") or 1))

    def _read_sub(self, call: Call) -> None:
        self._sum(call, -float(call.values.get("alpha") or 1))

    def _sum(self, call: Call, factor: float) -> None:
        first, second = call.nodes["self"], call.nodes["other"]
        if isinstance(call.values["other"], (int, float)):
            self._elementwise(call, Activation("scale", (1.0, factor * float(call.values["other"]))))
            return
        if not all(isinstance(node, fx.Node) and node in self.tensors for node in (first, second)):
            raise _refused(call, "it adds a constant tensor")
        if call.values["self"].shape != call.values["other"].shape:
            raise _refused(call, "its operands are broadcast")
        count = call.result[0].numel()
        output = self._new_tensor(call.result)
        inputs = (self.tensors[first], self.tensors[second])
        self.steps.append(Add(_label(call), inputs, output, (count, 1, 1), (count, 1, 1), factor=factor))
        self.tensors[call.node] = output

    def _read_mul(self, call: Call) -> None:
        if not isinstance(call.values["other"], (int, float)):
            raise _refused(call, "it multiplies tensors")
        self._elementwise(call, Activation("scale", (float(call.values["other"]), 0.0)))

    def _read_div(self, call: Call) -> None:
        if not isinstance(call.values["other"], (int, float)):
            raise _refused(call, "it divides tensors")
        self._elementwise(call, Activation("scale", (1.0 / float(call.values["other"]), 0.0)))

    def _read_clamp(self, call: Call) -> None:
        low, high = call.values["min"], call.values["max"]
        if not all(isinstance(bound, int | float | None) for bound in (low, high)):
            raise _refused(call, "its bounds are tensors")
        largest = float(np.finfo(np.float32).max)
        low, high = (-largest if low is None else float(low)), (largest if high is None else float(high))
        self._elementwise(call, Activation("clamp", (low, high)))

    def _read_softmax(self, call: Call) -> None:
        self._softmax(call, False)

    def _read_log_softmax(self, call: Call) -> None:
        self._softmax(call, True)

    def _softmax(self, call: Call, is_log: bool) -> None:
        source = call.values["self"]
        dim = call.values["dim"] % source.ndim
        if dim == 0 or dim not in (1, source.ndim - 1):
            raise _refused(call, f"it is over dimension {dim}, neither the channels nor the last one")
        inputs = (self.tensors[self._operand(call, "self")],)
        self._add(call, Softmax, source, inputs, over_channels=dim == 1, is_log=is_log)


def _floats(tensor: Tensor) -> Floats:
    found: Floats = tensor.detach().cpu().float().contiguous().numpy()
    if not np.isfinite(found).all():
        raise UnsupportedModel("A weight is infinite or not a number, which C export does not support.")
    return found


def _name(call: Call, argument: str) -> str:
    """Return the name of the parameter that an argument is, if it is one."""
    node = call.nodes[argument]
    return str(node.target) if isinstance(node, fx.Node) and node.op == "get_attr" else ""


def _bias(bias: Tensor | None, count: int) -> Floats:
    return np.zeros(count, np.float32) if bias is None else _floats(bias)


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
