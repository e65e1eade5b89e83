"""Encodes changes of a prefix cache as vLLM's KV events: one msgpack array per batch.

    [seconds since 1970, [event, ...], rank]

    BlockStored       hashes, parent's hash, token ids, block size, LoRA id, medium, LoRA name,
                      extra keys; the hashes are those of consecutive pages
    BlockRemoved      hashes, medium
    AllBlocksCleared

An event is an array that begins with its name (vLLM up to 0.23, and what every gateway reads), or a
mapping with the name as `type` (newer versions of vLLM). A hash is the last 64 bits of a page's key
as an integer, or all of its bytes. Pages that requests use are on the medium "GPU", on every
device: it means the memory that attention reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from moe_serve.cache.events.change_record import Changes, PublishedPage

EventEncoding = Literal["array", "map"]
BlockHash = Literal["int", "bytes"]
MEDIUM = "GPU"
_HASH_BYTES = 8
_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
_REMOVED = ("block_hashes", "medium")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventEncoder:
    """Encodes the batches of one rank."""

    rank: int
    page_size: int
    encoding: EventEncoding
    block_hash: BlockHash

    def batch(self, changes: Changes, seconds: float) -> bytes:
        """Returns the payload of one batch."""
        events = []
        if changes.is_cleared:
            events.append(self._event("AllBlocksCleared", (), ()))
        if changes.removed:
            hashes = [self._hash(key) for key in changes.removed]
            events.append(self._event("BlockRemoved", _REMOVED, (hashes, MEDIUM)))
        events += [self._stored(run) for run in _runs(changes.stored)]
        return msgspec.msgpack.encode([seconds, events, self.rank])

    def _stored(self, run: Sequence[PublishedPage]) -> object:
        first = run[0]
        parent, origin = first.parent_key, first.origin
        extra: list[list[str] | None] | None = None
        if parent is None and origin.salt:  # as in vLLM, only the first block of a prompt has it
            extra = [[origin.salt], *(None for _ in run[1:])]
        values = (
            [self._hash(page.key) for page in run],
            None if parent is None else self._hash(parent),
            np.concatenate([page.tokens for page in run]).tolist(),
            self.page_size,
            None,
            MEDIUM,
            origin.adapter,
            extra,
        )
        return self._event("BlockStored", _STORED, values)

    def _event(self, tag: str, names: Sequence[str], values: Sequence[Any]) -> object:
        """Builds an event. If the last value is None, the event does not contain it."""
        if values and values[-1] is None:
            names, values = names[:-1], values[:-1]
        if self.encoding == "map":
            return {"type": tag, **dict(zip(names, values, strict=True))}
        return [tag, *values]

    def _hash(self, key: bytes) -> int | bytes:
        return key if self.block_hash == "bytes" else int.from_bytes(key[-_HASH_BYTES:], "big")


def _runs(pages: Iterable[PublishedPage]) -> list[list[PublishedPage]]:
    """Returns the pages in runs, in which each page is the parent of the next."""
    runs: list[list[PublishedPage]] = []
    for page in pages:
        if runs and runs[-1][-1].key == page.parent_key:
            runs[-1].append(page)
        else:
            runs.append([page])
    return runs
