"""The table of pictures, and how one is computed, drawn and saved.

A picture is a module of this folder. Its docstring has the title in the first line, then the idea, the equation and the
source. `measure()` computes its numbers with the public names of the library; `draw(found, theme)` makes a figure of
them. An animated picture has `draw_frames(found, theme)` as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayeslim.app.style import LIGHT, Theme, require_matplotlib, styled
from bayeslim.errors import BayeslimError, closest
from bayeslim.io.files import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (
    "prior_confidence",
    "elbo_ascent",
    "two_modes",
    "renyi_family",
    "renyi_bound",
    "laplace_fits",
    "weight_histograms",
    "snr_histogram",
    "pruned_weights",
    "sparse_masks",
    "regression_bands",
    "two_moons",
    "unknown_images",
    "conditioning",
)
"""Names of all pictures, in reading order."""

SECONDS_PER_FRAME = 0.35
SECONDS_OF_LAST_FRAME = 3.0
DOTS_PER_INCH = 110


class UnknownPicture(BayeslimError, ValueError):
    """A picture was asked for that is not in the gallery."""


@dataclass(frozen=True)
class Picture:
    """A picture of the gallery.

    Attributes:
        name: of its module.
        title: a few words.
        about: the idea, the equation and the source, as text.
        measure: computes its numbers.
        draw: makes a figure of the numbers in a theme.
        draw_frames: makes the figures of an animation; None for a picture that stands still.
    """

    name: str
    title: str
    about: str
    measure: Callable[[], Any]
    draw: Callable[[Any, Theme], Figure]
    draw_frames: Callable[[Any, Theme], Iterable[Figure]] | None

    @property
    def source(self) -> Path:
        """The file with its code."""
        return Path(inspect.getfile(self.measure))


def load_picture(name: str) -> Picture:
    """Load a picture of the gallery by its name.

    Raises:
        UnknownPicture: if there is none of this name.
        MissingExtra: if matplotlib is not installed.
    """
    if name not in PICTURES:
        near = closest(name, PICTURES) or ", ".join(PICTURES)
        raise UnknownPicture(f'The gallery has no picture "{name}". Closest names: {near}.')
    require_matplotlib("The gallery")
    module = import_module(f"bayeslim.gallery.{name}")
    title, _, about = (inspect.getdoc(module) or "").partition("\n")
    frames = getattr(module, "draw_frames", None)
    return Picture(name, title.removesuffix("."), about.strip(), module.measure, module.draw, frames)


def save_picture(picture: Picture, folder: Path, themes: Sequence[Theme] = (LIGHT,)) -> list[Path]:
    """Compute a picture once, and save it in every theme: SVG, or GIF if it moves.

    Args:
        picture: from `load_picture`.
        folder: where to write NAME_light.svg and so on.
        themes: of `bayeslim.app.style`.
    """
    found = picture.measure()
    files = []
    for theme in themes:
        with styled(theme):
            if picture.draw_frames is None:
                name, content = f"{picture.name}_{theme.name}.svg", as_svg(picture.draw(found, theme))
            else:
                name = f"{picture.name}_{theme.name}.gif"
                content = as_gif(picture.draw_frames(found, theme), theme)
        write_file(folder / name, content)
        files.append(folder / name)
    return files


def as_svg(figure: Figure) -> bytes:
    """Render a figure as SVG, the same bytes every time."""
    buffer = BytesIO()
    figure.savefig(buffer, format="svg", dpi=DOTS_PER_INCH, metadata={"Date": None})
    return buffer.getvalue()


def as_gif(figures: Iterable[Figure], theme: Theme) -> bytes:
    """Render figures as the frames of an animation that repeats.

    A GIF has no partial transparency, so the frames have the theme's background.
    """
    from PIL import Image

    images = []
    for figure in figures:
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, facecolor=theme.paper)
        images.append(Image.open(buffer).convert("RGB").quantize(128, dither=Image.Dither.NONE))
    durations = [round(1000 * SECONDS_PER_FRAME)] * (len(images) - 1) + [round(1000 * SECONDS_OF_LAST_FRAME)]
    content = BytesIO()
    images[0].save(content, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)
    return content.getvalue()
