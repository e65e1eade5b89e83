"""The forecast of a request's first token, and the refusal of one that would come too late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moe_serve.engine.request.service_terms import Service


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenForecast:
    """Seconds from the arrival to the first token. `p90_s` holds in nine of ten cases, as measured
    on the requests so far."""

    predicted_s: float
    p90_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that cannot keep its target: the prediction, the target, and when it would fit."""

    predicted_ttft_s: float  # cautious: nine of ten requests get their first token by then
    target_ttft_s: float
    retry_after_s: float


class AdmissionCheck(Protocol):
    """Decides on new requests before they are queued, on the event loop's thread. Implemented by
    `moe_serve.engine.service.admission.Admission`; tests use fakes."""

    def forecast(
        self, service: Service, num_prompt_tokens: int, priority: int = 0
    ) -> FirstTokenForecast | None:
        """Predicts the first token of a request that would be queued now; None until the engine has
        measured a step."""
        ...

    def check(self, service: Service, num_prompt_tokens: int, priority: int = 0) -> Refusal | None:
        """Returns why a strict or sheddable request is refused. None means that it is accepted, and
        counts as queued from now on.
        """
        ...
