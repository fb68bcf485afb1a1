"""One thread, one seed and a silent progress bar for every test."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def repeatable(monkeypatch):
    monkeypatch.setenv("BAYESLIM_PROGRESS", "0")
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
