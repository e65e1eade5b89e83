"""Outcomes of requests and their recent token times. Filled together with the metrics."""

from __future__ import annotations

from moe_serve.engine.request.request import FinishReason
from moe_serve.http.metrics.recent_times import RecentTimes
from moe_serve.http.metrics.token_gaps import TokenGaps


class RecentRequests:
    """Written on the event loop's thread, read by any thread."""

    def __init__(self, gaps: TokenGaps) -> None:
        self.num_finished = self.num_failed = self.num_rejected = 0
        self.first_tokens = RecentTimes()  # from a request to its first token
        self.next_tokens = gaps  # between two tokens of a sequence: each token counts

    def ended(self, reason: FinishReason) -> None:
        """Counts a finished sequence. One whose client disconnected is neither finished nor
        failed."""
        self.num_finished += reason in (FinishReason.STOP, FinishReason.LENGTH)
        self.num_failed += reason is FinishReason.ERROR
