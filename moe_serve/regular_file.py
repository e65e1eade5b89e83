"""Checks a path before it is opened, as a FIFO would wait for a writer and a device may never
end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def regular_file(path: Path) -> Path:
    """Returns the path if it is a regular file, or a link to one.

    Raises OSError. It is FileNotFoundError only if nothing has this name, so that a broken link is
    not mistaken for an absent optional file.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise OSError(errno.EINVAL, "it is a link to nothing", str(path)) from None
        raise
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    return path


def is_there(path: Path) -> bool:
    """Returns whether an optional file must be read. A broken link counts, and reading it is an
    error."""
    return os.path.lexists(path)
