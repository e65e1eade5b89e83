"""`benchmarks/run.py live_balancing`: its placements and ratios. A whole run would take a
minute."""

from __future__ import annotations

import numpy as np

from expert_memory import live_balancing
from expert_memory.live_balancing import Step
from moe_serve.cluster.rebalance.planner import PlanJob


def test_the_worst_placement_has_the_hottest_experts_together() -> None:
    worst = live_balancing._worst(np.array([[1.0, 9.0, 2.0, 8.0]]), [5], 2)
    assert worst.ranks_of == {5: ((1,), (0,), (1,), (0,))}


def test_a_rotation_keeps_the_balance() -> None:
    job = PlanJob(
        counts=b"",
        layers=(0,),
        scenarios=(),
        num_experts=3,
        ranks_of=[[[0], [1, 2], [2]]],
        slots=[2, 2, 2],
        max_moves=3,
        top_k=1,
    )
    assert live_balancing._rotated(job).ranks_of == [[[1], [2, 0], [0]]]


def test_steps_beside_a_move_over_the_others() -> None:
    calm = [Step(0.0, 0.01, "idle, before", 1), Step(0.0, 0.01, "idle, after", 1)] * 50
    moving = [Step(0.0, 0.015, "copying", 1)] * 30
    found = live_balancing._over_idle(calm + moving)
    assert found == {"copying": {"ratio": 1.5, "interval": [1.5, 1.5]}}
