"""One thread, one seed and a silent progress bar for every test, and few examples of each property."""

from __future__ import annotations

import functools
import gc
import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("short", max_examples=30, deadline=None)
settings.load_profile("short")
gc.disable()  # until all tests are collected: what that makes stays, and looking through it takes a fifth of the time


def pytest_collection_finish():
    gc.freeze()  # what collecting has made is never looked through again, nor at the end
    gc.enable()


def read_translations_once() -> None:
    """Make torch's ONNX exporter read onnxscript's translations once, and no longer in every export.

    It parses the source of five hundred functions, which takes longer than the rest of the export of a small network.
    Every export still gets a registry of its own.
    """
    registration = sys.modules.get("torch.onnx._internal.exporter._registration")
    registry = getattr(registration, "ONNXRegistry", None)
    read = getattr(registry, "from_torchlib", None)
    if read is None or hasattr(read, "__wrapped__"):
        return
    cached = functools.cache(read)

    @functools.wraps(read)
    def from_torchlib(*args, **kwargs):
        whole, own = cached(*args, **kwargs), registry()
        vars(own).update(vars(whole), functions={target: list(found) for target, found in whole.functions.items()})
        return own

    registry.from_torchlib = staticmethod(from_torchlib)


@pytest.fixture(autouse=True)
def repeatable(monkeypatch):
    monkeypatch.setenv("BAYESLIM_PROGRESS", "0")
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    read_translations_once()
