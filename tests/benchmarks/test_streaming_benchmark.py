"""The benchmark of cuts block by block: its decoder, its growth, and its resuming."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def streaming(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("streaming")


def test_the_decoder_is_causal_and_knows_positions(streaming):
    torch.manual_seed(0)
    model = streaming.Decoder(streaming.Shape(width=16, hidden=24, heads=4, groups=2, blocks=2, words=9))
    words = torch.tensor([[1, 2, 3, 4, 5]])
    changed = words.clone()
    changed[0, 3] = 7
    with torch.no_grad():
        first, second = model(words), model(changed)
        repeated = model(torch.full((1, 5), 2))
    torch.testing.assert_close(first[:, :3], second[:, :3])
    assert not torch.allclose(first[:, 3:], second[:, 3:])
    torch.testing.assert_close(repeated[:, 0], repeated[:, 4])  # equal words attend to themselves alike
    assert not torch.allclose(first[:, 1], model(words[:, [1, 0, 2, 3, 4]])[:, 0])


def test_exponents_are_those_of_power_laws(streaming):
    assert streaming.exponent([(2.0, 3 * 2.0**2.5), (4.0, 3 * 4.0**2.5), (8.0, 3 * 8.0**2.5)]) == pytest.approx(2.5)
    cells = {f"width {n}, local": {"seconds": n**3} for n in (2, 4)} | {"1B, local": {"seconds": 1}}
    assert streaming.growth(cells) == {"seconds over width, local": 3.0}


def test_cells_that_are_there_are_not_measured_again(streaming, tmp_path, monkeypatch):
    measured = []

    def cell(name):
        return lambda: measured.append(name) or {"seconds": 1.0}

    monkeypatch.setattr(streaming, "RESULTS", tmp_path)
    monkeypatch.setattr(streaming, "cells", lambda _: {name: cell(name) for name in ("a", "b")})
    plain = streaming.save
    monkeypatch.setattr(streaming, "save", lambda *args: plain(*args, folder=tmp_path))
    for options in (["--only", "a"], [], []):
        monkeypatch.setattr(sys, "argv", ["streaming.py", *options])
        streaming.main()
    assert measured == ["a", "b"]
    assert json.loads((tmp_path / "streaming.json").read_text())["results"]["b"]["seconds"] == 1.0
