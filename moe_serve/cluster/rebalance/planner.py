"""Runs the planner's process: no search holds the lock of the interpreter that makes steps."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import msgspec

from experts.placement.errors import PlacementError
from moe_serve.child_python import module_command
from moe_serve.cluster.rebalance.plan_job import SECONDS, PlanAnswer, PlanJob

Plan = Callable[[PlanJob], PlanAnswer]  # raises PlacementError

_MODULE = "moe_serve.cluster.rebalance.plan_process"
_SLACK_S = 60.0  # to start on a busy machine, beyond the time to solve


def plan_in_process(job: PlanJob) -> PlanAnswer:
    """Start one, and wait for its answer; raises PlacementError if none comes."""
    try:
        ended = subprocess.run(
            module_command(_MODULE),
            input=msgspec.msgpack.encode(job),
            capture_output=True,
            timeout=SECONDS + _SLACK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PlacementError(f"The planner's process gave no answer: {error}.") from error
    if ended.returncode:
        words = ended.stderr.decode(errors="replace").strip().splitlines()
        why = words[-1] if words else "it said nothing"
        raise PlacementError(f"The planner's process ended with status {ended.returncode}: {why}.")
    try:
        return msgspec.msgpack.decode(ended.stdout, type=PlanAnswer)
    except msgspec.MsgspecError as error:
        raise PlacementError(f"The planner's answer cannot be read: {error}.") from error
