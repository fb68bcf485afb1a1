"""Plots and bitmaps inside the page."""

from __future__ import annotations

import base64
import re
import struct
import sys
import xml.etree.ElementTree as ET
import zlib

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from bayeslim.app.report.images import photograph, png, shade, shrunk
from bayeslim.app.report.plot import VARIABLES, plotted
from bayeslim.app.style import LIGHT


def pixels_of(source: str) -> np.ndarray:
    """Decode a PNG of ours with nothing but its definition."""
    data = base64.b64decode(source.removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(data):
        length, kind = struct.unpack(">I4s", data[place : place + 8])
        content = data[place + 8 : place + 8 + length]
        (checksum,) = struct.unpack(">I", data[place + 8 + length : place + 12 + length])
        assert checksum == zlib.crc32(kind + content)
        chunks[kind] = content
        place += 12 + length
    width, height, depth, colour, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, colour) == (8, 6)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 4 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 4)


def test_a_plot_is_well_formed_and_speaks():
    def draw(plot):
        ax = plot.subplots()
        ax.plot([0, 1], [0, 1], color="C1", label="a < b")
        ax.legend()

    root = ET.fromstring(plotted("A <title>", 'What "it" shows & says', 2.0, draw))
    title, words = root[:2]
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == f"{title.get('id')} {words.get('id')}"
    assert (title.text, words.text) == ("A <title>", 'What "it" shows & says')
    assert "a < b" in [e.text for e in root.iter("text")], "text stays text"


def test_plots_take_their_colours_from_the_page_and_share_no_names():
    def draw(plot):
        ax = plot.subplots()
        for place in range(len(LIGHT.colours)):
            ax.bar(place, 1, color=f"C{place}")
        ax.imshow(np.eye(3), cmap="gray")

    one, two = (plotted("", "", 2.0, draw) for _ in range(2))
    for place in range(len(LIGHT.colours)):
        assert f"var(--s{place})" in one
    assert "var(--ink)" in one
    assert not set(re.findall(r"#[0-9a-fA-F]{6}", one)) & set(VARIABLES), "no colour of the light theme is left"
    names = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (one, two)]
    assert names[0]
    assert not names[0] & names[1]
    for svg, own in zip((one, two), names, strict=True):
        assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', svg)) <= own
    assert "http" not in one


def test_without_matplotlib_there_is_no_plot(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plotted("title", "words", 2.0, lambda plot: None) == ""


@given(st.integers(1, 9), st.integers(1, 9))
def test_bitmaps_hold_their_pixels(height, width):
    wanted = torch.randint(0, 256, (height, width, 4), generator=torch.Generator().manual_seed(height)).to(torch.uint8)
    assert (pixels_of(png(wanted)) == wanted.numpy()).all()


def test_shades_are_opacity_and_photographs_use_their_range():
    assert pixels_of(shade(torch.tensor([[0.0, 0.5, 1.0]])))[0, :, 3].tolist() == [0, 128, 255]
    grey = pixels_of(photograph(torch.tensor([[[2.0, 4.0], [3.0, 2.0]]])))
    assert grey[..., 0].tolist() == [[0, 255], [128, 0]]
    assert (grey[..., 3] == 255).all()
    assert pixels_of(photograph(torch.zeros(3, 2, 2)))[..., :3].max() == 0


def test_what_is_no_bitmap_is_refused():
    with pytest.raises(ValueError, match=r"\(H, W, 4\)"):
        png(torch.zeros(2, 2, 3, dtype=torch.uint8))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12))
def test_shrinking_keeps_means(rows, columns, most):
    matrix = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows))
    small = shrunk(matrix, most)
    assert max(small.shape) <= most
    tall, wide = -(-rows // most), -(-columns // most)
    assert float(small[0, 0]) == pytest.approx(float(matrix[:tall, :wide].mean()), rel=1e-5)
