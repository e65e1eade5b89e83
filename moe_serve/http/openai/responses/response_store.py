"""Stores responses in memory, and runs background responses.

The store is limited in number, bytes and age. GET and previous_response_id read it. An entry
belongs to the API key that created it. For every other key it does not exist.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moe_serve.http.gate.key_limits import current_account
from moe_serve.http.openai.responses.input_items import Item
from moe_serve.http.openai.responses.response_run import ResponseRun
from moe_serve.http.schema.api_error import ApiError, to_api_error


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A stored response. All fields are JSON text, so that their size is known.

    `history` has the items before the request, `items` those of the request and `output` those of
    the answer: each is the inside of a JSON list.
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
    """Keeps the newest responses. The oldest are removed beyond the limits of number and bytes.

    A running response does not expire, and finished ones are removed before it: otherwise it could
    no longer be read or cancelled. `on_loss` is called if a running response is removed
    nevertheless.
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
        """Stores the entry as the newest one. An entry larger than the whole store is not
        stored."""
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
        """Replaces the entry with the same id, unless it has been deleted meanwhile."""
        if entry.id in self._entries:
            self.put(entry)

    def get(self, response_id: str, owner: str, *, param: str | None = None) -> StoredResponse:
        """Returns the owner's entry. Otherwise raises a 404, whether or not another key owns it."""
        self._drop_expired()
        found = self._entries.get(response_id)
        if found is None or found[1].owner != owner:
            raise ApiError(
                404,
                f"The response {response_id[:80]!r} does not exist: it was not stored, has "
                "expired, or belongs to another API key.",
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
        """Removes expired entries. Entries are in the order of their times."""
        deadline, expired = self._clock() - self._ttl_s, []
        for response_id, (since, entry) in self._entries.items():
            if since > deadline:
                break
            if entry.is_ended:
                expired.append(response_id)
        for response_id in expired:
            self._forget(response_id)

    def _push_out(self) -> None:
        """Removes the oldest finished entry; if all are running, the oldest entry."""
        ended = (name for name, (_, entry) in self._entries.items() if entry.is_ended)
        oldest = next(ended, None) or next(iter(self._entries))
        is_loss = not self._entries[oldest][1].is_ended
        self._forget(oldest)
        if is_loss:
            self._on_loss(oldest)


_LOGGER = logging.getLogger(__name__)


class ResponseKeeper:
    """Stores one response under its owner, and updates it while it runs."""

    def __init__(
        self, store: ResponseStore, owner: str, history: bytes, items: Sequence[Item]
    ) -> None:
        self._store, self._owner, self._history = store, owner, history
        self._items = _inside(items)

    def has(self, response_id: str) -> bool:
        return self._store.has(response_id)

    def keep(self, response: dict[str, Any], *, is_new: bool) -> None:
        entry = StoredResponse(
            id=response["id"],
            owner=self._owner,
            response=msgspec.json.encode(response),
            history=self._history,
            items=self._items,
            output=_inside(response["output"]),
            is_ended=response["status"] != "in_progress",
        )
        if is_new:
            self._store.put(entry)
        else:
            self._store.replace(entry)


class BackgroundRuns:
    """The running responses with `background: true`, by response id."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, run: ResponseRun, keeper: ResponseKeeper) -> dict[str, Any]:
        """Starts a run and returns its response object, which is already stored.

        Raises ApiError if the store has no room for it: a response that is not stored could not be
        read or cancelled.
        """
        response = run.record.as_json("in_progress", ())
        keeper.keep(response, is_new=True)
        if not keeper.has(run.record.id):
            run.chat.close()
            raise _no_room()
        task = asyncio.get_running_loop().create_task(_run(run, keeper))
        self._tasks[run.record.id] = task
        account = current_account()
        if account is not None:
            account.hold()

        def end(_: asyncio.Task[None]) -> None:
            run.chat.close()  # not in the task, which may be cancelled before it starts
            self._tasks.pop(run.record.id, None)
            if account is not None:
                account.end()

        task.add_done_callback(end)
        return response

    def end(self, response_id: str) -> None:
        """Cancels a run whose response is no longer stored. It has no effect if the run has
        ended."""
        task = self._tasks.get(response_id)
        if task is not None:
            task.cancel()

    async def cancel(self, response_id: str) -> None:
        """Cancels a run and waits until its result is stored. It has no effect if the run has
        ended."""
        task = self._tasks.get(response_id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})


async def _run(run: ResponseRun, keeper: ResponseKeeper) -> None:
    try:
        async for _ in run.events():
            continue
        keeper.keep(run.result, is_new=False)
    except asyncio.CancelledError:
        keeper.keep(run.cancelled(), is_new=False)
    except Exception as error:  # the top of a task: any error is stored for the client
        keeper.keep(run.failed(_logged(error)), is_new=False)


def _no_room() -> ApiError:
    return ApiError(
        400,
        "background: true requires that the response is stored, but this server has no room for "
        "it (server.max_stored_responses, server.stored_responses_bytes). Send the request "
        "without background.",
        code="invalid_value",
        param="background",
    )


def _logged(error: Exception) -> ApiError:
    api_error = to_api_error(error)
    if api_error.code == "internal_error":
        _LOGGER.exception("a background response failed")
    return api_error


def _inside(items: Sequence[Any]) -> bytes:
    """Returns the items as the inside of a JSON list, without the brackets."""
    return msgspec.json.encode(items)[1:-1]
