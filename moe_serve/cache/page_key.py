"""Names the content of a page by a chain of SHA-256 hashes, from the checkpoint to the page.

    root          = sha256(model identity, adapter, salt)
    key of page i = sha256(key of page i - 1, its token ids)        page -1 is the root

Two pages have the same key only if model, adapter, salt and every token up to the page's end are
the same, so a key also names the content to another rank or a slower tier. The model identity reads
the whole config.json, and of every weight file its size, its header (names, shapes, dtypes) and a
few samples: a fine-tune differs from its base in values only. No tensor is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_serve.errors import CheckpointError
from moe_serve.regular_file import regular_file

TOKEN_DTYPE = np.dtype("<i4")


def root_key(model_identity: bytes, adapter: bytes, cache_salt: str) -> bytes:
    """Returns the key before the first page.

    Each part is hashed with its length, so that parts cannot be confused: ("ab", "c") is 2 ab 1 c,
    and ("a", "bc") is 1 a 2 bc. `adapter` is the digest of an adapter; empty: the base model.
    """
    digest = sha256()
    salt = cache_salt.encode("utf-8", "surrogatepass")
    for part in (model_identity, adapter or b"0", salt):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def token_array(token_ids: Sequence[int]) -> NDArray[np.int32]:
    """Returns token ids in the form in which keys hash them."""
    return np.array(token_ids, dtype=TOKEN_DTYPE)


def page_key(parent: bytes, tokens: NDArray[np.int32]) -> bytes:
    """Returns the key of one page after the page (or root) `parent`; it may hold fewer
    tokens than others.
    """
    return sha256(parent + tokens.tobytes()).digest()


def following_keys(parent: bytes, tokens: NDArray[np.int32], page_size: int) -> list[bytes]:
    """Returns the keys of the whole pages that `tokens` fill after the page (or root) `parent`."""
    data, keys, page_bytes = tokens.tobytes(), [], page_size * TOKEN_DTYPE.itemsize
    for end in range(page_bytes, len(data) + 1, page_bytes):
        parent = sha256(parent + data[end - page_bytes : end]).digest()
        keys.append(parent)
    return keys


_NUM_SAMPLES = 8  # per file
_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100 * 2**20  # limit of the format


class Digest(Protocol):
    """The interface of hashlib's objects."""

    def update(self, data: bytes, /) -> None: ...


def model_identity(folder: Path, *details: str) -> bytes:
    """Returns 32 bytes that are the same for the same checkpoint and `details` (dtype, kernels,
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
    """Adds the header of a safetensors file and samples of its values."""
    size = regular_file(path).stat().st_size
    with path.open("rb") as file:
        num_header_bytes = int.from_bytes(file.read(8), "little")
        digest.update(file.read(min(num_header_bytes, _MAX_HEADER_BYTES)))
        for i in range(_NUM_SAMPLES):
            file.seek(i * max(0, size - _SAMPLE_BYTES) // max(1, _NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
