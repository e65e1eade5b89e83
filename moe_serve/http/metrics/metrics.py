"""Prometheus metrics, named `moe_serve:` plus the suffixes that vLLM's dashboards use.

Counters that the engine keeps are read from its snapshot at scrape time. Labels come from closed
sets only, so the page does not grow with the requests of clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric

from moe_serve.config.sections import MetricsAlias
from moe_serve.engine.request.client import EngineClient
from moe_serve.engine.request.request import FinishReason
from moe_serve.engine.routes.placement_control import PlacementControl
from moe_serve.engine.tracing import Tracing
from moe_serve.http.gate.key_limits import KeyRefusal
from moe_serve.http.metrics.collectors import EngineCollector
from moe_serve.http.metrics.engine_families import NO_CACHE_FACTS, CacheFacts
from moe_serve.http.metrics.family_maker import PREFIX
from moe_serve.http.metrics.finished_sequence import FinishedSequence
from moe_serve.http.metrics.metrics_alias import with_alias
from moe_serve.http.metrics.recent import RecentRequests, TokenGaps
from moe_serve.http.metrics.request_families import RequestHistograms

_ROUTES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/health",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/render",
        "/v1/completions/render",
        "/v1/tokenize",
        "/v1/detokenize",
        "/invocations",
        "/tokenize",
        "/tokenizer_info",
        "/detokenize",
        "/version",
        "/load",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/ping",
        "/startup",
        "/admin/hang",
        "/openapi.json",
        "/admin/placement",
        "/admin/placement/plan",
        "/admin/placement/rebalance",
        "/admin/trace/start",
        "/admin/trace/stop",
        "/admin/trace/status",
        "/dashboard",
        "/dashboard/playground",
        "/dashboard/state",
    }
)
_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)

_HTTP_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0)

CallOutcome = Literal["calls", "none", "malformed"]  # the result of parsing a message for calls
RejectionReason = Literal["queue_full", "draining", "engine_dead"] | KeyRefusal


class _Registry(CollectorRegistry):
    """A registry without the unused `_created` series of counters and histograms."""

    def __init__(self, alias: MetricsAlias) -> None:
        super().__init__()
        self._alias = alias

    def collect(self) -> Iterator[Metric]:
        return with_alias(self._own(), PREFIX) if self._alias == "vllm" else self._own()

    def _own(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class ServerMetrics:
    """All metrics of one server, in its own registry."""

    def __init__(
        self,
        engine: EngineClient,
        model_name: str,
        tracing: Tracing | None = None,
        placement: PlacementControl | None = None,
        alias: MetricsAlias = "none",
        cache: CacheFacts = NO_CACHE_FACTS,
        tool_parser: str | None = None,
    ) -> None:
        """`tool_parser`: the name of the parser that looks for tool calls, if there is one."""
        self.registry = _Registry(alias)
        self._model_name = model_name
        self.registry.register(EngineCollector(engine, model_name, tracing, placement, cache))
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _TTFT_BUCKETS
        )
        self._itl = TokenGaps(
            PREFIX + "inter_token_latency_seconds",
            "Between two tokens of a sequence.",
            model_name,
            _ITL_BUCKETS,
        )
        self.registry.register(self._itl)
        self.recent = RecentRequests(self._itl)
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From the request to its last token.", _E2E_BUCKETS
        )
        self._lag = self._histogram(
            "event_loop_lag_seconds", "Delay of the event loop's clock ticks.", _LAG_BUCKETS
        )
        self._requests = RequestHistograms(self.registry, PREFIX, model_name)
        self._success = self._counter(
            "request_success", "Sequences that ended.", ["finished_reason"]
        )
        self._rejections = self._counter(
            "admission_rejections", "Requests that were not accepted.", ["reason"]
        )
        self._parsed = None if tool_parser is None else self._parsed_messages(tool_parser)
        self._http = self._counter("http_requests", "HTTP requests.", ["route", "status"])
        self._http_seconds = Histogram(
            PREFIX + "http_request_duration_seconds",
            "From an HTTP request to the end of its answer.",
            ["model_name", "route"],
            registry=self.registry,
            buckets=_HTTP_BUCKETS,
        )

    def observe_first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)
        self.recent.first_tokens.add(seconds)

    def observe_next_tokens(self, seconds: float, num_tokens: int, now: float) -> None:
        """Observes `num_tokens` tokens that came together, `seconds` after the previous ones."""
        self._itl.observe(seconds / num_tokens, num_tokens, now)

    def observe_finished(self, sequence: FinishedSequence) -> None:
        """Observes a sequence that has ended by itself. See also `count_abandoned`."""
        self._requests.observe(sequence)
        self.observe_end(sequence.ended - sequence.arrival, sequence.reason)

    def observe_longest(self, num_tokens: int) -> None:
        """Observes the length of a prompt's longest choice, when all choices have ended."""
        self._requests.observe_longest(num_tokens)

    def observe_end(self, seconds: float, reason: FinishReason) -> None:
        self._e2e.observe(seconds)
        self.recent.ended(reason)
        self._success.labels(self._model_name, reason.value).inc()

    def observe_loop_lag(self, seconds: float) -> None:
        self._lag.observe(seconds)

    def count_abandoned(self) -> None:
        """Counts a sequence whose client disconnected. Its duration is not observed."""
        self._success.labels(self._model_name, FinishReason.ABORT.value).inc()

    def count_rejection(self, reason: RejectionReason) -> None:
        self._rejections.labels(self._model_name, reason).inc()
        self.recent.num_rejected += 1

    def count_parsed_message(self, outcome: CallOutcome) -> None:
        """Counts a finished message that was parsed for calls."""
        assert self._parsed is not None, "only a parser with a name looks for calls"
        self._parsed[outcome].inc()

    def count_http_request(self, path: str, status: int | None, seconds: float) -> None:
        """Counts an HTTP request. `status` None: the client disconnected before an answer."""
        status_label, route = "none" if status is None else str(status), route_label(path)
        self._http.labels(self._model_name, route, status_label).inc()
        self._http_seconds.labels(self._model_name, route).observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _parsed_messages(self, parser: str) -> dict[CallOutcome, Counter]:
        counter = self._counter(
            "tool_call_parser_invocations",
            "Messages parsed for tool calls; malformed: a call began but could not be parsed.",
            ["parser", "outcome"],
        )
        outcomes: tuple[CallOutcome, ...] = get_args(CallOutcome)
        return {o: counter.labels(self._model_name, parser, o) for o in outcomes}

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(
            PREFIX + name, text, ["model_name"], registry=self.registry, buckets=buckets
        )
        return family.labels(self._model_name)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(PREFIX + name, text, ["model_name", *labels], registry=self.registry)


def route_label(path: str) -> str:
    """The route of a path for labels. All unknown paths share one label."""
    if path in _ROUTES:
        return path
    for family in ("/v1/models/", "/v1/responses/", "/dashboard/assets/"):
        if path.startswith(family):
            return family + "{id}"
    return "other"
