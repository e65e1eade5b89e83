"""Computes an identity that distinguishes checkpoints, for the keys of cached pages.

Reads the whole config.json, and of every weight file its size, its header (names, shapes, dtypes)
and a few samples: a fine-tune differs from its base in values only. No tensor is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from moe_serve.errors import CheckpointError
from moe_serve.regular_file import regular_file

_NUM_SAMPLES = 8  # per file
_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100 * 2**20  # limit of the format


class Digest(Protocol):
    """The interface of hashlib's objects."""

    def update(self, data: bytes, /) -> None: ...


def model_identity(folder: Path, *details: str) -> bytes:
    """Return 32 bytes that are the same for the same checkpoint and `details` (dtype, kernels,
    ...).

    Raises CheckpointError for a file that cannot be read.
    """
    try:
        return _identity(folder, details)
    except OSError as error:
        where = error.filename or folder
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}.") from None


def _identity(folder: Path, details: Sequence[str]) -> bytes:
    digest = sha256()
    for detail in details:
        digest.update(f"{len(detail)}:{detail}".encode())
    digest.update(regular_file(folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}:{regular_file(path).stat().st_size}".encode())
        add_weight_file(digest, path)
    return digest.digest()


def add_weight_file(digest: Digest, path: Path) -> None:
    """Add the header of a safetensors file and samples of its values."""
    size = regular_file(path).stat().st_size
    with path.open("rb") as file:
        num_header_bytes = int.from_bytes(file.read(8), "little")
        digest.update(file.read(min(num_header_bytes, _MAX_HEADER_BYTES)))
        for i in range(_NUM_SAMPLES):
            file.seek(i * max(0, size - _SAMPLE_BYTES) // max(1, _NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
