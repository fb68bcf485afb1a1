"""A lock on a folder, so that two processes do not write to it at once.

The operating system holds the lock on an open file and releases it when the process ends, however it ends: a killed
process leaves no lock behind. The file carries the holder's process id, for the error message only.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bayeslim.errors import FolderInUse

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK_FILE = ".bayeslim.lock"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of file systems that have no locks; there a folder is written without one."""


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder, which is made if it is not there.

    The value is whether there is a lock: some file systems have none.

    Raises:
        FolderInUse: if another process or thread holds it.
        OSError: if the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    descriptor, is_locked = _acquired(path)
    try:
        yield is_locked
    finally:
        if sys.platform != "win32":
            # removed while the lock is held: whoever opened this file before finds that it is no longer the folder's
            path.unlink(missing_ok=True)
        os.close(descriptor)
        if sys.platform == "win32":
            with suppress(OSError):  # another process has it open by now
                path.unlink(missing_ok=True)


def _acquired(path: Path) -> tuple[int, bool]:
    """Open and lock the file; return its descriptor, and whether locks exist here."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            is_locked = _lock(descriptor)
            if is_locked is False:
                raise FolderInUse(
                    f"{path.parent} is being written to by {_holder(descriptor)}. Wait until it is done, or choose "
                    "another folder."
                )
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
                return descriptor, is_locked is True
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed it between our opening and our locking: the next one is the folder's


def _lock(descriptor: int) -> bool | None:
    """Lock an open file at once; False if it is held, None if there are no locks."""
    try:
        if sys.platform == "win32":
            os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # beyond the process id, which others may read
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK, errno.EDEADLK):
            return False
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Check whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    """Name the process that holds the lock, as far as it is known."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    number = os.read(descriptor, 20).decode("ascii", "replace")
    return f"process {number}" if number.isdigit() else "another process"
