"""Runs that are interrupted at a chosen call."""

from __future__ import annotations


class Stop(Exception):
    """An interruption of a run."""


def cut_short(monkeypatch, owner: type, name: str, calls: int) -> None:
    """Let a method raise after `calls` calls."""
    original, left = getattr(owner, name), iter(range(calls))

    def counted(*args, **kwargs):
        if next(left, None) is None:
            raise Stop
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
