"""A quantised network as ONNX, with its own codes and scales.

Stored only, every weight is `Cast(codes) · scale` (or a look-up in its codebook), which onnxruntime computes once when
it loads the file: the answers are those of the quantised network. In integer arithmetic, layers with codes of 8 bits
read `DequantizeLinear(codes)` and activations that pass through `QuantizeLinear`, with ranges as seen on the example;
their biases are int32. onnxruntime joins these into its integer kernels. Weights and activations are both unsigned: x86
processors without VNNI add products of unsigned and signed bytes in 16 bits, where they overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from bayeslim.compact.example import tensors_in
from bayeslim.errors import UnsupportedModel
from bayeslim.export.check import prove
from bayeslim.export.onnx import Session, require, serialised, traced
from bayeslim.quantise.grids import Codebook, Uniform
from bayeslim.quantise.result import Quantised
from bayeslim.types import Inputs

INT8_TOLERANCE = 0.1
"""The relative difference that 8-bit activations may cause."""
_DECODE_OVERHEAD_BYTES = 256
"""The approximate size of the operations that decode a weight in the file."""
_MAX_BIAS_CODE = 2**30
"""The largest integer of a bias: half the range of int32, because the layer's sums are added to it."""
_WEIGHT_ZERO = 128
"""The unsigned code of a zero weight."""
_INTEGER_LAYERS = ("Conv", "Gemm", "MatMul")


def to_integer_onnx(
    quantised: Quantised, network: nn.Module, inputs: Sequence[Inputs], example: Inputs, tolerance: float, *, int8: bool
) -> tuple[bytes, float]:
    """Encode a quantised network as ONNX; return the content and its difference."""
    proto = traced(network, inputs)
    stored = _stored(proto, quantised)
    if int8:
        _compute_in_integers_(proto, stored, example)
    else:
        for name, (codes, grid) in stored.items():
            if _is_worth_it(codes):
                _decode_(proto, name, codes, grid)
    content = serialised(proto)
    allowed = max(tolerance, INT8_TOLERANCE) if int8 else tolerance
    return content, prove(network, Session(content), inputs, "int8 ONNX" if int8 else "ONNX", allowed)


def _stored(proto: Any, quantised: Quantised) -> dict[str, tuple[np.ndarray, Uniform | Codebook]]:
    """Find the initialisers that have codes, in the graph's layout, with their grids."""
    (helper,) = require("onnx.numpy_helper")
    found: dict[str, tuple[np.ndarray, Uniform | Codebook]] = {}
    for tensor in proto.graph.initializer:
        values = helper.to_array(tensor)
        for name, codes in quantised.codes.items():
            if values.dtype != np.float32 or values.size != codes.numel():
                continue
            grid = quantised.grids[name].cpu()
            for turned in (False, True):
                own, own_grid = _turned(codes.cpu(), grid) if turned else (codes.cpu(), grid)
                if tuple(own.shape) == values.shape and bool((own_grid.decode(own).numpy() == values).all()):
                    found.setdefault(tensor.name, (own.numpy(), own_grid))
    return found


def _is_worth_it(codes: np.ndarray) -> bool:
    """Return whether codes and their decoding take fewer bytes than the weights."""
    return codes.size * 3 >= _DECODE_OVERHEAD_BYTES


def _turned(codes: torch.Tensor, grid: Uniform | Codebook) -> tuple[torch.Tensor, Uniform | Codebook]:
    """Transpose codes and grid of a matrix that the exporter has transposed."""
    if codes.ndim != 2:
        return codes, grid
    if isinstance(grid, Codebook):
        return codes.T.contiguous(), grid
    scale, bits = (t.T if t.ndim == 2 else t for t in (grid.scale, grid.bits))
    return codes.T.contiguous(), Uniform(scale.contiguous(), bits.contiguous())


