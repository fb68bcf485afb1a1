"""The pages of the methods: every public method has notes, and its example runs."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import bayeslim as bl

NOTES = tomllib.loads((Path(__file__).parents[2] / "docs" / "method_notes.toml").read_text())
METHODS = [
    name
    for name in bl.__all__
    if inspect.isclass(getattr(bl, name)) and issubclass(getattr(bl, name), bl.Method) and name != "Method"
]


def test_every_method_has_notes():
    assert set(METHODS) == set(NOTES)
    for notes in NOTES.values():
        assert notes.keys() == {"when", "cost", "trouble", "example"}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("default::bayeslim.errors.BayeslimWarning")
def test_the_example_of_a_method_runs(name):
    x = torch.randn(24, 16)
    y = x[:, :3].argmax(1)
    images = x.reshape(24, 1, 4, 4)
    scope = {
        "bl": bl,
        "x": x,
        "images": images,
        "loader": bl.data.Loader(x, y, 8),
        "image_loader": bl.data.Loader(images, y, 8),
        "model": nn.Sequential(nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3)),
        "with_dropout": nn.Sequential(nn.Linear(16, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3)),
        "with_batch_norm": nn.Sequential(nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)),
        "of_images": nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
    }
    exec(compile(NOTES[name]["example"], f"the example of {name}", "exec"), scope)
    assert scope["prediction"].probs.shape == (24, 3)
