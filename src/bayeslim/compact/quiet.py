"""Silence for the exporters' notices about PyTorch's own internals."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("torch.onnx", "torch.onnx._internal.exporter._registration", "onnxscript", "onnx_ir", "torch.export")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the exporters' deprecation warnings and notices."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|onnxscript|onnx_ir|onnxruntime)\b")
            warnings.filterwarnings("ignore", r"(?s)The tensor attributes? .* assigned during export", UserWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
