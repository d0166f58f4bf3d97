"""The run folder: private (0700), holds the sockets, the resolved config and the start files of one service.

Life cycle: made under a passing name, locked, given its name -> used -> removed at a clean exit. The lock (flock) ends
with the supervisor however it ends, so the next start can tell the folders of the dead and sweep them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "cbdisagg-"
UNFINISHED = ".cbdisagg-new-"
LOCK = "lock"


class RunFolder:
    """`path` exists from construction to `remove`. `parent` None: the system's folder for temporary files."""

    def __init__(self, parent: Path | None = None) -> None:
        unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=parent))
        self._lock = os.open(unfinished / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Only now may a sweeper see it: a folder with the final name is always locked while its owner lives.
        self.path = unfinished.with_name(PREFIX + unfinished.name.removeprefix(UNFINISHED))
        unfinished.rename(self.path)

    def remove(self) -> None:
        remove_folder(self.path)
        self.release()

    def release(self) -> None:
        """Give up the lock, as the end of the process does: who sweeps may now remove the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_folder(folder: Path) -> None:
    """The lock goes last: if whoever removes is killed meanwhile, the next start knows the rest for one of ours."""
    with contextlib.suppress(OSError):  # gone, or others remove it too
        for entry in [entry for entry in folder.iterdir() if entry.name != LOCK]:
            entry.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path | None = None) -> list[Path]:
    """Remove the run folders whose supervisors are dead; returns them. Those of other users are left alone."""
    swept = []
    for folder in sorted(Path(parent or tempfile.gettempdir()).glob(f"{PREFIX}*")):
        if _abandoned(folder):
            remove_folder(folder)
            swept.append(folder)
    return swept


def _abandoned(folder: Path) -> bool:
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return False
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # not a run folder of ours, or its owner is removing it just now
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
