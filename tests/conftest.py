"""One thread, one seed and a silent progress bar for every test, and few examples of each property."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("short", max_examples=30, deadline=None)
settings.load_profile("short")


@pytest.fixture(autouse=True)
def repeatable(monkeypatch):
    monkeypatch.setenv("BAYESLIM_PROGRESS", "0")
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
