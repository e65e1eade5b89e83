"""A split from nothing: rows in the order of what tells them apart most, cut into equal parts.

R rows, D dimensions.
"""

from __future__ import annotations

import numpy as np

from moe_serve.engine.schedule.policy.concave_cost import Floats
from moe_serve.engine.schedule.policy.local_search import Groups

_NUM_ITERATIONS = 8


def first_split(x_RD: Floats, num_groups: int) -> Groups:
    """Rows sorted along their principal axis -> equal groups of neighbours. O(R D + R log R)."""
    centred_RD = x_RD - x_RD.mean(axis=0)
    lengths = np.linalg.norm(centred_RD, axis=1)
    axis_D = centred_RD[int(lengths.argmax())]
    for _ in range(_NUM_ITERATIONS):
        axis_D = centred_RD.T @ (centred_RD @ axis_D)
        length = float(np.linalg.norm(axis_D))
        if length < 1e-12:
            break  # all rows are alike
        axis_D = axis_D / length
    order = np.argsort(centred_RD @ axis_D, kind="stable")
    group_R = np.empty(len(x_RD), dtype=np.int64)
    group_R[order] = np.arange(len(x_RD)) * num_groups // len(x_RD)
    return group_R
