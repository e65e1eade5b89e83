"""Asks a server for its model, its words-to-tokens ratio and its metrics, before and after a
run."""

from __future__ import annotations

import ssl
from typing import Any

import httpx

from moe_serve.bench.client.connection import Target
from moe_serve.bench.client.endpoint import Endpoint
from moe_serve.bench.client.server_metrics import Metrics
from moe_serve.bench.workload.prompt_maker import TextScale, probe_prompts
from moe_serve.errors import BenchServerError, plain

_METRICS_LIMIT_S = 5.0


class ServerProbe:
    """Sends the few requests of a probe, with an ordinary client. Close it, or use `async with`."""

    def __init__(self, target: Target, api_key: str | None, timeout_s: float) -> None:
        self._url = target.url
        self._client = httpx.AsyncClient(
            base_url=target.url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            trust_env=False,  # like the load: no proxy in between
            verify=ssl.create_default_context() if target.is_tls else False,  # used by the load too
        )

    async def __aenter__(self) -> ServerProbe:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.aclose()

    async def model(self) -> str:
        """Returns the name of the first model that the server serves."""
        answer = await self._ask("GET", "/v1/models")
        try:
            return plain(str(answer["data"][0]["id"]))
        except (LookupError, TypeError):
            raise BenchServerError(
                f"{self._url} lists no model at /v1/models: name one with --model."
            ) from None

    async def text_scale(self, endpoint: Endpoint, seed: int) -> TextScale | None:
        """Measures tokens per word with two one-token requests; None if the server reports no
        usage."""
        counts: list[tuple[int, int]] = []
        for num_words, text in probe_prompts(seed):
            body = endpoint.body(text, 1)
            answer = await self._ask("POST", endpoint.path, body)
            try:
                counts.append((num_words, int(answer["usage"]["prompt_tokens"])))
            except (LookupError, TypeError, ValueError):
                return None
        return TextScale.through(counts[0], counts[1])

    async def metrics(self) -> Metrics:
        """Returns the server's metrics; empty if it has none, as they are optional."""
        try:
            response = await self._client.get("/metrics", timeout=_METRICS_LIMIT_S)
            return Metrics.parse(response.text if response.status_code == 200 else "")
        except httpx.HTTPError:
            return Metrics(values={})

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> Any:
        try:
            response = await self._client.request(
                method, path, content=body, headers={"Content-Type": "application/json"}
            )
            answer = response.json()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise BenchServerError(f"no server answers at {self._url}: {error}.") from error
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise BenchServerError(f"the connection to {self._url} broke: {why}.") from None
        except ValueError:
            raise BenchServerError(
                f"{self._url} answers, but not like an OpenAI-compatible server "
                f"({response.status_code} without JSON at {path})."
            ) from None
        if response.is_error:
            raise BenchServerError(
                f"{self._url}{path} refused ({response.status_code}): {_message(answer)}"
            )
        return answer


def _message(answer: Any) -> str:
    inner = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = inner.get("message", inner) if isinstance(inner, dict) else inner
    return plain(str(message))
