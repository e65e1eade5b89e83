"""What to do to one server: everything that a run is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.bench.client.endpoint import Endpoint
from moe_serve.bench.figures.slo import Slo
from moe_serve.bench.workload.prompts import DataKind
from moe_serve.bench.workload.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """`url` and the like as they were given; what the server has to say is not in it."""

    url: str
    workload: Workload
    endpoint: Endpoint  # its model is filled in from the server where it is ""
    api_key: str | None = None
    data: DataKind = "words"
    vocab_size: int = 1000
    timeout_s: float = 600.0
    num_warm_up: int | None = None
    max_in_flight: int | None = None  # of an open loop
    slo: Slo | None = None
