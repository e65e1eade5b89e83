"""Answers the lines of a batch: by a server at a URL, or by the application in this process."""

from __future__ import annotations

import asyncio
import json
import math
import random
from types import TracebackType

import httpx

from moe_serve.cli.client.server_client import ServerAddress, is_distrust, no_connection, trusted
from moe_serve.cli.run_batch.batch_output import BatchLine, BatchRow
from moe_serve.errors import ConfigError, EngineDeadError

OWN_URL = "http://moe-serve"  # of the application in this process
NUM_TRIES = 6  # of a line whose connection broke, or that a full queue refused
_MAX_WAIT_S = 30.0
_RETRIED = frozenset({429, 503})
_JSON = {"Content-Type": "application/json"}
_HEALTH_PATHS = ("/health/live", "/v1/models")  # asked of moe-serve, and of any other server


class BatchTarget:
    """Sends lines to a server. Use `async with`."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        pause_s: float = 0.5,
    ) -> None:
        self._pause_s = pause_s  # before the second try; it doubles with each
        address = ServerAddress.parse(url, api_key)
        self.url = address.url
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=address.headers,
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
            verify=trusted(),
            trust_env=address.uses_proxies,
        )

    async def __aenter__(self) -> BatchTarget:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def check(self) -> None:
        """Raises EngineDeadError if the server does not answer, ConfigError if the key is wrong."""
        try:
            answer = await self._client.get("/v1/models")
        except httpx.HTTPError as error:
            if is_distrust(error):
                raise ConfigError(no_connection(str(self.url), error)) from None
            raise self._gone() from None
        if answer.status_code in (401, 403):
            raise ConfigError(f"{self.url} refuses the API key: give --api-key KEY, or @FILE.")

    async def send(self, line: BatchLine) -> BatchRow:
        """Returns the row of the line. Raises EngineDeadError if the server is gone, so that no row
        is written for lines that another run may still get answered."""
        # In ASCII: the server is to refuse half of a surrogate pair, or NaN.
        content = json.dumps(dict(line.body)).encode()
        problem = ""
        for attempt in range(NUM_TRIES):
            wait_s = min(_MAX_WAIT_S, self._pause_s * 2**attempt) * random.uniform(0.5, 1.0)
            is_last = attempt == NUM_TRIES - 1
            try:
                answer = await self._client.post(line.url, content=content, headers=_JSON)
            except httpx.HTTPError as error:
                problem = str(error) or type(error).__name__
                await asyncio.sleep(0 if is_last else wait_s)
                continue
            if is_last or answer.status_code not in _RETRIED:
                return _row(line, answer)
            await asyncio.sleep(max(wait_s, _asked_wait_s(answer)))
        if not await self._is_there():
            raise self._gone()
        return BatchRow(
            number=line.number,
            custom_id=line.custom_id,
            error_code="connection_error",
            error_message=f"the connection broke {NUM_TRIES} times: {problem}.",
        )

    async def _is_there(self) -> bool:
        for path in _HEALTH_PATHS:
            try:
                answer = await self._client.get(path)
            except httpx.HTTPError:
                return False
            if answer.status_code != 404:
                return answer.status_code < 500
        return True

    def _gone(self) -> EngineDeadError:
        return EngineDeadError(
            f"no server answers at {self.url}. What was answered is kept: start the server, and "
            "run the same command again."
        )


def _row(line: BatchLine, answer: httpx.Response) -> BatchRow:
    try:
        body = answer.json()
    except ValueError:
        body = answer.text
    return BatchRow(
        number=line.number,
        custom_id=line.custom_id,
        status=answer.status_code,
        request_id=answer.headers.get("x-request-id", ""),
        body=body,
    )


def _asked_wait_s(answer: httpx.Response) -> float:
    """Returns the seconds that `Retry-After` requests, within reason."""
    try:
        seconds = float(answer.headers.get("retry-after", "0"))
    except ValueError:
        return 0.0
    return min(_MAX_WAIT_S, seconds) if math.isfinite(seconds) and seconds > 0 else 0.0
