"""The whole job: a network and data in, a smaller network with files, proof and a report out."""

from __future__ import annotations

from bayeslim.app.compress.pipeline import compress
from bayeslim.app.compress.result import Compressed

__all__ = ["Compressed", "compress"]
