"""Formats simulated fleets: rows for tables, and a document for scripts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from moe_serve.fleet.certify import Certified
from moe_serve.fleet.fleet_plan import FleetPlan
from moe_serve.fleet.fleet_verdict import FleetVerdict
from moe_serve.fleet.packing import Group

COLUMNS = (
    "fleet", "devices", "an hour", "per M out", "per M all", "within", "goodput/s",
    "TTFT P50", "P99", "TPOT P50", "P99", "device h", "",
)  # fmt: skip


def cells_of_row(each: Certified) -> tuple[str, ...]:
    """Returns the cells of a fleet's row, as many as COLUMNS."""
    ttft, tpot = each.summary.ttft_ms, each.summary.tpot_ms
    notes = [] if each.meets else ["misses the limits"]
    notes += [] if each.fleet.is_served else ["not served"]
    return (
        each.fleet.name,
        str(each.fleet.num_devices),
        f"{each.fleet.price:.2f}",
        f"{each.output_cost:.2f}",
        f"{each.token_cost:.2f}",
        f"{each.attainment:.1%}",
        f"{each.goodput:.2f}",
        "" if ttft is None else f"{ttft.p50:.0f}",
        "" if ttft is None else f"{ttft.p99:.0f}",
        "" if tpot is None else f"{tpot.p50:.1f}",
        "" if tpot is None else f"{tpot.p99:.1f}",
        f"{each.device_hours:.2f}",
        ", ".join(notes),
    )


def plan_document(plan: FleetPlan, verdict: FleetVerdict, model: str) -> dict[str, Any]:
    """Returns the plan as JSON types."""
    demand = plan.demand
    return {
        "model": model,
        "demand": {
            "requests": len(demand.slots),
            "requests_per_s": demand.whole.rate,
            "prompt_tokens": demand.whole.prompt,
            "computed_tokens": demand.whole.computed,
            "output_tokens": demand.whole.output,
            "slo": str(demand.slo),
            "attainment": demand.attainment,
            "buckets": [asdict(bucket) for bucket in demand.buckets],
        },
        "verdict": asdict(verdict),
        "fleets": [_fleet_document(each) for each in plan.certified],
        "one_device": None if plan.one_device is None else _fleet_document(plan.one_device),
        "why_not_one_device": plan.why_not or None,
        "searched": [asdict(point) for point in plan.points],
    }


def _fleet_document(each: Certified) -> dict[str, Any]:
    summary = each.summary
    return {
        "name": each.fleet.name,
        "groups": [_group_document(group) for group in each.fleet.groups],
        "devices": each.fleet.num_devices,
        "price_per_hour": each.fleet.price,
        "is_served": each.fleet.is_served,
        "meets": each.meets,
        "attainment": each.attainment,
        "goodput_per_s": each.goodput,
        "output_tokens_per_s": summary.output_tok_s,
        "device_hours": each.device_hours,
        "cost_per_million_output_tokens": each.output_cost,
        "cost_per_million_tokens": each.token_cost,
        "ttft_ms": None if summary.ttft_ms is None else asdict(summary.ttft_ms),
        "tpot_ms": None if summary.tpot_ms is None else asdict(summary.tpot_ms),
        "e2e_ms": None if summary.e2e_ms is None else asdict(summary.e2e_ms),
    }


def _group_document(group: Group) -> dict[str, Any]:
    kind = group.kind
    return {
        "device": kind.offer.name,
        "role": kind.role,
        "cells": group.num_cells,
        "attention_ranks": kind.layout.num_attention,
        "expert_ranks": kind.layout.num_experts,
        "tensor_shards": kind.layout.num_shards,
        "micro_batches": kind.micro_batches,
        "max_num_seqs": kind.max_num_seqs,
        "max_batched_tokens": kind.max_batched_tokens,
        "predicted_step_ms": 1e3 * kind.step_s,
        "shares_of_buckets": group.shares,
    }
