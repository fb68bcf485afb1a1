"""Export to ONNX, with a dynamic batch size, checked in onnxruntime.

The file holds the graph and the weights only: the exporter's notes on source code are removed. Initialisers with zeros
can be stored sparsely (ONNX's `sparse_initializer`: values and their indices, smaller below a third of non-zeros).
onnxruntime reads them exactly but computes on them densely: the file shrinks and the latency stays.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from bayeslim.compact.example import run_example, tensors_in
from bayeslim.compact.program import exported, first_line
from bayeslim.compact.quiet import quiet
from bayeslim.compact.recurrence import RECURRENT
from bayeslim.errors import BayeslimError, MissingExtra, UnsupportedModel
from bayeslim.export.check import prove
from bayeslim.types import Inputs

_INDEX_BYTES = 8


def to_onnx(
    network: nn.Module,
    inputs: Sequence[Inputs],
    tolerance: float,
    outputs: Sequence[str] | None = None,
    *,
    sparse: bool = False,
    int8: bool = False,
) -> tuple[bytes, float]:
    """Encode a network as ONNX; return the content and its largest difference.

    The tolerance does not apply to int8: weights in 8 bits, activations quantised dynamically.
    """
    require("onnx", "onnxscript", "onnxruntime")
    others = sorted({str(p.dtype) for p in network.parameters() if p.dtype != torch.float32})
    if int8 and others:
        raise UnsupportedModel(f"int8 needs weights in float32, and some are in {others[0]}. Call network.float().")
    proto = traced(network, inputs, outputs)
    if sparse:
        make_sparse_(proto)
    content = serialised(proto)
    gap = prove(network, Session(content), inputs, "ONNX", tolerance)
    if int8:
        content = quantised(proto)
        gap = prove(network, Session(content), inputs, "int8 ONNX", float("inf"))
    return content, gap


def traced(network: nn.Module, inputs: Sequence[Inputs], outputs: Sequence[str] | None = None) -> Any:
    """Trace a network to an `onnx.ModelProto` of graph and weights only."""
    require("onnx", "onnxscript")
    if outputs is None and isinstance(run_example(network, inputs[0]), Tensor):
        outputs = ("output",)
    table = _translations()
    program = exported(network, inputs)
    if any(node.target is torch.ops.bayeslim.pack.default for node in program.graph.nodes):
        raise UnsupportedModel(
            f"{type(network).__name__} packs its sequences, and ONNX has no packed sequences. Export it as a PyTorch "
            "program (.pt2), or let its forward work on padded sequences."
        )
    if any(node.target in RECURRENT and node.target not in table for node in program.graph.nodes):
        program = exported(network, inputs, unrolled=True)
    with quiet():
        try:
            if any(_is_replaced(node) for node in program.graph.nodes):  # this takes as long as tracing
                program = program.run_decompositions(_REPLACED)
            converted = torch.onnx.export(program, dynamo=True, verbose=False, custom_translation_table=table)
        except Exception as error:
            raise UnsupportedModel(
                f"{type(network).__name__} cannot be exported to ONNX: {first_line(error.__cause__ or error)}"
            ) from error
        assert converted is not None
        if outputs is not None:
            _name_outputs(converted.model.graph, outputs)
        proto = converted.model_proto
    graph = proto.graph
    for part in (proto, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]
    del graph.value_info[:]
    return proto


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return onnxscript's translations of recurrent layers."""
    (core,) = require("onnxscript.function_libs.torch_lib.ops.core")
    ops = torch.ops.bayeslim
    found = {ops.lstm.default: getattr(core, "aten_lstm", None), ops.gru.default: getattr(core, "aten_gru", None)}
    return {op: translation for op, translation in found.items() if translation is not None}


def _name_outputs(graph: Any, names: Sequence[str]) -> None:
    """Name the outputs of a graph; rename inner values that have these names."""
    for node in graph:
        for value in node.outputs:
            if value.name in names:
                value.name = f"{value.name}_inside"
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = name


