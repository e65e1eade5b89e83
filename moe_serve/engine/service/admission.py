"""Decides whether a new request can keep its target for the first token, before it is queued.

The decision uses the last snapshot that the engine published, plus the requests that were accepted
since. It runs on the thread of the event loop.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from moe_serve.engine.request.first_token import FirstTokenForecast, Refusal
from moe_serve.engine.request.service import Service
from moe_serve.engine.service.forecast import QueueSnapshot

LEAST_RETRY_S = 0.1
_LIFE = 2  # snapshots after which an accepted request is in the snapshot itself


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A request that may not be in the snapshot yet."""

    version: int  # of the snapshot when it was accepted
    seconds: float


class Admission:
    """Implements AdmissionCheck for one engine. `publish` is called by the engine's thread,
    everything else by the event loop's."""

    def __init__(self, priority_s: float = 5.0, default_slack_s: float = 90.0) -> None:
        """`priority_s`: seconds by which one level of priority moves the deadline.
        `default_slack_s`: that of a request without a target."""
        self._priority_s, self._default_slack_s = priority_s, default_slack_s
        self._snapshot = QueueSnapshot()
        self._accepted: deque[_Accepted] = deque()
        self._refused: Counter[str] = Counter()

    def publish(self, snapshot: QueueSnapshot) -> None:
        """Replace the snapshot."""
        self._snapshot = snapshot

    def num_refused(self, tier: str) -> int:
        """Return how many requests of a tier were refused. Safe from any thread."""
        return self._refused[tier]

    def forecast(
        self, service: Service, num_prompt_tokens: int, priority: int = 0
    ) -> FirstTokenForecast | None:
        """See `AdmissionCheck.forecast`."""
        snapshot = self._snapshot
        if not snapshot.is_measured:
            return None
        targets = service.targets
        slack_s = targets.ttft_s if targets.ttft_s is not None else targets.e2e_s
        if slack_s is None:
            slack_s = self._default_slack_s
        self._forget(snapshot)
        return snapshot.first_token(
            num_prompt_tokens,
            slack_s + self._priority_s * priority,
            more_s=sum([each.seconds for each in self._accepted]),
            num_more=len(self._accepted),
        )

    def check(self, service: Service, num_prompt_tokens: int, priority: int = 0) -> Refusal | None:
        """See `AdmissionCheck.check`."""
        forecast = self.forecast(service, num_prompt_tokens, priority)
        target_s = service.targets.ttft_s
        may_refuse = service.targets.is_strict or service.is_sheddable
        if forecast is not None and target_s is not None and may_refuse:
            late_s = forecast.p90_s - target_s
            if late_s > 0:
                self._refused[service.tier] += 1
                return Refusal(
                    predicted_ttft_s=forecast.p90_s,
                    target_ttft_s=target_s,
                    retry_after_s=max(LEAST_RETRY_S, late_s),
                )
        snapshot = self._snapshot
        seconds = num_prompt_tokens * snapshot.token_s
        self._accepted.append(_Accepted(snapshot.version, seconds))
        return None

    def _forget(self, snapshot: QueueSnapshot) -> None:
        while self._accepted and self._accepted[0].version + _LIFE <= snapshot.version:
            self._accepted.popleft()
