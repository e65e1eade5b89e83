"""The plan of a run against one server."""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.bench.client.endpoint import Endpoint
from moe_serve.bench.figures.slo import Slo
from moe_serve.bench.workload.prompts import DataKind
from moe_serve.bench.workload.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The options of a run. `url` and other fields are as the user gave them, without anything the
    server reported."""

    url: str
    workload: Workload
    endpoint: Endpoint  # its model is taken from the server if it is ""
    api_key: str | None = None
    data: DataKind = "words"
    vocab_size: int = 1000
    timeout_s: float = 600.0
    num_warm_up: int | None = None
    max_in_flight: int | None = None  # only in an open loop
    slo: Slo | None = None
