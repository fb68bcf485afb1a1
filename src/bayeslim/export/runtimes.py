"""Runtimes on this machine: a network prepared for each, to be timed on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from bayeslim.compact.example import tensors_in
from bayeslim.export import onnx
from bayeslim.export.c.library import CNetwork, find_compiler
from bayeslim.export.c.write import compiled
from bayeslim.types import Inputs, arguments

RUNTIMES = ("eager", "compile", "onnxruntime", "onnxruntime-int8", "C")
"""Eager PyTorch, compiled PyTorch, onnxruntime in float32 and in 8 bits, and C on one thread."""


@dataclass(frozen=True)
class Contender:
    """A network in a runtime.

    Attributes:
        bind: returns, for inputs, a function that runs the network on them.
        file_bytes: the size of the runtime's file, if it has one.
    """

    bind: Callable[[Inputs], Callable[[], Any]] = field(repr=False)
    file_bytes: int | None = None


def available() -> tuple[str, ...]:
    """List the installed runtimes that are quick to prepare: all but "compile"."""
    installed = all(find_spec(package) for package in ("onnx", "onnxscript", "onnxruntime"))
    compiler = ("C",) if find_compiler() is not None else ()
    return ("eager", *(("onnxruntime", "onnxruntime-int8") if installed else ()), *compiler)


class Preparation:
    """A network to be prepared for runtimes, traced for ONNX once."""

    def __init__(self, network: nn.Module, inputs: Sequence[Inputs]):
        self._network, self._inputs = network, inputs

    @cached_property
    def _proto(self) -> Any:
        return onnx.traced(self._network, self._inputs)

    def __call__(self, runtime: str) -> Contender:
        """Prepare the network for one of `RUNTIMES`."""
        if runtime == "eager":
            return Contender(_in_torch(self._network))
        if runtime == "compile":
            return Contender(_in_torch(torch.compile(self._network, dynamic=False)))
        if runtime == "C":
            library, size = compiled(self._network, self._inputs)
            return Contender(_in_c(library), size)
        content = onnx.serialised(self._proto) if runtime == "onnxruntime" else onnx.quantised(self._proto)
        return Contender(onnx.Session(content).bind, len(content))


def _in_c(network: CNetwork) -> Callable[[Inputs], Callable[[], Any]]:
    return lambda example: network.bind(tensors_in(example)[0].contiguous())


def _in_torch(network: Callable[..., Any]) -> Callable[[Inputs], Callable[[], Any]]:
    def bind(example: Inputs) -> Callable[[], Any]:
        args, kwargs = arguments(example)

        def run() -> Any:
            with torch.inference_mode():
                return network(*args, **kwargs)

        return run

    return bind
