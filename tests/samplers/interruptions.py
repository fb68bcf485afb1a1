"""Runs that are cut short at a chosen moment."""

from __future__ import annotations


class Stop(Exception):
    """What cuts a run short."""


def cut_short(monkeypatch, owner: type, name: str, calls: int) -> None:
    """Let a method raise once it has been called so many times."""
    original, left = getattr(owner, name), iter(range(calls))

    def counted(*args, **kwargs):
        if next(left, None) is None:
            raise Stop
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
