"""The folder of a disk tier: its permissions, its secret keys, and the space it takes.

    DIR/  0700            lock (held while a server runs), written.json (bytes written today)
      <identity>/         mac.key (32 random bytes, 0600), meta.json, 00000000.kv, 00000001.kv, ...

Each identity (weights, kernels, shapes) has a folder of its own, so pages of one model are never
read for another. If space is needed, folders of other identities are deleted first.

The weights are identified by a digest of every byte of them, because the pages outlive the process.
Within one process a few samples of each file tell checkpoints apart. On a disk they would not be
enough: a fine-tune may differ from its base in bytes that no sample reads. The digest is kept
beside the pages by each file's path, size, time and inode, so an unchanged file is read once.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from moe_serve.cache.tiers.segment import SUFFIX
from moe_serve.errors import ConfigError
from moe_serve.regular_file import regular_file

_LOCK, _WRITTEN, _SECRET, _META = "lock", "written.json", "mac.key", "meta.json"
_SECRET_BYTES = 32
_NAME_DIGITS = 16  # of an identity, in hexadecimal
_BLOCK = 4 * 2**20  # bytes of a weight file that are read at once


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """The identity of the pages that a store may hold, and the parts it was computed from."""

    digest: bytes
    meta: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class IdentityFolder:
    """The folder of one identity."""

    path: Path
    secret: bytes

    @property
    def segments(self) -> list[Path]:
        """The files of slots, oldest first."""
        return sorted(self.path.glob(f"*{SUFFIX}"))

    @property
    def meta(self) -> dict[str, Any]:
        """The parts that the identity was made of; empty if the file is damaged."""
        try:
            meta = json.loads((self.path / _META).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return meta if isinstance(meta, dict) else {}


class FolderInUseError(ConfigError):
    """Another process has claimed the folder."""


class DiskFolder:
    """A folder that this process alone uses until `release`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock

    @classmethod
    def claim(cls, path: Path) -> DiskFolder:
        """Makes or checks the folder, and locks it. Raises ConfigError if it cannot be trusted."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_folder(path)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(path / _LOCK, flags, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cache.disk_path {path} cannot be used: {error.strerror or error}. Give a folder "
                "that this user can write, or leave the disk tier off."
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise FolderInUseError(
                f"cache.disk_path {path} is in use by another process: give each server a folder "
                "of its own."
            ) from None
        return cls(path, lock)

    def release(self) -> None:
        """Unlocks the folder."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def open_identity(self, identity: StoreIdentity) -> IdentityFolder:
        """Opens or makes the folder of an identity. Raises OSError.

        A damaged secret makes the old pages worthless: they are removed and a new secret is made.
        """
        folder = self.path / identity.digest.hex()[:_NAME_DIGITS]
        folder.mkdir(mode=0o700, exist_ok=True)
        secret = _read_secret(folder / _SECRET)
        if secret is None:
            for path in folder.iterdir():
                path.unlink()
            secret = secrets.token_bytes(_SECRET_BYTES)
            write_whole(folder / _SECRET, secret)
        write_whole(folder / _META, json.dumps(dict(identity.meta), indent=1).encode())
        return IdentityFolder(folder, secret)

    def shrink_others(self, own: IdentityFolder, num_bytes: int) -> int:
        """Removes files of other identities, oldest first, until they take at most `num_bytes`.
        Returns the bytes that they take. Raises OSError."""
        others = [f for f in identity_folders(self.path) if f.path != own.path]
        files = [(path.stat(), path) for folder in others for path in folder.segments]
        files.sort(key=lambda item: item[0].st_mtime)
        taken = sum(status.st_size for status, _ in files)
        for status, path in files:
            if taken <= num_bytes:
                break
            path.unlink()
            taken -= status.st_size
        for folder in others:
            if not folder.segments:
                shutil.rmtree(folder.path)
        return taken

    def written_on(self, day: str) -> int:
        """Returns the bytes that were noted for a day, as in "2026-11-26"."""
        try:
            noted = json.loads((self.path / _WRITTEN).read_text("utf-8"))
            return int(noted["bytes"]) if noted["day"] == day else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def note_written(self, day: str, num_bytes: int) -> None:
        """Notes the bytes of a day. Raises OSError."""
        write_whole(self.path / _WRITTEN, json.dumps({"day": day, "bytes": num_bytes}).encode())

    def free_bytes(self) -> int:
        """Returns the free space of the disk. Raises OSError."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize


def check_folder(path: Path) -> None:
    """Raises ConfigError if another user could read or replace files in the folder."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"cache.disk_path {path} is a link or a file: give a folder.")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"cache.disk_path {path} belongs to user {status.st_uid}, and this process runs as "
            f"{os.geteuid()}: give a folder of this user."
        )
    if status.st_mode & 0o077:
        is_shared = status.st_mode & (stat.S_ISVTX | stat.S_IWOTH)  # such as /tmp: never closed
        advice = "" if is_shared else f", or run chmod 700 {path} if it holds nothing else"
        raise ConfigError(
            f"cache.disk_path {path} is open to other users (mode "
            f"{stat.S_IMODE(status.st_mode):o}): give a folder of its own, such as "
            f"{path / 'moe-serve-pages'}{advice}."
        )


def identity_folders(path: Path) -> list[IdentityFolder]:
    """Returns the folders of the identities with a readable secret."""
    found = []
    for folder in sorted(path.iterdir()):
        is_ours = len(folder.name) == _NAME_DIGITS and folder.is_dir() and not folder.is_symlink()
        secret = _read_secret(folder / _SECRET) if is_ours else None
        if secret is not None:
            found.append(IdentityFolder(folder, secret))
    return found


def _read_secret(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        secret = os.read(descriptor, _SECRET_BYTES + 1)
    finally:
        os.close(descriptor)
    return secret if len(secret) == _SECRET_BYTES else None


def write_whole(path: Path, data: bytes) -> None:
    """Replaces a file at once, readable by this user only. Raises OSError."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    part.replace(path)


def weights_digest(folder: Path, kept: Path) -> bytes:
    """Returns the SHA-256 of config.json and of all weight files in `folder`.

    `kept` is the file that keeps digests between starts. Raises OSError if a weight file cannot be
    read.
    """
    known, total, used = _read_kept(kept), sha256(), {}
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        status = regular_file(path).stat()
        mark = f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}:{status.st_ino}"
        used[mark] = known.get(mark) or _file_digest(path)
        total.update(f"{path.name}:{used[mark]}\n".encode())
    if not used.keys() <= known.keys():
        write_whole(kept, json.dumps({**known, **used}).encode())
    return total.digest()


def _file_digest(path: Path) -> str:
    digest = sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _read_kept(path: Path) -> dict[str, str]:
    try:
        kept = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}
