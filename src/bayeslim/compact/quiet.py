"""The exporters one thread at a time, without notices about PyTorch's own internals."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

_LEVELS = dict.fromkeys(
    ("torch.onnx", "torch.onnx._internal.exporter._registration", "onnxscript", "onnx_ir", "torch.export"),
    logging.ERROR,
) | {"torch._subclasses.fake_tensor": logging.CRITICAL}  # it logs errors that it also raises

_ONE_THREAD = threading.RLock()
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def one_thread_at_a_time(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a function run in one thread at a time.

    Threads wait for each other in all decorated functions, and in `quiet`.

    PyTorch traces with state that all threads share: two traces at once fail, or record each other's operations.
    """

    @wraps(function)
    def alone(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with _ONE_THREAD:
            return function(*args, **kwargs)

    return alone


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress deprecation warnings and notices, in one thread at a time."""
    loggers = {logging.getLogger(name): level for name, level in _LEVELS.items()}
    with _ONE_THREAD:
        levels = [logger.level for logger in loggers]
        try:
            for logger, level in loggers.items():
                logger.setLevel(level)
            with warnings.catch_warnings():
                for category in (DeprecationWarning, FutureWarning):
                    warnings.simplefilter("ignore", category)
                own = r"(torch|onnxscript|onnx_ir|onnxruntime)\b"
                warnings.filterwarnings("ignore", category=UserWarning, module=own)
                warnings.filterwarnings("ignore", r"(?s)The tensor attributes? .* assigned during export", UserWarning)
                yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