def _decode_(proto: Any, name: str, codes: np.ndarray, grid: Uniform | Codebook) -> None:
    """Replace an initialiser by its codes and their decoding, in place."""
    onnx, _ = require("onnx", "onnx.helper")
    make = onnx.helper.make_node
    _remove_(proto, name)
    if isinstance(grid, Codebook):
        _add_(proto, f"{name}_codes", codes.astype(np.uint8 if len(grid.values) <= 256 else np.uint16))
        _add_(proto, f"{name}_levels", grid.values.numpy())
        nodes = [
            make("Cast", [f"{name}_codes"], [f"{name}_places"], to=onnx.TensorProto.INT32),
            make("Gather", [f"{name}_levels", f"{name}_places"], [name]),
        ]
    else:
        _add_(proto, f"{name}_codes", codes.astype(np.int8 if np.abs(codes).max(initial=0) < 128 else np.int16))
        _add_(proto, f"{name}_scale", grid.scale.numpy())
        nodes = [
            make("Cast", [f"{name}_codes"], [f"{name}_whole"], to=onnx.TensorProto.FLOAT),
            make("Mul", [f"{name}_whole", f"{name}_scale"], [name]),
        ]
    _prepend_(proto, nodes)


def _compute_in_integers_(
    proto: Any, stored: dict[str, tuple[np.ndarray, Uniform | Codebook]], example: Inputs
) -> None:
    """Make layers with int8 codes compute in integers, in place."""
    onnx, helper = require("onnx", "onnx.numpy_helper")
    make = onnx.helper.make_node
    biases = {t.name: helper.to_array(t) for t in proto.graph.initializer}
    users: dict[str, int] = {}
    for node in proto.graph.node:
        for value in node.input:
            users[value] = users.get(value, 0) + 1
    layers = [
        node
        for node in proto.graph.node
        if node.op_type in _INTEGER_LAYERS and node.input[1] in stored and _fits(node, *stored[node.input[1]], users)
    ]
    if not layers:
        raise UnsupportedModel(
            "No layer of the network can compute in integers: that takes linear or convolutional layers with even "
            "grids of at most 8 bits. Export without int8=True to store the codes."
        )
    inside = {name for node in layers for name in node.input[1:] if users[name] == 1}
    for name, (codes, grid) in stored.items():
        if name not in inside and _is_worth_it(codes):
            _decode_(proto, name, codes, grid)
    ranges = _ranges(proto, {node.input[0] for node in layers}, example)
    added = []
    for node in layers:
        source, weight = node.input[0], node.input[1]
        step, zero = _steps(*ranges[source])
        codes, grid = stored[weight]
        assert isinstance(grid, Uniform)
        scales = grid.scale.numpy()
        bias = next((name for name in node.input[2:] if name in biases and users[name] == 1), None)
        if bias is not None:
            codes, scales = _with_room(codes, scales, biases[bias], step)
        own = scales.reshape(-1)
        scale = own[0] if own.size == 1 else own
        unsigned = (codes + _WEIGHT_ZERO).astype(np.uint8)
        added.append(
            _dequantised(proto, weight, unsigned, np.asarray(scale, np.float32), _axis(grid), zero=_WEIGHT_ZERO)
        )
        entry = f"{weight}_input"
        _add_(proto, f"{entry}_step", np.asarray(step, np.float32))
        _add_(proto, f"{entry}_zero", np.asarray(zero, np.uint8))
        levels = [f"{entry}_step", f"{entry}_zero"]
        added.append(make("QuantizeLinear", [source, *levels], [f"{entry}_codes"]))
        added.append(make("DequantizeLinear", [f"{entry}_codes", *levels], [entry]))
        node.input[0] = entry
        if bias is not None:
            unit = np.asarray(step * scale, np.float32)
            added.append(_dequantised(proto, bias, np.round(biases[bias] / unit).astype(np.int32), unit, 0))
    _sort_(proto, added)


