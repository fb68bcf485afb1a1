"""The lock of a folder: one holder at a time, and none after a kill."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time

import pytest

from bayeslim.io.lock import LOCK_FILE, FolderInUse, locked
from processes import METHOD, started


def hold(folder, is_held) -> None:
    with locked(folder):
        is_held.set()
        time.sleep(60)


def test_a_second_holder_is_told_the_process_id(tmp_path):
    with locked(tmp_path), pytest.raises(FolderInUse, match=f"process {os.getpid()}"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_nothing_is_left_behind(tmp_path):
    with locked(tmp_path / "new"):
        assert (tmp_path / "new" / LOCK_FILE).exists()
    assert not list((tmp_path / "new").iterdir())
    with pytest.raises(ValueError, match="inside"), locked(tmp_path / "new"):
        raise ValueError("inside")
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="kills with a POSIX signal")
def test_a_killed_process_leaves_no_lock(tmp_path):
    is_held = multiprocessing.get_context(METHOD).Event()
    holder = started(hold, tmp_path, is_held)
    assert is_held.wait(timeout=60)
    with pytest.raises(FolderInUse, match=f"process {holder.pid}"), locked(tmp_path):
        pass
    holder.kill()
    holder.join()
    with locked(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text() == str(os.getpid())


def test_many_threads_never_hold_it_together(tmp_path):
    inside, most, held = 0, 0, 0
    counting = threading.Lock()

    def work():
        nonlocal inside, most, held
        for _ in range(200):
            try:
                with locked(tmp_path):
                    with counting:
                        inside, held = inside + 1, held + 1
                        most = max(most, inside)
                    with counting:
                        inside -= 1
            except FolderInUse:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert held > 0
