"""Stage records written as rows, for worked examples."""

from __future__ import annotations

import numpy as np

from moe_serve.pipeline.timeline.timeline_recorder import RECORD_DTYPE, Records, Role, Stage, Track

ATTENTION_0, ATTENTION_1 = Track(Role.ATTENTION, 0), Track(Role.ATTENTION, 1)
EXPERT_0, EXPERT_1 = Track(Role.EXPERT, 0), Track(Role.EXPERT, 1)

Row = tuple[Stage, int, int, int, int]


def records(*rows: Row) -> Records:
    """Makes records from rows of stage, step, micro-batch, start and end; one layer, 10 rows per
    micro-batch."""
    full = [
        (start, end, step, 10, 0, int(stage), micro_batch)
        for stage, step, micro_batch, start, end in rows
    ]
    return np.array(full, RECORD_DTYPE)
