"""The page of the gallery: every picture is computed and drawn when the site is built, light and dark."""

from __future__ import annotations

from pathlib import Path

from rst import as_rst_lines

from bayeslim.app.style import THEMES
from bayeslim.gallery import PICTURES, Picture, load_picture, save_picture

INTRO = (
    "The ideas behind the library, each drawn from a short file that you can open below its picture. "
    "``bayeslim gallery`` draws them on your machine, ``bayeslim gallery conditioning`` one of them."
)


def write(folder: Path) -> str:
    """Draw all pictures into `folder`, beside the page, and return the page's text."""
    title = "Gallery"
    parts = [title, "=" * len(title), "", INTRO, ""]
    for name in PICTURES:
        picture = load_picture(name)
        save_picture(picture, folder, list(THEMES.values()))
        parts += _section(picture, folder.name)
    return "\n".join(parts)


def _section(picture: Picture, folder: str) -> list[str]:
    ending = "svg" if picture.draw_frames is None else "gif"
    lines = [picture.title, "-" * len(picture.title), ""]
    for theme in THEMES:
        lines += [
            f".. image:: {folder}/{picture.name}_{theme}.{ending}",
            f"   :class: only-{theme}",
            f"   :alt: {picture.title}",
            "",
        ]
    path = f"src/bayeslim/gallery/{picture.name}.py"
    lines += [*as_rst_lines(picture.about.splitlines()), ""]
    lines += _raw(f"<details><summary>The code, <code>{path}</code></summary>")
    lines += [f".. literalinclude:: ../{path}", "   :language: python", ""]
    return lines + _raw("</details>")


def _raw(html: str) -> list[str]:
    return [".. raw:: html", "", f"   {html}", ""]
