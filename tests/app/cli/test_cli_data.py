"""`bayeslim data` against folders made here, and a server on this machine."""

from __future__ import annotations

import functools
import gzip
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from typed_commands import call

import bayeslim as bl
from bayeslim.app.cli import datasets
from bayeslim.app.data import images
from bayeslim.app.data.download import download

RANDOM = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0)


FILES = {
    f"{stem}.gz": idx(RANDOM.integers(0, 256 if i == 0 else 10, (30, 28, 28) if i == 0 else (30,)))
    for stems in images.IDX_NAMES.values()
    for i, stem in enumerate(stems)
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.lstrip("/")
        self.server.asked.append(name)
        content = FILES.get(name)
        self.send_response(200 if content else 404)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []


def serve_mnist_from(home: str, monkeypatch):
    md5 = {
        part: tuple(hashlib.md5(FILES[f"{stem}.gz"]).hexdigest() for stem in stems)
        for part, stems in images.IDX_NAMES.items()
    }
    monkeypatch.setitem(images.IDX_SETS, "mnist", images.IdxSet(home=home, md5=md5))


@pytest.fixture
def server(monkeypatch):
    with Server() as running:
        serve_mnist_from(f"http://127.0.0.1:{running.server_port}/", monkeypatch)
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """An empty cache, nothing of the machine's own data, and short pauses."""
    monkeypatch.delenv("BAYESLIM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(images, "download", functools.partial(download, tries=2, pause=0.001, timeout=5))
    return tmp_path / "cache" / "bayeslim"


def lines(capsys) -> dict[str, str]:
    return {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}


def test_the_list_says_what_there_is_and_where(store, capsys):
    for name in ("cifar10/cifar10.npz", "uci/yacht.npz", "notmnist/t10k-images-idx3-ubyte.gz"):
        (store / name).parent.mkdir(parents=True)
        (store / name).write_bytes(b"")
    assert call("data") == 0
    shown = lines(capsys)
    assert set(bl.data.names()) <= shown.keys()
    assert "in the package" in shown["digits"]
    assert "60,000 + 10,000" in shown["mnist"]
    assert "not here" in shown["mnist"]
    assert str(store / "cifar10") in shown["cifar10"]
    assert f"1 of 2 files in {store / 'notmnist'}" in shown["notmnist"]
    assert "277 + 31" in shown["yacht"]
    assert str(store / "uci") in shown["yacht"]
    assert "not here" in shown["boston"]


def test_the_sizes_in_the_list_are_those_of_the_data(capsys):
    digits = bl.data.load("digits")
    examples, shape = datasets.SIZES["digits"]
    assert examples == f"{len(digits.train_x):,} + {len(digits.test_x):,}"
    assert shape == "×".join(map(str, digits.train_x.shape[1:]))
    assert datasets.SIZES.keys() | datasets.UCI_SETS.keys() == set(bl.data.names())


def test_a_set_is_downloaded_once(server, store, capsys):
    assert call("data", "mnist", "digits") == 0
    shown = capsys.readouterr().out
    assert "Dataset mnist: 30 train, 30 test examples of shape 1x28x28" in shown
    assert "Dataset digits: 1,297 train" in shown
    assert str(store / "mnist") in shown
    assert sorted(server.asked) == sorted(FILES)
    assert sorted(path.name for path in (store / "mnist").iterdir()) == sorted(FILES)
    assert call("data", "mnist") == 0
    assert len(server.asked) == 4
    capsys.readouterr()
    assert call("data") == 0
    assert str(store / "mnist") in lines(capsys)["mnist"]


def test_without_a_network_it_says_so(store, monkeypatch, capsys):
    with Server() as gone:
        serve_mnist_from(f"http://127.0.0.1:{gone.server_port}/", monkeypatch)
    assert call("data", "mnist") == 1
    shown = capsys.readouterr().err
    assert "could not be downloaded in 2 tries: no connection" in shown
    assert f"put it at {store / 'mnist'}" in shown
    assert shown.count("\n") == 1


def test_names_are_checked_before_anything_is_fetched(server, capsys):
    assert call("data", "mnist", "minst") == 1
    assert 'There is no data set called "minst". Closest: "mnist"' in capsys.readouterr().err
    assert not server.asked


def test_files_that_are_broken_are_named(store, capsys):
    for stems in images.IDX_NAMES.values():
        for stem in stems:
            (store / "mnist").mkdir(parents=True, exist_ok=True)
            (store / "mnist" / f"{stem}.gz").write_bytes(b"broken")
    assert call("data", "mnist") == 1
    assert "could not be read" in capsys.readouterr().err
    assert call("data", "boston") == 1
    assert f"at {store / 'uci' / 'bostonHousing'}.npz" in capsys.readouterr().err
