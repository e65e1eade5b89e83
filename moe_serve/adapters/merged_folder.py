"""Keeps merged checkpoints in the user's cache, by the content of model and adapter.

The cache keeps a limited number of them: those that were used longest ago are deleted. A process
that uses one locks it until the process ends, so that no other process deletes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
from pathlib import Path

from moe_kernels.cpu.cpu_library import cache_folder
from moe_serve.adapters.adapter_files import open_unchanged
from moe_serve.adapters.merge import merge_adapter
from moe_serve.cache.page_key import model_identity
from moe_serve.errors import ConfigError
from moe_serve.regular_file import is_there

_VERSION = "1"  # of what `merge_adapter` writes
_DIGITS = 32
_LOCK = "lock"  # beside each checkpoint; it was changed when the checkpoint was last used
_DELETED = "deleted"  # the name of a checkpoint while it is deleted; others contain a "-"
_log = logging.getLogger(__name__)
_in_use: list[int] = []  # the open locks of this process, which closes them when it ends


def merged_root() -> Path:
    """Returns the folder of all merged checkpoints. Any of them may be deleted."""
    return cache_folder() / "merged"


def merged_folder(base: Path, adapter: Path, most: int) -> Path:
    """Returns the folder of a model with an adapter merged into it, which is written if it is not
    there yet.

    `most`: the number of merged checkpoints that the cache keeps, this one among them. Raises
    CheckpointError and ConfigError."""
    with open_unchanged(adapter) as files:
        digest = hashlib.sha256(model_identity(base, _VERSION) + files.digest).hexdigest()
    name = f"{base.resolve().name}-{adapter.resolve().name}"
    root = merged_root()
    folder = root / digest[:_DIGITS] / name
    _in_use.append(_locked(folder.parent))
    delete_unused(root, most)  # before anything is written: the disk may be full
    if not is_there(folder / "config.json"):
        merge_adapter(base, adapter, folder)
    return folder


def _locked(folder: Path) -> int:
    """Opens the lock of a checkpoint, which processes that use it share."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / _LOCK, os.O_WRONLY | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a folder that "
            "this user can write."
        ) from None
    with contextlib.suppress(OSError):  # a file system without locks, where no process deletes
        fcntl.flock(lock, fcntl.LOCK_SH)
    os.utime(lock)
    return lock


def delete_unused(root: Path, most: int) -> None:
    """Deletes the checkpoints that were used longest ago, all but `most`. Those that a process uses
    are kept in any case."""
    used = {folder: _last_use(folder) for folder in root.iterdir() if folder.is_dir()}
    for folder in sorted(used, key=used.__getitem__, reverse=True)[most:]:
        try:
            with (folder / _LOCK).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _delete(folder)
        except OSError:  # it is in use, or belongs to another user
            continue


def _last_use(folder: Path) -> float:
    with contextlib.suppress(OSError):
        lock = folder / _LOCK
        return (lock if lock.exists() else folder).stat().st_mtime
    return 0.0


def _delete(folder: Path) -> None:
    """Deletes a checkpoint and the remains of others. Its lock stays: a process may wait for it."""
    gone = folder / _DELETED
    shutil.rmtree(gone, ignore_errors=True)
    for each in [path for path in folder.iterdir() if path.is_dir()]:
        each.rename(gone)
        shutil.rmtree(gone)
        _log.info("%s was used longest ago, and is deleted from the cache", each)
