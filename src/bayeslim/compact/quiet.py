"""Silence for the exporters' notices about PyTorch's own internals."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LEVELS = dict.fromkeys(
    ("torch.onnx", "torch.onnx._internal.exporter._registration", "onnxscript", "onnx_ir", "torch.export"),
    logging.ERROR,
) | {"torch._subclasses.fake_tensor": logging.CRITICAL}  # it logs errors that it also raises


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the exporters' deprecation warnings and notices."""
    loggers = {logging.getLogger(name): level for name, level in _LEVELS.items()}
    levels = [logger.level for logger in loggers]
    try:
        for logger, level in loggers.items():
            logger.setLevel(level)
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|onnxscript|onnx_ir|onnxruntime)\b")
            warnings.filterwarnings("ignore", r"(?s)The tensor attributes? .* assigned during export", UserWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
