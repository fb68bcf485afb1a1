"""The benchmark of a voice encoder cuts by every rule and goes on where it was; its spectrograms are what they say."""

from __future__ import annotations

import importlib
import io
import json
import math
import sys
import wave
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import bayeslim as bl

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("voice_encoder")


def run(benchmark, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["voice_encoder.py", *map(str, arguments)])
    benchmark.main()


def once_of_each_kind(write):
    """Write the first network with one LSTM and the first with several: the rule of the cut makes no difference."""
    written = set()

    def first(network, path, **options):
        if type(network.lstm) not in written:
            written.add(type(network.lstm))
            write(network, path, **options)

    return first


def test_it_cuts_by_every_rule_and_goes_on(benchmark, tmp_path, monkeypatch):
    torch.manual_seed(0)
    save_file(benchmark.VoiceEncoder(mels=5, width=6, layers=2).state_dict(), tmp_path / benchmark.WEIGHTS)
    parts = {"calibration": 24, "test, en": 4, "test, fr": 4}
    save_file({part: torch.rand(count, 3, 5) for part, count in parts.items()}, tmp_path / benchmark.SPEECH)
    for setting, value in (("WEIGHTS_CUT", (0.5,)), ("UNITS_CUT", (0.2,)), ("BATCH", 8), ("ROUNDS", 1)):
        monkeypatch.setattr(benchmark, setting, value)
    for name in ("save", "export"):
        monkeypatch.setattr(bl, name, once_of_each_kind(getattr(bl, name)))
    arguments = ("cut", "--data", tmp_path, "--results", tmp_path, "--utterances", 16, "--seeds", 2)
    run(benchmark, monkeypatch, *arguments)
    found = json.loads((tmp_path / "voice_encoder.json").read_text())
    cuts = ("50% of weights", "20% of units", "20% of stacked units")
    keys = {f"{cut}, {rule}, seed 0" for cut in cuts for rule in ("magnitude", "diag", "kron")}
    keys |= {f"{cut}, {rule}, seed 1" for cut in cuts[:2] for rule in ("diag", "kron")}
    assert set(found["cells"]) == keys | {"50% of weights, kron in 5 steps, seed 0"}
    for key, cell in found["cells"].items():
        assert all(0 <= cosine <= 1.0001 for cosine in cell["cosine"].values())
        if "units" in key:
            assert cell["parameters"] < found["settings"]["parameters"]
            assert {"fit", "compact", "save", "export"} <= set(cell["cpu_seconds"])
    monkeypatch.setattr(benchmark.Trial, "cell", lambda *_: pytest.fail("a finished cell was computed again"))
    run(benchmark, monkeypatch, *arguments)


def test_it_prepares_weights_and_sounds(benchmark, tmp_path, monkeypatch):
    stored = io.BytesIO()
    torch.save({"model_state": benchmark.VoiceEncoder().state_dict()}, stored)
    with zipfile.ZipFile(tmp_path / "wheel.whl", "w") as wheel:
        wheel.writestr("resemblyzer/pretrained.pt", stored.getvalue())
    seconds = torch.arange(4 * 8000) / 8000
    tone = (8000 * torch.sin(2 * math.pi * 1000 * seconds)).to(torch.int16)
    tone[8000:24000] = 0  # with two of its four seconds, 160 frames fit twice; without them once
    for language in ("en_US", "fr_CA"):
        (tmp_path / "sounds" / language / "silence").mkdir(parents=True)
        for name in ("a", "b", "c", "d", "e", "f", "g", "h", "silence/1"):
            with wave.open(str(tmp_path / "sounds" / language / f"{name}.wav"), "wb") as file:
                file.setparams((1, 2, 8000, 0, "NONE", "NONE"))
                file.writeframes(tone.numpy().tobytes())
    run(
        benchmark, monkeypatch, "prepare", "--wheel", tmp_path / "wheel.whl", "--sounds", tmp_path / "sounds", "--to",
        tmp_path / "data",
    )  # fmt: skip
    speech = load_file(tmp_path / "data" / benchmark.SPEECH)
    assert {part: len(frames) for part, frames in speech.items()}["test, fr"] == 8
    assert sum(len(frames) for frames in speech.values()) == 16
    frame = speech["test, fr"][0, 40]
    assert int(frame.argmax()) == 13  # 1 kHz is 15 mels, 13.6 of 41 steps to the 45.2 mels of 8 kHz
    assert benchmark.dense(tmp_path / "data")(speech["test, fr"]).norm(dim=1).allclose(torch.ones(8))
