"""Downloads that are complete and checked, or absent.

Bytes go to `NAME.part`, which a later try continues with an HTTP Range request; only a complete file with the right
checksum is renamed to its name. Failures that may pass (no connection, a cut-off transfer, 5xx) are retried with
growing pauses. Of several processes that want files of one folder, one downloads at a time and the others wait.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bayeslim.errors import DownloadFailed, FolderInUse
from bayeslim.io.lock import locked
from bayeslim.train.progress import Progress, progress

CHUNK_BYTES = 1 << 18
LOCK_PAUSE = 0.1
"""Seconds between two looks at whether another process is done."""
RETRIED_STATUS_CODES = {408, 425, 429, 500, 502, 503, 504}


class _PassingError(Exception):
    """A failure that may not happen at the next try."""


def download(url: str, path: Path, *, checksum: str, tries: int = 5, pause: float = 1.0, timeout: float = 30.0) -> Path:
    """Fetch `url` into `path`, unless it is there already.

    Args:
        url: where the file is.
        path: where it goes; its folder is made.
        checksum: its hash as "md5:..." or "sha256:...".
        tries: how often to try before giving up.
        pause: seconds before the second try; each further pause is twice as long.
        timeout: seconds without an answer that count as a failure.

    Returns:
        `path`.

    Raises:
        DownloadFailed: without a connection, when the server refuses, or when the file is not the one expected.
    """
    if path.exists():
        return path
    with _alone_in(path.parent):
        return path if path.exists() else _download(url, path, checksum, tries, pause, timeout)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, once every other process has released it."""
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(folder))
                break
            except FolderInUse:
                time.sleep(LOCK_PAUSE)
        yield


def _download(url: str, path: Path, checksum: str, tries: int, pause: float, timeout: float) -> Path:
    """Try to download the file, some times."""
    part = path.with_name(path.name + ".part")
    for attempt in range(tries):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            _fetch(url, part, checksum, timeout)
            os.replace(part, path)
            return path
        except _PassingError as error:
            reason = str(error)
    raise DownloadFailed(f"{url} could not be downloaded in {tries} tries: {reason}. {_by_hand(url, path)}")


def _by_hand(url: str, path: Path) -> str:
    return f"If you have the file, or can get it in another way ({url}), put it at {path}."


def _fetch(url: str, part: Path, checksum: str, timeout: float) -> None:
    """Try once to download the file to `part`.

    Afterwards `part` is complete and its checksum is verified, or an exception says why not.
    """
    have = part.stat().st_size if part.exists() else 0
    path = part.with_name(part.name.removesuffix(".part"))
    headers = {"User-Agent": "bayeslim", "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as response:
            resumed = response.status == 206
            if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                part.unlink()
                raise _PassingError("the server sent another range than it was asked for")
            _receive(response, part, have if resumed else 0)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the part on the disk is not the beginning of this file
            part.unlink(missing_ok=True)
        elif error.code not in RETRIED_STATUS_CODES:
            raise DownloadFailed(
                f"{url} could not be downloaded: the server answered {error.code} {error.reason}. {_by_hand(url, path)}"
            ) from None
        raise _PassingError(f"the server answered {error.code} {error.reason}") from None
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise _PassingError(f"no connection ({getattr(error, 'reason', error)})") from None

    found = file_checksum(part, checksum.partition(":")[0])
    if found != checksum:
        part.unlink()
        if resumed:
            raise _PassingError("the continued file has the wrong checksum")
        raise DownloadFailed(
            f"{url} is not the expected file: its checksum is {found}, not {checksum}. It was removed. "
            f"{_by_hand(url, path)}"
        )


def _receive(response: http.client.HTTPResponse, part: Path, start: int) -> None:
    """Write the body of the response to `part`, from byte `start` on."""
    length = response.headers.get("Content-Length")
    total = None if length is None else start + int(length)
    bar: Progress[None] = progress(description=part.name.removesuffix(".part"), total=total, unit="B")
    with part.open("r+b" if start else "wb") as file, bar:
        file.seek(start)
        file.truncate()
        bar.advance(start)
        while chunk := response.read(CHUNK_BYTES):
            file.write(chunk)
            bar.advance(len(chunk))
        received = file.tell()
    if total is not None and received < total:
        raise _PassingError(f"the transfer ended after {received:,} of {total:,} bytes")


def file_checksum(path: Path, algorithm: str) -> str:
    """Hash a file, as "md5:..." or "sha256:..."."""
    with path.open("rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"
