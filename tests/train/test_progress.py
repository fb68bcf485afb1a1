"""The progress bar: what it shows, where, and when it keeps silent."""

from __future__ import annotations

import io
import itertools

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.train import progress as module
from bayeslim.train.progress import progress, showing


class Screen(io.StringIO):
    def __init__(self, terminal: bool):
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `clock.append(seconds)` moves."""
    passed = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: sum(passed))
    return passed


def screen(monkeypatch, terminal: bool) -> Screen:
    out = Screen(terminal)
    monkeypatch.setattr(module.sys, "stderr", out)
    monkeypatch.delenv("BAYESLIM_PROGRESS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return out


def test_a_terminal_gets_one_line_redrawn(monkeypatch, clock):
    out = screen(monkeypatch, terminal=True)
    bar = progress(range(4), "epoch 1/2")
    for i in bar:
        bar.show(nll=1 / (i + 3), state="warm")
        clock.append(1.0)
    text = out.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    drawings = text.rstrip("\n").split("\r")[1:]
    assert drawings[1] == "epoch 1/2 ##########.......... 2/4  1/s  0:02  0:02 left  nll 0.25  state warm\x1b[K"
    assert drawings[-1].startswith("epoch 1/2 #################### 4/4  1/s  0:04  nll 0.1667")


def test_it_redraws_no_more_often_than_it_must(monkeypatch, clock):
    out = screen(monkeypatch, terminal=True)
    for _ in progress(range(1000)):
        clock.append(0.001)
    assert out.getvalue().count("\r") <= 1.0 / module.REDRAW_SECONDS + 1


def test_a_narrow_terminal_is_never_wrapped(monkeypatch, clock):
    out = screen(monkeypatch, terminal=True)
    monkeypatch.setenv("COLUMNS", "30")
    list(progress(range(3), "a rather long description of what is going on"))
    assert all(len(d.removesuffix("\n").removesuffix("\x1b[K")) < 30 for d in out.getvalue().split("\r"))


def test_a_log_gets_a_plain_line_every_few_seconds_and_at_the_end(monkeypatch, clock):
    out = screen(monkeypatch, terminal=False)
    for _ in progress(range(100), "fit"):
        clock.append(0.125)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("fit ########............ 40/100  8/s  0:05  0:08 left")
    assert lines[-1].startswith("fit #################### 100/100")
    assert "\r" not in out.getvalue()


def test_a_log_has_its_end_once(monkeypatch, clock):
    out = screen(monkeypatch, terminal=False)
    for _ in progress(range(2), "fit"):
        clock.append(10.0)
    assert [line.split("  ")[0].split()[-1] for line in out.getvalue().splitlines()] == ["1/2", "2/2"]


def test_without_a_total_it_counts(monkeypatch, clock):
    out = screen(monkeypatch, terminal=False)
    for i in progress(itertools.count(), "steps"):
        if i == 2:
            break
    assert out.getvalue().startswith("steps 2  ")


def test_moved_by_hand_in_bytes(monkeypatch, clock):
    out = screen(monkeypatch, terminal=False)
    with progress(description="file", total=40_000_000, unit="B") as bar:
        clock.append(2.0)
        bar.advance(20_000_000)
    assert out.getvalue() == "file ##########.......... 20M/40MB  10MB/s  0:02  0:02 left\n"


def test_it_ends_its_line_when_the_loop_fails(monkeypatch, clock):
    out = screen(monkeypatch, terminal=True)

    def failing():
        yield 1
        raise RuntimeError

    with pytest.raises(RuntimeError):
        list(progress(failing()))
    assert out.getvalue().endswith("\n")


def test_silence(monkeypatch, clock):
    out = screen(monkeypatch, terminal=True)
    assert list(progress([1, 2], enabled=False)) == [1, 2]
    monkeypatch.setenv("BAYESLIM_PROGRESS", "0")
    assert list(progress([1, 2])) == [1, 2]
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (12345, "12345"), (123456, "123k"), (1.5, "1.5"), (2345.6, "2346"), (2e9, "2G")]
)
def test_numbers_are_short(number, text):
    assert module._short(number) == text


def test_long_times_have_hours():
    assert module._clock(3 * 3600 + 62) == "3:01:02"
    assert module._clock(59.6) == "1:00"


def test_showing_turns_the_bars_inside_off_and_on(monkeypatch):
    out = screen(monkeypatch, terminal=False)
    with showing(False):
        list(progress([1, 2], "inside"))
        with showing(True):
            list(progress([1, 2], "deeper"))
    assert not out.getvalue()
    list(progress([1, 2], "outside"))
    assert "outside" in out.getvalue()


def test_prune_and_log_evidence_show_progress_unless_told_not_to(monkeypatch):
    x = torch.randn(20, 3)
    batches = [(x, (x[:, 0] > 0).long())]
    network = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    bnn = bl.bayesianize(network, bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=20)
    out = screen(monkeypatch, terminal=False)
    bl.prune(bnn, bl.Budget(sparsity=0.5), steps=2, progress=False)
    bl.log_evidence(bnn, batches, 2, progress=False)
    assert not out.getvalue()
    bl.prune(bnn, bl.Budget(sparsity=0.5), steps=2)
    assert "pruning" in out.getvalue()
    before = out.getvalue()
    bl.log_evidence(bnn, batches, 2)
    assert out.getvalue() != before
