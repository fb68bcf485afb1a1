"""The state PyTorch has to be in to trace a network: silent about its own internals, attention in its plain form."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TALKERS = ("torch.onnx", "torch.onnx._internal.exporter._registration", "onnxscript", "onnx_ir", "torch.export")


@contextmanager
def plain_attention() -> Iterator[None]:
    """Without the fused kernel of attention, which no exporter reads.

    That kernel also returns zeros at padded positions of `nn.TransformerEncoder`; the plain form, as in training, and
    an exported file do not.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the exporters' deprecations and notices, which are not for the user to hear."""
    loggers = [logging.getLogger(name) for name in _TALKERS]
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
