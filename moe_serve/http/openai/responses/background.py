"""Runs background responses, and stores responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from moe_serve.http.gate.key_limits import current_account
from moe_serve.http.openai.responses.input_items import Item
from moe_serve.http.openai.responses.run import ResponseRun
from moe_serve.http.openai.responses.store import ResponseStore, StoredResponse
from moe_serve.http.schema.errors import ApiError, to_api_error

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
    """The items as the inside of a JSON list, without the brackets."""
    return msgspec.json.encode(items)[1:-1]
