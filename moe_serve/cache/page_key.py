"""Names a page's content by a chain of SHA-256 hashes from the root to the page.

    root          = sha256(model identity, adapter, salt)
    key of page i = sha256(key of page i - 1, its token ids)        page -1 is the root

Two pages have the same key only if model, adapter, salt and every token up to the page's end are
the same, so a key also names the content to another rank or a slower tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

TOKEN_DTYPE = np.dtype("<i4")


def root_key(model_identity: bytes, adapter_id: int, cache_salt: str) -> bytes:
    """Return the key before the first page.

    Each part is hashed with its length, so that parts cannot be confused: ("ab", "c") is 2 ab 1 c,
    and ("a", "bc") is 1 a 2 bc.
    """
    digest = sha256()
    salt = cache_salt.encode("utf-8", "surrogatepass")
    for part in (model_identity, str(adapter_id).encode(), salt):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def token_array(token_ids: Sequence[int]) -> NDArray[np.int32]:
    """Return token ids in the form in which keys hash them."""
    return np.array(token_ids, dtype=TOKEN_DTYPE)


def page_key(parent: bytes, tokens: NDArray[np.int32]) -> bytes:
    """Return the key of one page after the page (or root) `parent`; it may hold fewer
    tokens than others.
    """
    return sha256(parent + tokens.tobytes()).digest()


def following_keys(parent: bytes, tokens: NDArray[np.int32], page_size: int) -> list[bytes]:
    """Return the keys of the whole pages that `tokens` fill after the page (or root) `parent`."""
    data, keys, page_bytes = tokens.tobytes(), [], page_size * TOKEN_DTYPE.itemsize
    for end in range(page_bytes, len(data) + 1, page_bytes):
        parent = sha256(parent + data[end - page_bytes : end]).digest()
        keys.append(parent)
    return keys
