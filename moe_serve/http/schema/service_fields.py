"""The fields of a request that say how soon its answer is needed, and the headers with the same
meaning."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Protocol

from pydantic import Field

from moe_serve.config.tiers import MAX_TARGET_S, contradiction
from moe_serve.errors import InvalidRequestError
from moe_serve.http.schema.field_types import StrictSchema

MAX_TIER_CHARS = 64
MIN_TARGET_MS, MAX_TARGET_MS = 0.1, MAX_TARGET_S * 1000
HEADERS: Mapping[str, str] = {"x-slo-ttft-ms": "ttft_s", "x-slo-tpot-ms": "tpot_s"}  # llm-d's
Milliseconds = Annotated[float, Field(ge=MIN_TARGET_MS, le=MAX_TARGET_MS)]
ServiceTierName = Annotated[str, Field(max_length=MAX_TIER_CHARS)]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/\-]{1,64}$")]
_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")


class SloFields(StrictSchema):
    """The object `slo`: times that the answer should keep, from the arrival of the request."""

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    deadline_ms: Milliseconds | None = None
    strict: bool | None = None


class ServiceBody(Protocol):
    """A body that declares the fields of this module."""

    service_tier: str | None
    slo: SloFields | None
    workflow: str | None
    stage: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceWish:
    """The service that a request asks for. None or empty: it says nothing about it.

    `from_headers` has the targets that came from headers: proxies add these for every server.
    """

    tier: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    is_strict: bool = False
    workflow: str = ""
    stage: str = ""
    user: object = None  # as it was sent: most servers ignore it
    user_field: str = "user"
    from_headers: frozenset[str] = frozenset()
    unknown: Mapping[str, object] = field(default_factory=dict)  # further fields of `slo`

    @classmethod
    def of(cls, body: ServiceBody, *, user: object = None, user_field: str = "user") -> ServiceWish:
        """Raises InvalidRequestError for fields that contradict each other."""
        if body.stage is not None and body.workflow is None:
            raise InvalidRequestError("stage requires workflow.", param="stage")
        slo = body.slo or SloFields()
        _check_targets(slo)
        return cls(
            tier=body.service_tier,
            ttft_s=_seconds(slo.ttft_ms),
            tpot_s=_seconds(slo.tpot_ms),
            e2e_s=_seconds(slo.deadline_ms),
            is_strict=bool(slo.strict),
            workflow=body.workflow or "",
            stage=body.stage or "",
            user=user,
            user_field=user_field,
            unknown=slo.model_extra or {},
        )

    @property
    def fields(self) -> list[str]:
        """The names of the fields and headers beside `service_tier`, as the client knows them."""
        names = [header for header in HEADERS if HEADERS[header] in self.from_headers]
        own = {"ttft_s", "tpot_s", "e2e_s"} - self.from_headers
        if self.is_strict or any(getattr(self, name) is not None for name in own):
            names.append("slo")
        return names + [name for name in ("workflow", "stage") if getattr(self, name)]

    def name_of(self, target: str) -> str:
        """Returns the name of a target as the client wrote it, such as `slo.ttft_ms`."""
        if target in self.from_headers:
            return next(header for header, name in HEADERS.items() if name == target)
        return "slo.deadline_ms" if target == "e2e_s" else f"slo.{target.replace('_s', '_ms')}"

    def with_headers(self, headers: Mapping[str, str]) -> ServiceWish:
        """Adds the targets of headers. A field of the body counts more than a header."""
        added: dict[str, float] = {}
        for header, target in HEADERS.items():
            text = headers.get(header)
            if text is not None and getattr(self, target) is None:
                value = _header_ms(header, text)
                if value:
                    added[target] = value / 1000
        if not added:
            return self
        return replace(self, from_headers=frozenset(added), **added)  # type: ignore[arg-type]


NO_WISH = ServiceWish()


def _check_targets(slo: SloFields) -> None:
    found = contradiction(slo.ttft_ms, slo.tpot_ms, slo.deadline_ms)
    if found is not None:
        name, value = found[0].replace("_s", "_ms"), found[1]
        raise InvalidRequestError(
            f"slo.deadline_ms ({slo.deadline_ms:.10g}) must not be below slo.{name} "
            f"({value:.10g}): the last token cannot come before the first one.",
            param="slo.deadline_ms",
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _header_ms(header: str, text: str) -> float:
    """Returns the milliseconds of a header; 0, which llm-d sends for a request without a target, is
    allowed."""
    value = float(text) if _NUMBER.fullmatch(text.strip()) else None
    if value is None or not (value == 0 or MIN_TARGET_MS <= value <= MAX_TARGET_MS):
        raise InvalidRequestError(
            f"The header {header} must be a number of milliseconds in [{MIN_TARGET_MS:g}, "
            f"{MAX_TARGET_MS:.0f}], or 0 for no target; got {text[:40]!r}.",
            param=header,
        )
    return value
