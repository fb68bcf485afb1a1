"""Settings of the site, which `make docs` builds."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import pages  # noqa: E402
import rst  # noqa: E402

from bayeslim import __version__  # noqa: E402

project = "bayeslim"
author = copyright = "The bayeslim authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
default_role = "literal"  # docstrings write code in single backticks
nitpicky = False
exclude_patterns = ["_build", "tutorials/**/*.md5", "tutorials/**/*.json", "tutorials/**/*.ipynb", "pictures"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures keep their annotations in the source; pages stay readable
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes of dataclasses are listed once

html_theme = "pydata_sphinx_theme"
html_title = "bayeslim"
html_theme_options = {
    "navbar_align": "left",
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_sidebars = {  # only folders have pages to list
    "*": [],
    "start/*": [],
    "tutorials/*": ["sidebar-nav-bs"],
    "methods/*": ["sidebar-nav-bs"],
    "api/*": ["sidebar-nav-bs"],
}
html_show_sourcelink = False

sphinx_gallery_conf = {
    "examples_dirs": str(HERE.parent / "examples"),
    "gallery_dirs": "tutorials",
    "filename_pattern": r"\.py$",
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "abort_on_example_error": True,
    "min_reported_time": 3600,
    "write_computation_times": False,
    "within_subsection_order": "FileNameSortKey",
}


def skip_foreign(_app: object, _what: str, _name: str, value: object, _skip: bool, _options: object) -> bool | None:
    """Leave out members that another library put on a class: their docstrings refer to that library's own site."""
    return True if (getattr(value, "__module__", None) or "bayeslim").split(".")[0] == "sklearn" else None


def setup(app: object) -> None:
    """Write the generated pages, and make docstrings readable for Sphinx."""
    pages.write(HERE)
    app.connect("autodoc-skip-member", skip_foreign)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", rst.as_rst, priority=100)  # type: ignore[attr-defined]
