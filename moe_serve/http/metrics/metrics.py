"""Observes the requests of a server for its metrics.

Metrics are named `moe_serve:` plus the suffixes that vLLM's dashboards use. Labels come from closed
sets only, so the page does not grow with the requests of clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric

from moe_serve.engine.request.request import FinishReason
from moe_serve.http.gate.key_limits import KeyRefusal
from moe_serve.http.metrics.finished_sequence import FinishedSequence
from moe_serve.http.metrics.recent import RecentRequests
from moe_serve.http.metrics.scrape import MODEL_LABEL, PREFIX
from moe_serve.http.metrics.table import METRICS

_ROUTES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
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
        "/server_info",
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

CallOutcome = Literal["calls", "none", "malformed"]  # the result of parsing a message for calls
RejectionReason = (
    Literal["queue_full", "draining", "engine_dead", "deadline_unmeetable"] | KeyRefusal
)


class ServerMetrics:
    """The metrics of one server that are observed as they happen. The page reads all others from
    snapshots at scrape time."""

    def __init__(self, model_name: str, tool_parser: str | None = None) -> None:
        """`tool_parser`: the name of the parser that looks for tool calls, if there is one."""
        self.model_name = model_name
        self._histograms = _histograms()
        self._counters = _counters()
        self._ttft = self._histogram("time_to_first_token_seconds")
        self._e2e = self._histogram("e2e_request_latency_seconds")
        self._lag = self._histogram("event_loop_lag_seconds")
        self._longest = self._histogram("request_max_num_generation_tokens")
        self._of_request = [
            (self._histogram(row.name), row.of_request)
            for row in METRICS
            if row.of_request is not None
        ]
        self._http_seconds = self._histograms["http_request_duration_seconds"]
        self._http = self._counters["http_requests"]
        self._success = self._counters["request_success"]
        self._rejections = self._counters["admission_rejections"]
        self._windowed = self._counters["kv_window_requests"].labels(model_name)
        self._dropped = self._counters["kv_window_dropped_tokens"].labels(model_name)
        self._parsed = self._parsed_messages(tool_parser)
        self.recent = RecentRequests()

    def collect(self, name: str) -> Iterator[Metric]:
        """Yields the metric with this name, if the server has it."""
        observed = self._histograms.get(name) or self._counters.get(name)
        for metric in () if observed is None else observed.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric

    def observe_first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)
        self.recent.first_tokens.add(seconds)

    def observe_next_tokens(self, seconds: float, num_tokens: int, now: float) -> None:
        """Observes `num_tokens` tokens that came together, `seconds` after the previous ones."""
        self.recent.next_tokens.observe(seconds / num_tokens, num_tokens, now)

    def observe_finished(self, sequence: FinishedSequence) -> None:
        """Observes a sequence that has ended by itself. See also `count_abandoned`."""
        for histogram, value_of in self._of_request:
            value = value_of(sequence)
            if value is not None:
                histogram.observe(value)
        self.observe_end(sequence.ended - sequence.arrival, sequence.reason)

    def observe_longest(self, num_tokens: int) -> None:
        """Observes the length of a prompt's longest choice, when all choices have ended."""
        self._longest.observe(num_tokens)

    def observe_end(self, seconds: float, reason: FinishReason) -> None:
        self._e2e.observe(seconds)
        self.recent.ended(reason)
        self._success.labels(self.model_name, reason.value).inc()

    def observe_loop_lag(self, seconds: float) -> None:
        self._lag.observe(seconds)

    def count_abandoned(self) -> None:
        """Counts a sequence whose client disconnected. Its duration is not observed."""
        self._success.labels(self.model_name, FinishReason.ABORT.value).inc()

    def count_window(self, num_dropped_tokens: int) -> None:
        """Counts a sequence with a `kv_window` that has ended, and the tokens whose pages it gave
        back before."""
        self._windowed.inc()
        self._dropped.inc(num_dropped_tokens)
        self.recent.num_windowed += 1
        self.recent.num_dropped_tokens += num_dropped_tokens

    def count_rejection(self, reason: RejectionReason) -> None:
        self._rejections.labels(self.model_name, reason).inc()
        self.recent.num_rejected += 1

    def count_parsed_message(self, outcome: CallOutcome) -> None:
        """Counts a finished message that was parsed for calls."""
        assert self._parsed, "only a parser with a name looks for calls"
        self._parsed[outcome].inc()

    def count_http_request(self, path: str, status: int | None, seconds: float) -> None:
        """Counts an HTTP request. `status` None: the client disconnected before an answer."""
        status_label, route = "none" if status is None else str(status), route_label(path)
        self._http.labels(self.model_name, route, status_label).inc()
        self._http_seconds.labels(self.model_name, route).observe(seconds)

    def _histogram(self, name: str) -> Histogram:
        """Returns the series of a histogram without further labels."""
        return self._histograms[name].labels(self.model_name)

    def _parsed_messages(self, parser: str | None) -> dict[CallOutcome, Counter]:
        counter = self._counters["tool_call_parser_invocations"]
        if parser is None:
            del self._counters["tool_call_parser_invocations"]
            return {}
        outcomes: tuple[CallOutcome, ...] = get_args(CallOutcome)
        return {o: counter.labels(self.model_name, parser, o) for o in outcomes}


def _histograms() -> dict[str, Histogram]:
    return {
        row.name: Histogram(
            PREFIX + row.name,
            row.help,
            [MODEL_LABEL, *row.labels],
            registry=None,
            buckets=row.buckets,
        )
        for row in METRICS
        if row.is_observed and row.kind == "histogram"
    }


def _counters() -> dict[str, Counter]:
    return {
        row.name: Counter(PREFIX + row.name, row.help, [MODEL_LABEL, *row.labels], registry=None)
        for row in METRICS
        if row.is_observed and row.kind == "counter"
    }


def route_label(path: str) -> str:
    """Returns the route of a path for labels. All unknown paths share one label."""
    if path in _ROUTES:
        return path
    for family in ("/v1/models/", "/v1/responses/", "/dashboard/assets/"):
        if path.startswith(family):
            return family + "{id}"
    return "other"
