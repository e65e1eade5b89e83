"""A row of the metrics table: a metric's name, kind, help text, labels and getter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from moe_serve.cache.histogram import Histogram
from moe_serve.http.metrics.finished_sequence import FinishedSequence
from moe_serve.http.metrics.scrape import Scrape

PREFIX = "moe_serve:"  # of every metric's name
MODEL_LABEL = "model_name"  # on every metric

Kind = Literal["gauge", "counter", "histogram"]
Samples = Mapping[tuple[str, ...], float | None]  # values of the labels -> value
Value = float | Samples | Histogram
Buckets = tuple[float, ...]
PartT = TypeVar("PartT")
Getter = Callable[[PartT], Value | None]


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric. Labels come from closed sets: never a rank or anything that a client sends.

    `get` returns None if the server does not have the metric. A sample of None is not known and is
    left out; the metric itself stays.
    """

    name: str  # without the prefix, and without the `_total` of a counter's samples
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()  # beside the model's
    get: Getter[Scrape] | None = None  # None: ServerMetrics observes the metric
    of_request: Callable[[FinishedSequence], float | None] | None = None  # value to observe
    buckets: Buckets = ()  # upper ends, of a histogram that is observed
    is_vllm: bool = False  # vLLM has the same metric under this name

    @property
    def is_observed(self) -> bool:
        return self.get is None

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names that its samples have on the page, without the prefix."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{end}" for end in ("bucket", "count", "sum"))
        return (f"{self.name}_total",) if self.kind == "counter" else (self.name,)


class ScrapePart(Generic[PartT]):
    """Makes the rows of one part of a scrape. A server without the part has none of its metrics."""

    def __init__(
        self, of: Callable[[Scrape], PartT | None], prefix: str = "", *, is_vllm: bool = False
    ) -> None:
        self._of, self._prefix, self._is_vllm = of, prefix, is_vllm

    def gauge(self, name: str, text: str, get: Getter[PartT], *labels: str) -> MetricRow:
        return self._row(name, "gauge", text, get, labels)

    def counter(self, name: str, text: str, get: Getter[PartT], *labels: str) -> MetricRow:
        return self._row(name, "counter", text, get, labels)

    def histogram(self, name: str, text: str, get: Callable[[PartT], Histogram]) -> MetricRow:
        return self._row(name, "histogram", text, get, ())

    def _row(
        self, name: str, kind: Kind, text: str, get: Getter[PartT], labels: tuple[str, ...]
    ) -> MetricRow:
        def read(scrape: Scrape) -> Value | None:
            part = self._of(scrape)
            return None if part is None else get(part)

        return MetricRow(self._prefix + name, kind, text, labels, read, is_vllm=self._is_vllm)
