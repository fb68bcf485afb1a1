"""The page: self-contained, accessible, complete, and refused where there is nothing to say."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
import torch
from report_cases import laplace, variational
from torch import nn

import bayeslim as bl
from bayeslim.app.benchmark import Size
from bayeslim.app.report.overview import latencies, measure_rows
from bayeslim.app.report.report import highlights

VOID = ("meta", "link", "br", "img", "line", "rect", "circle", "path", "polyline", "image", "use")


class Page(HTMLParser):
    """Elements, links and text of a page, and whether all that is opened is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        found = dict(attributes)
        self.links += [v for k, v in found.items() if k in ("href", "src", "srcset", "action", "data")]
        self.ids += [found["id"]] if "id" in found else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    case = laplace("unit")
    path = tmp_path_factory.mktemp("report") / "sub" / "report.html"
    others = {"magnitude": case.bnn.mean_network()}
    written = bl.report(case.bnn, case.pruned, case.slim, path, validate=case.held_out, others=others)
    assert written == path
    assert [file.name for file in path.parent.iterdir()] == ["report.html"], "no temporary file is left"
    return path.read_text(encoding="utf-8")


def test_nothing_is_fetched(page):
    parsed = Page(page)
    assert not parsed.open
    assert all(link.startswith(("data:", "#plot-")) for link in parsed.links)
    assert not {"script", "iframe", "object", "embed", "form"} & set(parsed.tags)
    assert not re.findall(r"url\((?!#)", page), "only parts of the page itself"
    assert "@import" not in page
    assert "http" not in page


def test_every_figure_has_a_picture_words_and_numbers(page):
    figures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    assert len(figures) >= 8
    for figure in figures:
        if "<img " in figure:
            assert all(len(alt) > 10 for alt in re.findall(r'<img [^>]*alt="([^"]*)"', figure))
        else:
            (svg,) = re.findall(r"<svg.*?</svg>", figure, re.DOTALL)
            root = ET.fromstring(svg)
            assert root.get("role") == "img"
            names = {e.get("id"): e.text for e in root if e.tag in ("title", "desc")}
            assert all(names[name] for name in root.get("aria-labelledby").split())
        assert figure.count("<details>") == 1
        assert "<table>" in figure
        assert "<tbody>\n<tr>" in figure
        assert re.search(r"<figcaption><p>[^<]+</p>", figure)
    parsed = Page(page)
    assert len(parsed.ids) == len(set(parsed.ids))


def test_it_says_what_was_cut_and_what_that_did(page):
    case = laplace("unit")
    words = Page(page).words
    for title in ("Error against sparsity", "Weights left in each layer", "Signal to noise", "Weights", "Reliability"):
        assert title in words
    assert "Size and latency" in words
    assert "Mask of 1.weight" in words
    assert f"{sum(p.numel() for p in case.slim.parameters()):,}" in words
    assert "magnitude" in words
    assert str(case.pruned.plan_).splitlines()[0] in words
    for title in ("In short", "Size", "Error", "What is uncertain"):
        assert title in words
    assert "prefers-color-scheme: dark" in page
    assert "max-width: 820px" in page


def test_without_data_it_says_what_is_not_there(tmp_path):
    case = laplace()
    words = Page(bl.report(case.bnn, case.pruned, path=tmp_path / "r.html").read_text()).words
    assert "no held-out data were given" in words
    assert "there was no example" in words
    assert "Signal to noise" in words
    assert "Error against sparsity" in words.partition("Not in this report")[2]


def test_without_matplotlib_the_tables_are_open_and_the_extra_is_named(tmp_path, monkeypatch):
    case = laplace()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = bl.report(case.bnn, case.pruned, case.slim, tmp_path / "r.html", validate=case.held_out).read_text()
    assert "pip install 'bayeslim[plots]'" in Page(text).words
    assert "<svg" not in text
    assert text.count("<details open>") == 6
    assert "Error against sparsity" in text


def test_files_are_explained(tmp_path):
    case = laplace()
    path = bl.report(case.bnn, case.pruned, case.slim, tmp_path / "r.html", files=["slim", "slim.onnx"])
    words = Page(path.read_text()).words
    assert "How to use the files" in words
    assert 'bl.load("slim")' in words
    assert "onnxruntime.InferenceSession" in words


