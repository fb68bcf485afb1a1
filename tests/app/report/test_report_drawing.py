"""Drawings, axes and bitmaps."""

from __future__ import annotations

import base64
import struct
import xml.etree.ElementTree as ET
import zlib

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from bayeslim.app.report.axes import Frame, Scale, even_ticks, log_ticks, sparsity_ticks, weights_gone
from bayeslim.app.report.images import photograph, png, shade, shrunk
from bayeslim.app.report.svg import Drawing


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


def test_a_drawing_is_well_formed_and_speaks():
    drawing = Drawing(100, 50, "A <title>", 'What "it" shows & says')
    drawing.text((1.0, 2.0), "a < b", anchor="end", turned=True)
    drawing.line((0, 0), (1.123456, 2), "axis")
    drawing.rect((0, 0), (0, 3), "area")
    root = ET.fromstring(drawing.render())
    title, words, text, line = root
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == f"{title.get('id')} {words.get('id')}"
    assert (title.text, words.text, text.text) == ("A <title>", 'What "it" shows & says', "a < b")
    assert line.get("x2") == "1.12"
    assert Drawing(1, 1, "", "").render() != Drawing(1, 1, "", "").render(), "every drawing has names of its own"


def test_a_legend_wraps_and_says_how_high_it_is():
    drawing = Drawing(200, 100, "", "")
    low = drawing.legend([("curve s0", "one")], (0, 0), 200)
    high = drawing.legend(
        [("curve s0", "a long name here"), ("area s1", "another long name"), ("mark", "x")], (0, 0), 200
    )
    assert high > low
    places = [float(e.get("x")) for e in ET.fromstring(drawing.render()) if e.tag == "text"]
    assert max(places) < 200


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e3))
def test_ticks_are_few_even_and_inside(low, extent):
    ticks = even_ticks(low, low + extent)
    assert 1 <= len(ticks) <= 12
    assert all(low - 1e-6 <= tick <= low + extent + 1e-6 for tick in ticks)
    gaps = np.diff(ticks)
    assert np.allclose(gaps, gaps[:1], rtol=1e-6)


@given(st.floats(1e-9, 1e3), st.floats(1.5, 1e12))
def test_logarithmic_ticks_are_inside_and_not_many(low, factor):
    ticks = log_ticks(low, low * factor)
    assert len(ticks) <= 16
    assert all(low * 0.99 <= tick <= low * factor * 1.01 for tick in ticks)


def test_a_scale_maps_ends_to_ends_and_keeps_what_is_outside_in():
    scale = Scale(1, 100, 300, 100, np.log10)
    assert [scale(v) for v in (1, 10, 100, 1000, 0.1)] == pytest.approx([300, 200, 100, 100, 300])
    assert Scale(2, 2, 0, 10)(2) == 0


def test_halving_what_is_left_is_one_step_on_the_sparsity_axis():
    scale = Scale(0, 0.99, 0, 1, weights_gone)
    assert scale(0.75) - scale(0.5) == pytest.approx(scale(0.5) - scale(0.0))
    assert [words for _, words in sparsity_ticks(0.95)] == ["0 %", "50 %", "75 %", "90 %", "95 %"]


def test_words_stand_on_the_roomier_side_of_a_line():
    for value, anchor in ((1, "start"), (9, "end")):
        drawing = Drawing(100, 100, "", "")
        Frame(drawing, Scale(0, 10, 0, 100), Scale(0, 1, 90, 10)).vertical(value, "here")
        text = next(e for e in ET.fromstring(drawing.render()) if e.tag == "text")
        assert text.get("text-anchor") == anchor


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
