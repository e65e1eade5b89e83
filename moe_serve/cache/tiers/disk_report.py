"""Describes, verifies and clears the folder of a disk tier, without a server and without a key."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_serve.cache.tiers.disk_folder import (
    DiskFolder,
    FolderInUseError,
    check_folder,
    identity_folders,
)
from moe_serve.cache.tiers.page_cipher import forget_key
from moe_serve.cache.tiers.segment import Segment, slot_size
from moe_serve.cache.tiers.slot import ALIGNMENT, SlotHeader
from moe_serve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityReport:
    """The pages and bytes in the folder of one identity."""

    name: str
    model: str  # name of the checkpoint's folder; empty if it is not known
    dtype: str
    num_files: int
    num_bytes: int
    num_pages: int  # proven headers that have not expired
    num_tokens: int
    is_encrypted: bool
    num_wrong: int | None = None  # proven headers whose bytes are not proven; None: not verified


def report(path: Path, *, now: float, verifies: bool = False) -> list[IdentityReport]:
    """Reports on every identity in a folder. `verifies` reads every byte.

    Raises ConfigError if the folder belongs to another user or cannot be read.
    """
    try:
        check_folder(path)
        return [
            _report_one(folder.path, folder.secret, folder.meta, now, verifies=verifies)
            for folder in identity_folders(path)
        ]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None


def clear(path: Path) -> int:
    """Removes all pages in a folder and returns the bytes that they took.

    Raises ConfigError if a server uses the folder.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist: give the folder of --kv-disk.")
    try:
        folder = DiskFolder.claim(path)
    except FolderInUseError:
        raise ConfigError(
            f"{path} cannot be cleared, because a server uses it: stop the server first."
        ) from None
    try:
        taken = 0
        for each in identity_folders(path):
            taken += sum(file.stat().st_size for file in each.segments)
            shutil.rmtree(each.path)
        forget_key(path)
        return taken
    except OSError as error:
        raise ConfigError(f"{path} cannot be cleared: {error.strerror or error}.") from None
    finally:
        folder.release()


def _report_one(
    path: Path, secret: bytes, meta: dict[str, object], now: float, *, verifies: bool
) -> IdentityReport:
    files = sorted(path.glob("*.kv"))
    headers = list(_headers(files, secret, verifies=verifies))
    alive = [(header, is_proven) for header, is_proven in headers if header.expires_at > now]
    return IdentityReport(
        name=path.name,
        model=str(meta.get("model", "")),
        dtype=str(meta.get("dtype", "")),
        num_files=len(files),
        num_bytes=sum(file.stat().st_size for file in files),
        num_pages=len(alive),
        num_tokens=sum(header.num_tokens for header, _ in alive),
        is_encrypted="encryption" in meta,
        num_wrong=sum(not is_proven for _, is_proven in alive) if verifies else None,
    )


def _headers(
    files: list[Path], secret: bytes, *, verifies: bool
) -> Iterator[tuple[SlotHeader, bool]]:
    """Yields the valid headers, and whether their payload is valid, too (True if not read)."""
    for file in files:
        size = slot_size(file, secret)
        segment = None if size is None else Segment.open(file, size, secret)
        if segment is None:
            continue
        try:
            for slot, header in segment.headers(secret):
                if not verifies:
                    yield header, True
                    continue
                payload = segment.read(slot)[ALIGNMENT : ALIGNMENT + header.num_bytes]
                yield header, header.proves(payload.data)
        finally:
            segment.close()
