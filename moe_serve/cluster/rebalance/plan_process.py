"""The planner's process: one PlanJob on standard input, its PlanAnswer on standard output.

python -m moe_serve.cluster.rebalance.plan_process

It loads no torch, and gives way to processes that make steps.
"""

from __future__ import annotations

import os
import sys

import msgspec

from experts.placement.solvers.search.solver import Search
from moe_serve.cluster.rebalance.plan_job import PlanJob, answer

_NICE = 15


def main() -> None:
    """Once."""
    if hasattr(os, "nice"):
        os.nice(_NICE)
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=PlanJob)
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer(job, Search())))


if __name__ == "__main__":
    main()
