"""Gets the figures of `moe-serve top`: from `/dashboard/state`, or from `/metrics` if the server
lacks it.

Both have the layout of `/dashboard/state`; figures that only that has are missing from `/metrics`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from moe_serve.bench.client.server_metrics import Metrics
from moe_serve.cli.server_client import NotReachedError, ServerClient
from moe_serve.errors import BLANKED, ConfigError


@dataclass(frozen=True, slots=True)
class StateView:
    """A JSON value; `at` follows names: answer.at("requests").number("running")."""

    content: Any

    def at(self, *names: str) -> StateView:
        content = self.content
        for name in names:
            content = content.get(name) if isinstance(content, Mapping) else None
        return StateView(content)

    @property
    def is_there(self) -> bool:
        return self.content is not None

    @property
    def items(self) -> list[StateView]:
        return [StateView(item) for item in self.content] if isinstance(self.content, list) else []

    def number(self, *names: str) -> float | None:
        content = self.at(*names).content
        is_number = isinstance(content, int | float) and not isinstance(content, bool)
        return float(content) if is_number else None

    def text(self, *names: str) -> str | None:
        """Returns the text without characters that could steer the terminal."""
        content = self.at(*names).content
        return content.translate(BLANKED) if isinstance(content, str) else None

    def numbers(self, *names: str) -> list[float]:
        """Returns the numbers of a list and skips other items."""
        found = [item.number() for item in self.at(*names).items]
        return [number for number in found if number is not None]


MAX_EVENTS = 200
_TIMEOUT_S = 5.0


class TopSource:
    """The source of figures from one server. Close it, or use `with`."""

    def __init__(
        self, url: str, api_key: str | None, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._server = ServerClient(url, api_key, _TIMEOUT_S, transport)
        self.url = self._server.url
        self.is_plain = False  # the server has /metrics only
        self._since = 0
        self._started: float | None = None
        self._events: list[Any] = []
        self._before: tuple[float, Metrics] | None = None

    def __enter__(self) -> TopSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.close()

    def fetch(self) -> StateView:
        """Returns the state now, with the events so far. Raises NotReachedError, ConfigError."""
        response = self._server.request("GET", f"/dashboard/state?since={self._since}")
        if response.status_code == 404:
            return self._from_metrics()
        self.is_plain = False
        try:
            state = StateView(self._checked(response).json())
        except ValueError:
            raise self._strange() from None
        if not state.at("requests").is_there:
            raise self._strange()
        return self._with_events(state)

    def _with_events(self, state: StateView) -> StateView:
        started, before = state.number("server", "started"), self._started
        if before is not None and started != before:  # its events are numbered anew
            # Once: behind a load balancer every answer may be of another server.
            self._since, self._events, self._started = 0, [], None
            return self.fetch()
        self._started = started
        news = state.at("events").items
        self._events = [*self._events, *(event.content for event in news)][-MAX_EVENTS:]
        self._since = int(max((event.number("seq") or 0 for event in news), default=self._since))
        return StateView({**state.content, "events": self._events})

    def _from_metrics(self) -> StateView:
        response = self._checked(self._server.request("GET", "/metrics"))
        metrics, now = Metrics.parse(response.text), time.monotonic()
        if metrics.total("engine_steps_total") is None:
            raise self._strange()
        before, self._before = self._before, (now, metrics)
        self.is_plain = True
        names = (dict(labels).get("model_name") for _, labels in metrics.values)
        model = next(filter(None, names), "?")
        return StateView(_state_of(model, metrics, now, before))

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.status_code == 401:
            raise ConfigError(f"{self.url} requires an API key: give --api-key KEY, or @FILE.")
        if response.is_error:
            raise NotReachedError(f"{self.url} answers with status {response.status_code}.")
        return response

    def _strange(self) -> NotReachedError:
        return NotReachedError(f"{self.url} answers, but not like moe-serve.")


def _state_of(
    model: str, metrics: Metrics, now: float, before: tuple[float, Metrics] | None
) -> Mapping[str, Any]:
    def per_second(name: str) -> list[float]:
        old = None if before is None else before[1].total(name)
        new = metrics.total(name)
        if before is None or old is None or new is None or now <= before[0]:
            return []
        return [max(0.0, new - old) / (now - before[0])]

    def mean_ms(name: str) -> Mapping[str, float] | None:
        count, total = metrics.total(f"{name}_count"), metrics.total(f"{name}_sum")
        return {"mean": 1e3 * total / count} if count and total is not None else None

    ends = metrics.by_label("request_success_total", "finished_reason")
    tier = {"name": "memory", "share": metrics.total("kv_cache_usage_perc")}
    recall = metrics.total("predictor_recall")
    version = metrics.total("placement_version")
    return {
        "server": {"name": "moe-serve", "model": model},
        "requests": {
            "running": metrics.total("num_requests_running"),
            "waiting": metrics.total("num_requests_waiting"),
            "finished_total": sum(ends.values()),
            "failed_total": ends.get("error", 0.0),
            "rejected_total": metrics.total("admission_rejections_total") or 0.0,
        },
        "tokens": {
            "prompt_total": metrics.total("prompt_tokens_total"),
            "generated_total": metrics.total("generation_tokens_total"),
        },
        "latency": {
            "ttft_ms": mean_ms("time_to_first_token_seconds"),
            "tpot_ms": mean_ms("inter_token_latency_seconds"),
        },
        "kv": {"tiers": [tier]},
        "history": {
            "prompt_per_s": per_second("prompt_tokens_total"),
            "generated_per_s": per_second("generation_tokens_total"),
        },
        "predictor": None if recall is None else {"recall": recall},
        "placement": None if version is None else {"version": version},
        "events": [],
    }
