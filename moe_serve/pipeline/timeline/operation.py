"""What a process is at, for a report of who holds up a step."""

from __future__ import annotations

import time
from dataclasses import dataclass

from moe_serve.pipeline.timeline.timeline import NO_LAYER, NO_MICRO_BATCH, Stage


@dataclass(frozen=True, slots=True)
class Operation:
    """`peer`: the rank that it waits for; `since` is a reading of time.perf_counter()."""

    step: int
    stage: Stage
    layer: int
    micro_batch: int
    peer: str
    since: float

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.since

    def __str__(self) -> str:
        """Without the seconds: who reads it later knows them better."""
        where = "" if self.layer == NO_LAYER else f", layer {self.layer}"
        batch = "" if self.micro_batch == NO_MICRO_BATCH else f", micro-batch {self.micro_batch}"
        peer = f", waits for {self.peer}" if self.peer else ""
        return f"step {self.step}: {self.stage.label}{where}{batch}{peer}"
