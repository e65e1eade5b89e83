"""The figures of one run of a policy, by which it is judged."""

from __future__ import annotations

import time
from dataclasses import dataclass

from deadlines.policies import Policy
from deadlines.setting import Setting
from moe_serve.bench.figures.request_record import REFUSED
from moe_serve.bench.figures.summary import Slo
from moe_serve.bench.report.report import Report
from moe_serve.bench.simulated_run import run_simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One run. Times are in seconds; shares are of all requests. `refused` and `missed` are the
    numbers of the requests that were refused, or whose TTFT was later than their target."""

    trace: str
    load: float
    seed: int
    policy: str
    attained: float
    tardiness: float
    top_attained: float
    top_p99: float
    top_target: float
    by_tier: tuple[float, ...]
    tokens_per_s: float
    longest_wait: float
    max_wait: float
    p99_ttft: float
    p99_tpot: float
    num_failed: int
    num_preempted: float
    promised: int
    kept: int
    forecast_error: float | None
    refused: tuple[int, ...]
    missed: tuple[int, ...]
    cpu_s: float

    @property
    def p99_over_target(self) -> float:
        return self.top_p99 / self.top_target


def judge(setting: Setting, policy: Policy, load: float, seed: int) -> tuple[Verdict, Report]:
    """Simulates a policy at a load."""
    mix = setting.tiers(has_tpot=policy.has_tpot, has_priorities=policy.has_priorities)
    began = time.process_time()
    run = setting.at(load, mix, policy.scheduler(setting), is_strict=policy.is_strict)
    report = run_simulation(run)
    service, summary = report.service, report.summary
    assert service is not None, "the run has tiers"
    top, targets = service.tiers[0], {tier.name: Slo(ttft_s=tier.ttft_s) for tier in mix.tiers}
    records = report.records
    preempted = 0.0 if report.server is None else report.server.num_preemptions
    verdict = Verdict(
        trace=setting.name,
        load=load,
        seed=seed,
        policy=policy.name,
        attained=service.attained,
        tardiness=service.weighted_tardiness_s,
        top_attained=top.attained,
        top_p99=0.0 if top.ttft_ms is None else top.ttft_ms.p99 / 1e3,
        top_target=setting.target_s,
        by_tier=tuple(tier.attained for tier in service.tiers),
        tokens_per_s=(summary.prompt_tokens + summary.output_tokens) / summary.duration_s,
        longest_wait=service.longest_wait_s or 0.0,
        max_wait=policy.max_wait_s(setting),
        p99_ttft=0.0 if summary.ttft_ms is None else summary.ttft_ms.p99 / 1e3,
        p99_tpot=0.0 if summary.tpot_ms is None else summary.tpot_ms.p99 / 1e3,
        num_failed=sum(not r.is_ok and r.error != REFUSED for r in records),
        num_preempted=preempted or 0.0,
        promised=service.num_promised,
        kept=service.num_kept,
        forecast_error=service.forecast_error,
        refused=tuple(r.index for r in records if r.error == REFUSED),
        missed=tuple(r.index for r in records if r.is_ok and not targets[r.tier].is_met(r)),
        cpu_s=time.process_time() - began,
    )
    return verdict, report
