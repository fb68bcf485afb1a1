"""The page: one HTML file without scripts or links, which looks the same without a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bayeslim.app.report.figure import Figure, Table
from bayeslim.app.report.files import FileUse
from bayeslim.app.style import DARK, LIGHT
from bayeslim.errors import MissingExtra

if TYPE_CHECKING:
    import jinja2


@dataclass(frozen=True)
class Page:
    """The content of a report.

    Attributes:
        title: its heading.
        lead: a sentence on the run.
        highlights: the most important numbers, as (value, words).
        summary: headings with a few sentences each, for readers in a hurry.
        overview: the networks side by side; None if nothing was measured.
        figures: in reading order.
        files: the files of the run, and how to use them.
        plan: the plan, as text.
        notes: parts that were left out, and why.
        colophon: the versions used.
    """

    title: str
    lead: str
    highlights: Sequence[tuple[str, str]]
    summary: Sequence[tuple[str, str]]
    overview: Table | None
    figures: Sequence[Figure]
    files: Sequence[FileUse]
    plan: str
    notes: Sequence[str]
    colophon: str


def environment() -> jinja2.Environment:
    """Build the environment of the page's template.

    Raises:
        MissingExtra: if jinja2 is not installed.
    """
    try:
        import jinja2
    except ModuleNotFoundError:
        raise MissingExtra("jinja2", "report", "The report") from None
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def render(page: Page) -> str:
    """Render the page as HTML."""
    return environment().get_template("page.html.jinja").render(page=page, light=LIGHT, dark=DARK)
