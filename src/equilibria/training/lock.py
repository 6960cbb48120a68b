"""One training at a time in a folder: a lock file that names who holds it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_TAKEN = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)


class RunInUseError(OSError):
    """Another training is writing to the folder."""


class FolderLock:
    """A file that one process at a time holds; it names the host, the process and the time.

    The lock is the kernel's: it ends with the process, however that ends, and no process number
    has to be judged. A file that nobody holds is ``stale``: its run was killed, or ended before it
    saved anything. On a file system without locks the file is written and protects nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stale = False
        """Whether the file was left behind by an earlier run."""
        self._handle: int | None = None

    def take(self) -> None:
        """Lock, or raise RunInUseError with the name of the holder."""
        while not self.held():
            self._drop()
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                _lock(handle)
            except OSError as error:
                holder = _read(handle) or "another process"
                os.close(handle)
                if error.errno in _TAKEN:
                    raise RunInUseError(
                        f"{self.path.parent} is in use by another training ({holder}). Wait until "
                        "it ends, or set another folder (out=..., --out)."
                    ) from None
                raise
            # Its last holder may have removed the file after it was opened here: then once more.
            self._handle = handle
        assert self._handle is not None
        self.stale = bool(_read(self._handle)) or self.stale
        now = datetime.now(UTC).isoformat(timespec="seconds")
        mine = f"process {os.getpid()} on {socket.gethostname()}, since {now}"
        os.ftruncate(self._handle, 0)
        os.lseek(self._handle, 0, os.SEEK_SET)
        os.write(self._handle, mine.encode())

    def held(self) -> bool:
        """Whether this process holds the lock and the file is still in its place."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return self._handle is not None and os.path.samestat(
                os.fstat(self._handle), self.path.stat()
            )
        return False

    def release(self, *, keep: bool = False) -> None:
        """Let go, and remove the file unless it is to be found ``stale`` by the next run."""
        mine = self.held()
        if sys.platform == "win32":
            self._drop()  # a file that is open cannot be removed
        if mine and not keep:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._drop()

    def _drop(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        os.lseek(handle, 2**30, os.SEEK_SET)  # far behind the text, which stays readable
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise


def _read(handle: int) -> str:
    os.lseek(handle, 0, os.SEEK_SET)
    return os.read(handle, 4096).decode(errors="replace")
