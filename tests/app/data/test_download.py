"""The downloader against a server on this machine that misbehaves on request."""

from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bayeslim.app.data.download import download
from bayeslim.errors import DownloadFailed
from bayeslim.io.lock import locked

CONTENT = bytes(range(256)) * 500
CHECKSUM = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


class Server(ThreadingHTTPServer):
    """A server of CONTENT; `script` lists the faults of the next requests, `ranges` their ranges."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[str] = []
        self.ranges: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file.bin"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.ranges.append(asked)
        act = server.script.pop(0) if server.script else "serve"
        if act.isdigit():
            self.send_response(int(act))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and act != "ignore range" else 0
        body = CONTENT[start:]
        self.send_response(206 if start else 200)
        if start:
            shift = 7 if act == "wrong range" else 0
            self.send_header("Content-Range", f"bytes {start - shift}-{len(CONTENT) - 1}/{len(CONTENT)}")
            body = CONTENT[start - shift :]
        if act != "no length":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if act == "cut off" else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("BAYESLIM_PROGRESS", "0")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def fetch(server, tmp_path, **arguments):
    return download(server.url, tmp_path / "sets" / "file.bin", checksum=CHECKSUM, pause=0.001, timeout=5, **arguments)


def part(tmp_path):
    (tmp_path / "sets").mkdir(exist_ok=True)
    return tmp_path / "sets" / "file.bin.part"


def check(path):
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["file.bin"]


def test_a_plain_download_makes_the_folder_and_leaves_only_the_file(server, tmp_path):
    check(fetch(server, tmp_path))


def test_a_file_that_is_there_is_not_fetched_again(server, tmp_path):
    fetch(server, tmp_path)
    fetch(server, tmp_path)
    assert len(server.ranges) == 1


def test_a_file_that_another_process_downloads_is_waited_for(server, tmp_path):
    found = []
    waiting = threading.Thread(target=lambda: found.append(fetch(server, tmp_path)))
    with locked(part(tmp_path).parent):  # as the other process does
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        part(tmp_path).write_bytes(CONTENT)
        part(tmp_path).rename(tmp_path / "sets" / "file.bin")
    waiting.join(30)
    check(found[0])
    assert server.ranges == []


def test_an_interrupted_download_is_continued_where_it_stopped(server, tmp_path):
    part(tmp_path).write_bytes(CONTENT[:1000])
    check(fetch(server, tmp_path))
    assert server.ranges == ["bytes=1000-"]


def test_a_cut_off_transfer_is_continued(server, tmp_path):
    server.script = ["cut off", "cut off"]
    check(fetch(server, tmp_path))
    half = len(CONTENT) // 2
    assert server.ranges == [None, f"bytes={half}-", f"bytes={half + half // 2}-"]


def test_what_was_received_survives_for_the_next_call(server, tmp_path):
    server.script = ["cut off"]
    with pytest.raises(DownloadFailed, match=r"after 64,000 of 128,000 bytes"):
        fetch(server, tmp_path, tries=1)
    assert part(tmp_path).stat().st_size == len(CONTENT) // 2
    check(fetch(server, tmp_path))


@pytest.mark.parametrize(("act", "ranges"), [("ignore range", ["bytes=1000-"]), ("wrong range", ["bytes=1000-", None])])
def test_a_server_that_does_not_continue_is_started_over(server, tmp_path, act, ranges):
    part(tmp_path).write_bytes(CONTENT[:1000])
    server.script = [act]
    check(fetch(server, tmp_path))
    assert server.ranges == ranges


def test_no_length_given(server, tmp_path):
    server.script = ["no length"]
    check(fetch(server, tmp_path))


def test_a_stale_beginning_is_thrown_away(server, tmp_path):
    part(tmp_path).write_bytes(b"another file" * 10)
    check(fetch(server, tmp_path))
    assert server.ranges == ["bytes=120-", None]


def test_a_beginning_longer_than_the_file_is_thrown_away(server, tmp_path):
    part(tmp_path).write_bytes(CONTENT * 2)
    server.script = ["416"]
    check(fetch(server, tmp_path))


def test_a_wrong_checksum_names_the_file_the_hashes_and_the_place(server, tmp_path):
    path = tmp_path / "file.bin"
    with pytest.raises(DownloadFailed) as caught:
        download(server.url, path, checksum="md5:" + "0" * 32, pause=0.001)
    message = str(caught.value)
    assert server.url in message
    assert CHECKSUM in message
    assert f"put it at {path}." in message
    assert list(tmp_path.iterdir()) == []
    assert len(server.ranges) == 1


def test_sha256_is_understood(server, tmp_path):
    checksum = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
    check(download(server.url, tmp_path / "file.bin", checksum=checksum))


@pytest.mark.parametrize("status", ["404", "403"])
def test_a_refusal_is_final(server, tmp_path, status):
    server.script = [status]
    with pytest.raises(DownloadFailed, match=rf"answered {status}.*put it at .*file.bin"):
        fetch(server, tmp_path)
    assert len(server.ranges) == 1


def test_a_passing_trouble_is_waited_for(server, tmp_path):
    server.script = ["500", "503"]
    check(fetch(server, tmp_path))
    assert len(server.ranges) == 3


def test_a_lasting_trouble_ends_after_the_tries(server, tmp_path):
    server.script = ["500"] * 9
    with pytest.raises(DownloadFailed, match="in 3 tries: the server answered 500"):
        fetch(server, tmp_path, tries=3)
    assert len(server.ranges) == 3


def test_the_pauses_grow(server, tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr("bayeslim.app.data.download.time.sleep", pauses.append)
    server.script = ["500"] * 9
    with pytest.raises(DownloadFailed):
        download(server.url, tmp_path / "file.bin", checksum=CHECKSUM, tries=4, pause=1.0)
    assert pauses == [1, 2, 4]


def test_no_server_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as gone:
        url = gone.url
    with pytest.raises(DownloadFailed, match=r"no connection .*put it at .*file.bin"):
        download(url, tmp_path / "file.bin", checksum=CHECKSUM, tries=2, pause=0.001)
    assert list(tmp_path.iterdir()) == []