def test_names_cannot_break_the_page(tmp_path):
    torch.manual_seed(0)
    network = nn.ModuleDict({"<b>&\"'": nn.Linear(6, 4)})
    network.forward = network["<b>&\"'"].forward
    bnn = bl.bayesianize(network, bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=10)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5))
    held_out = [(torch.randn(20, 6), torch.randint(0, 4, (20,)))]
    path = bl.report(bnn, pruned, None, tmp_path / "r.html", validate=held_out, title="<script>alert(1)</script>")
    parsed = Page(path.read_text())
    assert "script" not in parsed.tags
    assert "b" not in parsed.tags
    assert "<b>&\"'.weight" in parsed.words


def test_values_have_a_report_too(tmp_path):
    x = torch.randn(60, 5)
    network = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    bnn = bl.bayesianize(network, bl.Laplace(), likelihood=bl.likelihoods.Gaussian(0.3))
    loader = bl.data.Loader(x, x[:, :1], batch_size=20)
    bnn.fit(loader, epochs=5, seed=0)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5))
    words = Page(bl.report(bnn, pruned, None, tmp_path / "r.html", validate=loader).read_text()).words
    assert "root mean squared error" in words
    assert "probability of the interval" in words


def test_the_network_is_left_as_it_was(tmp_path):
    case = variational()
    case.bnn.train()
    before = {name: value.clone() for name, value in case.bnn.state_dict().items()}
    state = torch.get_rng_state()
    bl.report(case.bnn, case.pruned, case.slim, tmp_path / "r.html", validate=case.held_out)
    assert case.bnn.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, case.bnn.state_dict()[name]) for name, value in before.items())
    case.bnn.eval()


def test_bad_input_is_refused_before_any_work(tmp_path, monkeypatch):
    case, other = laplace(), variational()
    with pytest.raises(TypeError, match="bnn must be a Bayesian"):
        bl.report(case.slim, case.pruned)
    with pytest.raises(TypeError, match="slim must be a plain network"):
        bl.report(case.bnn, case.pruned, case.pruned)
    with pytest.raises(bl.errors.BayeslimError, match="has no zeros"):
        bl.report(case.bnn, case.bnn, path=tmp_path / "r.html")
    small = bl.bayesianize(nn.Linear(2, 2), bl.Variational(), likelihood=bl.likelihoods.Categorical())
    with pytest.raises(bl.errors.ShapeMismatch, match="one network before and after"):
        bl.report(small, other.pruned)
    with pytest.raises(bl.errors.BayeslimError, match="no batches"):
        bl.report(case.bnn, case.pruned, path=tmp_path / "r.html", validate=[])
    with pytest.raises(bl.errors.ShapeMismatch, match="does not run on the example"):
        bl.report(case.bnn, case.pruned, path=tmp_path / "r.html", example=torch.zeros(2, 5))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(bl.errors.MissingExtra, match=r"bayeslim\[report\]"):
        bl.report(case.bnn, case.pruned, path=tmp_path / "r.html")
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    case = laplace()
    (tmp_path / "file").write_text("here before")
    with pytest.raises(bl.errors.BayeslimError, match="Could not write"):
        bl.report(case.bnn, case.pruned, path=tmp_path / "file" / "r.html")
    assert (tmp_path / "file").read_text() == "here before"


def test_the_headline_compares_like_with_like():
    sizes = {
        name: Size(1000, nonzeros, 2000, 4000, 5000, {"onnxruntime": file_bytes})
        for name, nonzeros, file_bytes in (("dense", 1000, 4440), ("slim", 60, 4000))
    }
    seconds = {
        ("dense", "eager", 1): (1e-3, 1e-3),
        ("slim", "eager", 1): (0.9e-3, 0.9e-3),
        ("dense", "onnxruntime", 1): (1.06e-4, 1.06e-4),
        ("slim", "onnxruntime", 1): (1e-4, 1e-4),
    }
    timed = bl.Benchmark(sizes, seconds, {})
    case = laplace("weight")
    networks = {"dense": case.bnn.mean_network(), "bayeslim": case.slim}
    rows = measure_rows(networks, case.bnn.likelihood, case.held_out, case.example, latencies(timed))
    shown = {words: value for value, words in highlights(case.pruned, rows, timed)}
    assert shown["as fast as the dense network, both in onnxruntime, batch 1"] == "1.06×"
    assert shown["smaller ONNX file"] == "1.11×"
    assert rows["dense"].seconds == 1e-3
    assert rows["bayeslim"].seconds == 0.9e-3
    assert latencies(bl.Benchmark(sizes, {(n, "eager", 8): (1.0, 1.0) for n in ("dense", "slim")}, {})) is None
