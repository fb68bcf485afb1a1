"""The ideas behind the library as pictures: one file a picture, with its equation and its source.

`bayeslim gallery` draws them; `catalogue` has the table of names.
"""

from __future__ import annotations

from bayeslim.gallery.catalogue import PICTURES, Picture, load_picture, save_picture

__all__ = ["PICTURES", "Picture", "load_picture", "save_picture"]
