"""Compression: from a network and data to a smaller network, files to deploy, and a report."""

from __future__ import annotations

from bayeslim.app.compress.pipeline import compress
from bayeslim.app.compress.result import Compressed

__all__ = ["Compressed", "compress"]
