"""An engine without a device on a virtual clock: steps take 6 ms, 0.04 ms for each sequence and
0.02 ms for each further row, and every token is 0."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from moe_serve.config.sections import SchedulerConfig
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenDelta
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.service_terms import Service, Targets
from moe_serve.engine.service.service_state import ServiceState
from moe_serve.pipeline.costs.step_costs import BatchLoad
from moe_serve.simulate.instant_executor import InstantExecutor
from moe_serve.simulate.virtual_clock import VirtualClock

FIXED_S, SEQUENCE_S, ROW_S = 0.006, 0.00004, 0.00002
INTERACTIVE = TierConfig(name="interactive", weight=4.0, ttft_s=1.0)
NORMAL = TierConfig(name="normal", weight=2.0, ttft_s=5.0)
FLEX = TierConfig(name="flex", weight=1.0, ttft_s=60.0, is_sheddable=True)
TIERS = (INTERACTIVE, NORMAL, FLEX)


class LinearCosts:
    """The part of StepCosts that `InstantExecutor` uses."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def colocated_time(self, load: BatchLoad) -> float:
        others = load.num_rows - load.num_sequences
        return self.factor * (FIXED_S + SEQUENCE_S * load.num_sequences + ROW_S * others)


def service_of(tier: TierConfig, tenant: str = "", *, strict: bool = False) -> Service:
    targets = Targets(ttft_s=tier.ttft_s, tpot_s=tier.tpot_s, e2e_s=tier.e2e_s, is_strict=strict)
    return Service(
        tier=tier.name,
        weight=tier.weight,
        targets=targets,
        is_sheddable=tier.is_sheddable,
        tenant=tenant,
    )


def request(
    name: str,
    service: Service,
    *,
    at_s: float = 0.0,
    num_prompt: int = 64,
    num_answer: int = 8,
    priority: int = 0,
    token: int | None = None,
) -> GenerationRequest:
    """Makes a request. Prompts of different names share no page, unless they have a `token`."""
    first = 1 + abs(hash(name)) % 40_000 if token is None else token
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=(first, *(1 + index % 97 for index in range(num_prompt - 1))),
        params=SamplingParams(temperature=0.0, max_tokens=num_answer, ignore_eos=True, seed=0),
        arrival_time=at_s,
        priority=priority,
        service=service,
    )


@dataclass
class Served:
    """The times and the result of a request, on the virtual clock."""

    arrived_s: float
    first_s: float | None = None
    end_s: float | None = None
    num_tokens: int = 0
    num_preemptions: int = 0
    started_s: float | None = None
    reason: FinishReason | None = None
    error_code: str | None = None


@dataclass
class TimedEngine:
    """Runs an engine over arrivals. `served` holds the results by request id."""

    scheduler: SchedulerConfig
    num_pages: int = 4096
    max_model_len: int = 16384
    clock: VirtualClock = field(default_factory=VirtualClock)
    costs: LinearCosts = field(default_factory=LinearCosts)
    served: dict[str, Served] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = Engine(
            InstantExecutor(self.clock, self.costs),  # type: ignore[arg-type]
            scheduler=self.scheduler,
            num_pages=self.num_pages,
            micro_batches=1,
            max_model_len=min(self.max_model_len, self.num_pages * 16),
            eos_token_ids=frozenset(),
            clock=self.clock,
        )

    @property
    def state(self) -> ServiceState:
        assert self.engine.service is not None, "the engine has tiers"
        return self.engine.service.state

    def add(self, made: GenerationRequest) -> None:
        self.engine.add(made)
        self.served[made.request_id] = Served(made.arrival_time)

    def step(self) -> None:
        for delta in self.engine.step():
            self._note(delta)

    def run(self, arrivals: Iterable[GenerationRequest] = (), *, checks: bool = False) -> None:
        """Serves requests in the order of their arrival times until all are answered."""
        left = sorted(arrivals, key=lambda made: made.arrival_time)
        place = 0
        while place < len(left) or self.engine.has_work:
            if not self.engine.has_work:
                self.clock.advance_to(left[place].arrival_time)
            while place < len(left) and left[place].arrival_time <= self.clock.now:
                self.add(left[place])
                place += 1
            self.step()
            if checks:
                self.engine.check_integrity()

    def _note(self, delta: TokenDelta) -> None:
        served = self.served[delta.request_id]
        if delta.token_ids and served.first_s is None:
            served.first_s = self.clock.now
        served.num_tokens += len(delta.token_ids)
        served.num_preemptions = delta.num_preemptions
        served.started_s = delta.started_at
        if delta.finish_reason is not None:
            served.end_s, served.reason = self.clock.now, delta.finish_reason
            served.error_code = delta.error_code
