"""A span exporter that counts the spans that have arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult


class CountedExporter:
    """Implements SpanExporter without its base class, which needs the extra `otel`.

    The sending thread writes `num_sent`.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.num_sent = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.num_sent += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)
