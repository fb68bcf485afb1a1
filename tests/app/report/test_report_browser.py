"""The report in a real browser: light, dark, at the width of a phone, and printed."""

from __future__ import annotations

import re

import pytest
from report_cases import laplace

import bayeslim as bl
from browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

PHONE, DESK = 390, 1280
TOO_WIDE = """[...document.querySelectorAll("main *")].filter(e => {
  const box = e.getBoundingClientRect();
  return box.right > innerWidth + 1 && !e.closest(".scroll, pre, svg, caption");
}).map(e => e.outerHTML.slice(0, 80))"""
OUTSIDE = """[...document.querySelectorAll("svg text")].filter(e => {
  const a = e.getBoundingClientRect(), b = e.closest("figure").getBoundingClientRect();
  return a.left < b.left - 1 || a.right > b.right + 1;
}).map(e => e.textContent)"""
COLOUR = 'getComputedStyle(document.querySelector("{0}")).{1}'


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    case = laplace("unit")
    timed = bl.benchmark(
        case.bnn.mean_network(), case.slim, example=case.example, runtimes=["eager"], rounds=2, batch_sizes=(1,)
    )
    path = tmp_path_factory.mktemp("report") / "report.html"
    files = ["slim", "slim.onnx", "slim.c", "pruned", "benchmark.json"]
    return bl.report(case.bnn, case.pruned, case.slim, path, validate=case.held_out, benchmark=timed, files=files)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


def luminance(colour: str) -> float:
    red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_it_fits_the_window_and_text_stands_out(browser, page, width, scheme):
    browser.open(page, width, scheme)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(TOO_WIDE) == []
    assert browser.evaluate(OUTSIDE) == []
    ground = luminance(browser.evaluate(COLOUR.format("body", "backgroundColor")))
    assert (ground > 200) == (scheme == "light")
    for what, style in (("main p", "color"), ("svg text", "fill"), ("figcaption p", "color"), ("pre", "color")):
        assert abs(luminance(browser.evaluate(COLOUR.format(what, style))) - ground) > 80, what
    assert browser.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")


def test_nothing_is_fetched_and_nothing_fails(browser, page):
    browser.open(page, DESK, "light")
    sent = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert all(url == page.resolve().as_uri() or url.startswith("data:") for url in sent), sent
    assert not [e for e in browser.events if e["method"] in ("Runtime.exceptionThrown", "Network.loadingFailed")]


def test_figures_are_drawn_and_numbers_open(browser, page):
    browser.open(page, DESK, "light")
    boxes = browser.evaluate('[...document.querySelectorAll("figure svg")].map(e => e.getBoundingClientRect().height)')
    assert len(boxes) >= 6
    assert min(boxes) > 60
    height = "document.querySelector('figure').getBoundingClientRect().height"
    closed = browser.evaluate(height)
    browser.evaluate("document.querySelector('details').open = true")
    assert browser.evaluate(height) > closed + 50


def test_it_prints_on_light_paper_without_empty_pages(browser, page):
    browser.open(page, DESK, "dark")
    printed = browser.print()
    assert printed.startswith(b"%PDF")
    pages = len(re.findall(rb"/Type\s*/Page\b", printed))
    assert 2 <= pages <= 10
    browser.call(
        "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    ink = browser.evaluate(COLOUR.format("main p", "color"))
    text = browser.evaluate(COLOUR.format("svg text", "fill"))
    browser.call("Emulation.setEmulatedMedia", media="")
    assert luminance(ink) < 130, "a dark screen does not make pale ink"
    assert luminance(text) < 130
