"""Responses in memory, for GET and previous_response_id: bounded in number, bytes and age.

An entry belongs to the API key that made it; for every other key it does not exist.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.http.schema.errors import ApiError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """Everything is JSON already, so that its size is known.

    `history` are the items before the request's own, `items` its own, `output` the answer's: each
    the inside of a JSON list.
    """

    id: str
    owner: str
    response: bytes
    history: bytes
    items: bytes
    output: bytes
    is_ended: bool = True

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.history) + len(self.items) + len(self.output)

    @property
    def conversation(self) -> bytes:
        """All items up to the end of the answer, as a JSON list."""
        parts = (self.history, self.items, self.output)
        return b"[" + b",".join(part for part in parts if part) + b"]"


class ResponseStore:
    """The oldest entries leave when there are too many, or too many bytes.

    What still runs stays as long as something else can leave, and does not expire: nobody could
    read or cancel it any more. `on_loss` is told of one that leaves all the same.
    """

    def __init__(
        self,
        *,
        max_entries: int,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_loss: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._max_entries, self._max_bytes, self._ttl_s = max_entries, max_bytes, ttl_s
        self._clock, self._on_loss = clock, on_loss
        self._entries: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: StoredResponse) -> None:
        """Keep the entry, as the newest. One larger than the whole store is not kept."""
        self._forget(entry.id)
        if entry.num_bytes > self._max_bytes:
            return
        self._entries[entry.id] = (self._clock(), entry)
        self.num_bytes += entry.num_bytes
        self._drop_expired()
        while self._entries and (
            len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes
        ):
            self._push_out()

    def has(self, response_id: str) -> bool:
        return response_id in self._entries

    def replace(self, entry: StoredResponse) -> None:
        """Put it in the place of the one with its id, unless that has been deleted meanwhile."""
        if entry.id in self._entries:
            self.put(entry)

    def get(self, response_id: str, owner: str, *, param: str | None = None) -> StoredResponse:
        """The owner's entry; raises a 404 that does not tell others' entries from none."""
        self._drop_expired()
        found = self._entries.get(response_id)
        if found is None or found[1].owner != owner:
            raise ApiError(
                404,
                f"There is no response {response_id[:80]!r}: it was not stored, has expired, or "
                "belongs to another key.",
                code="response_not_found",
                param=param,
            )
        return found[1]

    def delete(self, response_id: str, owner: str) -> None:
        self.get(response_id, owner)
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        found = self._entries.pop(response_id, None)
        if found is not None:
            self.num_bytes -= found[1].num_bytes

    def _drop_expired(self) -> None:
        """Entries are in the order of their times."""
        deadline, expired = self._clock() - self._ttl_s, []
        for response_id, (since, entry) in self._entries.items():
            if since > deadline:
                break
            if entry.is_ended:
                expired.append(response_id)
        for response_id in expired:
            self._forget(response_id)

    def _push_out(self) -> None:
        """The oldest that has ended, or where there is none the oldest."""
        ended = (name for name, (_, entry) in self._entries.items() if entry.is_ended)
        oldest = next(ended, None) or next(iter(self._entries))
        is_loss = not self._entries[oldest][1].is_ended
        self._forget(oldest)
        if is_loss:
            self._on_loss(oldest)
