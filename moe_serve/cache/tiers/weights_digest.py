"""Computes a digest of every byte of a checkpoint's weights, for pages that outlive the process.

Within one process a few samples of each file tell checkpoints apart. On a disk they would not be
enough: a fine-tune may differ from its base in bytes that no sample reads. The digest is kept
beside the pages by each file's path, size, time and inode, so an unchanged file is read once.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from moe_serve.cache.tiers.disk_folder import write_whole
from moe_serve.regular_file import regular_file

_BLOCK = 4 * 2**20


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
