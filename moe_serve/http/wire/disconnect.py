"""Stops work when the client has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has disconnected. Call it only after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def run_until_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """The result of `work`, or None (with `work` cancelled) if the client disconnects first."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await cancel_all(working, watching)


async def cancel_all(*tasks: asyncio.Task[Any]) -> None:
    """Cancels the tasks and waits until they have ended, whatever their results."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
