"""A check before a file is opened: a FIFO would wait for a writer, and a device may never end."""

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
    """The path, if a regular file (or a link to one) is there.

    Raises OSError: FileNotFoundError only where nothing at all has this name, so that a link to
    nothing is not taken for a file that somebody left out.
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
    """Whether an optional file has to be read: also a link to nothing is there, and an error."""
    return os.path.lexists(path)