def _fits(node: Any, codes: np.ndarray, grid: Uniform | Codebook, users: dict[str, int]) -> bool:
    """Return whether a weight has one user, int8 codes and a scale per output."""
    if not isinstance(grid, Uniform) or np.abs(codes).max(initial=0) > 127 or users[node.input[1]] > 1:
        return False
    set_to = {a.name: a.f if a.name in ("alpha", "beta") else a.i for a in node.attribute}
    outputs_first = node.op_type == "Conv" or set_to.get("transB", 0) == 1
    plain = set_to.get("alpha", 1.0) == set_to.get("beta", 1.0) == 1.0 and not set_to.get("transA", 0)
    return plain and (grid.scale.numel() == 1 or _axis(grid) == (0 if outputs_first else 1))


def _with_room(
    codes: np.ndarray, scale: np.ndarray, bias: np.ndarray, step: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """Coarsen codes and scales until the bias is an int32 in units of step · scale.

    They change only where inputs or weights are so small that the loss is negligible beside the bias.
    """
    least = np.abs(bias) / (step * _MAX_BIAS_CODE)
    coarser = np.maximum(scale, least.max() if scale.size == 1 else least.reshape(scale.shape))
    return np.round(codes * (scale / coarser)), coarser


def _axis(grid: Uniform) -> int:
    """Return the dimension along which scales differ."""
    return 1 if grid.scale.ndim == 2 and grid.scale.shape[0] == 1 else 0


def _steps(low: float, high: float) -> tuple[np.float32, int]:
    """Return the step and the zero point of unsigned 8-bit levels from low to high."""
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:  # only zeros were seen: the range of other inputs is unknown
        low, high = -1.0, 1.0
    step = np.float32(max((high - low) / 255, 1e-12))
    return step, int(np.clip(round(-low / float(step)), 0, 255))


def _ranges(proto: Any, names: set[str], example: Inputs) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest value of tensors in the graph, on the example."""
    (onnx,) = require("onnx")
    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    inputs = [entry.name for entry in proto.graph.input]
    inner = sorted(names - set(inputs))
    del shown.graph.output[:]
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    given = zip(inputs, tensors_in(example), strict=True)
    found = {name: (float(x.min()), float(x.max())) for name, x in given if name in names}
    if inner:
        for name, value in zip(inner, Session(serialised(shown))(example), strict=True):
            found[name] = (float(value.min()), float(value.max()))
    return found


def _dequantised(proto: Any, name: str, codes: np.ndarray, scale: np.ndarray, axis: int, zero: int = 0) -> Any:
    """Replace an initialiser by its codes; return the operation that decodes them."""
    (onnx,) = require("onnx")
    _remove_(proto, name)
    parts = {"codes": codes, "scale": scale, "zero": np.full(scale.shape, zero, codes.dtype)}
    for part, values in parts.items():
        _add_(proto, f"{name}_{part}", values)
    return onnx.helper.make_node("DequantizeLinear", [f"{name}_{part}" for part in parts], [name], axis=axis)


def _add_(proto: Any, name: str, values: np.ndarray) -> None:
    (helper,) = require("onnx.numpy_helper")
    proto.graph.initializer.append(helper.from_array(np.ascontiguousarray(values).reshape(values.shape), name))


def _remove_(proto: Any, name: str) -> None:
    place = next(i for i, tensor in enumerate(proto.graph.initializer) if tensor.name == name)
    del proto.graph.initializer[place]


def _prepend_(proto: Any, nodes: Sequence[Any]) -> None:
    """Put operations that read initialisers only before all others."""
    (onnx,) = require("onnx")
    rest = [onnx.NodeProto.FromString(node.SerializeToString()) for node in proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend([*nodes, *rest])


def _sort_(proto: Any, added: Sequence[Any]) -> None:
    """Sort operations topologically, in place."""
    (onnx,) = require("onnx")
    waiting = [onnx.NodeProto.FromString(node.SerializeToString()) for node in (*added, *proto.graph.node)]
    known = {t.name for t in proto.graph.initializer} | {entry.name for entry in proto.graph.input} | {""}
    del proto.graph.node[:]
    while waiting:
        ready = [node for node in waiting if all(value in known for value in node.input)]
        known.update(value for node in ready for value in node.output)
        proto.graph.node.extend(ready)
        waiting = [node for node in waiting if not all(value in known for value in node.output)]