def _entropy(probs: Tensor) -> Tensor:
    """Compute −p log p; torch 2.11 cannot trace its own decomposition."""
    return torch.where(probs == 0, torch.zeros_like(probs), -probs * probs.log())


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *args: Any, **options: Any
) -> Any:
    """Add the dimension of heads, which the exporter requires, to attention."""
    if not _lacks_heads(query, options):
        return NotImplemented
    mask = mask.unsqueeze(1) if mask is not None and mask.ndim == 3 else mask
    heads = (tensor.unsqueeze(1) for tensor in (query, key, value))
    return torch.ops.aten.scaled_dot_product_attention.default(*heads, mask, *args, **options).squeeze(1)


def _lacks_heads(query: Tensor, options: Mapping[str, Any]) -> bool:
    return query.ndim == 3 and not options.get("enable_gqa")


def _is_replaced(node: fx.Node) -> bool:
    """Return whether a node is an operation that the exporter does not translate."""
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        query: Any = node.args[0]
        return _lacks_heads(query.meta["val"], node.kwargs)
    return node.target in _REPLACED


_REPLACED = {
    torch.ops.aten.special_entr.default: _entropy,
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
}
"""Decompositions of operations that the exporter does not translate."""


def serialised(proto: Any) -> bytes:
    """Serialise a model; the limit of ONNX is 2 GiB."""
    try:
        content: bytes = proto.SerializeToString()
    except Exception as error:
        raise BayeslimError(
            f"The network does not fit into one ONNX file: {first_line(error)} Export a .pt2."
        ) from error
    return content


class Session:
    """An ONNX file in onnxruntime, on the CPU, with PyTorch's number of threads."""

    def __init__(self, content: bytes):
        (runtime,) = require("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
        options.log_severity_level = 4  # errors are raised and need no log
        try:
            self._session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise UnsupportedModel(
                f"onnxruntime cannot run this network: {first_line(error)} Call network.float() if its weights have "
                "another dtype, or export it as a PyTorch program (.pt2)."
            ) from error
        self._names = [entry.name for entry in self._session.get_inputs()]

    def bind(self, example: Inputs) -> Callable[[], list[np.ndarray]]:
        """Return a function that runs the file on inputs in the network's format."""
        feed = dict(zip(self._names, (x.numpy() for x in tensors_in(example)), strict=True))
        run: Callable[[Any, Any], list[np.ndarray]] = self._session.run
        return lambda: run(None, feed)

    def __call__(self, example: Inputs) -> list[Tensor]:
        """Run the file on inputs in the network's format."""
        return [torch.from_numpy(output) for output in self.bind(example)()]


def make_sparse_(proto: Any) -> None:
    """Store initialisers sparsely where that is smaller, in place."""
    onnx, helper = require("onnx", "onnx.numpy_helper")
    dense = []
    for tensor in proto.graph.initializer:
        values = helper.to_array(tensor)
        places = np.flatnonzero(values)
        if values.dtype == np.float32 and 0 < places.size * (values.itemsize + _INDEX_BYTES) < values.nbytes:
            kept = helper.from_array(values.ravel()[places], tensor.name)
            indices = helper.from_array(places.astype(np.int64), f"{tensor.name}_places")
            sparse = onnx.helper.make_sparse_tensor(kept, indices, list(values.shape))
            proto.graph.sparse_initializer.append(sparse)
        else:
            dense.append(onnx.TensorProto.FromString(tensor.SerializeToString()))
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(dense)


def quantised(proto: Any) -> bytes:
    """Encode a model in int8: weights in 8 bits, activations dynamically."""
    (quantisation,) = require("onnxruntime.quantization")
    root = logging.getLogger()
    level = root.level
    with tempfile.TemporaryDirectory() as folder, quiet():
        path = Path(folder) / "int8.onnx"
        try:
            root.setLevel(logging.ERROR)  # it advises a preprocessing that torch's exporter has done
            quantisation.quantize_dynamic(proto, path, weight_type=quantisation.QuantType.QInt8)
        finally:
            root.setLevel(level)
        return path.read_bytes()


def require(*modules: str) -> tuple[Any, ...]:
    """Import the modules of an extra, or raise an error that names the extra."""
    found = []
    for module in modules:
        try:
            found.append(importlib.import_module(module))
        except ImportError as error:
            raise MissingExtra(module.partition(".")[0], "onnx", "Export to ONNX") from error
    return tuple(found)
