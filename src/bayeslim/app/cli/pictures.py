"""The pictures of the gallery, from the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bayeslim.app.style import THEMES
from bayeslim.errors import BayeslimError
from bayeslim.gallery import load_picture, save_picture
from bayeslim.train.progress import progress


def draw_pictures(names: Sequence[str], folder: Path, theme: str) -> Iterator[Path]:
    """Draw pictures in the theme "light", "dark" or "both"; yield each written file."""
    if theme not in (*THEMES, "both"):
        raise BayeslimError(f'theme must be {", ".join(THEMES)} or both. Got "{theme}".')
    themes = list(THEMES.values()) if theme == "both" else [THEMES[theme]]
    pictures = [load_picture(name) for name in names]  # unknown names are refused before the first is drawn
    torch.set_num_threads(1)  # a second thread slows networks of this size down
    for picture in progress(pictures, "drawing", total=len(pictures)):
        yield from save_picture(picture, folder, themes)
