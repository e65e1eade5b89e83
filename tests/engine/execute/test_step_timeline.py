"""The timeline of the newest step, from records that ranks hand over at different times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moe_serve.engine.execute import step_timeline as timelines
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.execute.step_timeline import StepWatch, step_timeline
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.engine.watch.recent_pools import RecentPools
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan
from moe_serve.pipeline.timeline.stage_log import SAMPLED_EVERY, StageLog
from moe_serve.pipeline.timeline.timeline_recorder import RECORD_DTYPE, Records, Role, Stage, Track

ATTENTION, EXPERT, OTHER = (
    Track(Role.ATTENTION, 0),
    Track(Role.EXPERT, 0),
    Track(Role.EXPERT, 1),
)


def records(*rows: tuple[int, int, int, int, Stage, int]) -> Records:
    """Returns records of (start ms, end ms, step, layer, stage, micro-batch) with 3 rows each."""
    packed = [
        (start * 10**6, end * 10**6, step, 3, layer, stage, batch)
        for start, end, step, layer, stage, batch in rows
    ]
    return np.array(packed, dtype=RECORD_DTYPE)


def of_step(step: int, stage: Stage, start: int = 100) -> Records:
    return records(
        (start + 1, start + 3, step, 0, stage, 0),
        (start + 3, start + 4, step, 0, stage, 1),
        (start, start + 9, step, -1, Stage.STEP, -1),
    )


def test_times_begin_with_the_step() -> None:
    waits = records((102, 103, 16, 2, Stage.WAIT_DISPATCH, 0), (101, 110, 16, -1, Stage.STEP, -1))
    step = step_timeline(
        16, {"attention-0": of_step(16, Stage.ATTENTION), "expert-0": waits}, "fixed"
    )
    assert step is not None
    assert (step.number, step.duration_ms, step.micro_batches, step.why) == (16, 10.0, 2, "fixed")
    first, second = step.tracks
    spans = [(s.start_ms, s.end_ms, s.kind, s.layer, s.micro_batch) for s in first.spans]
    assert spans == [(1.0, 3.0, "attention", 0, 0), (3.0, 4.0, "attention", 0, 1)]
    assert [(s.kind, s.layer, s.rows) for s in second.spans] == [("wait", 2, 3)]


def test_only_a_step_that_all_expert_ranks_have_told_of() -> None:
    pools = RecentPools()
    assert pools.last_step() is None
    for step in (16, 32):
        pools.add(ATTENTION, of_step(step, Stage.ATTENTION))
        pools.add(EXPERT, of_step(step, Stage.EXPERTS))
    pools.add(OTHER, of_step(16, Stage.EXPERTS))
    pools.count_step(2, "trying out")
    pools.began(16)
    pools.count_step(1, "one sequence")
    pools.began(17)
    found = pools.last_step()
    assert found is not None and (found.number, found.why) == (16, "trying out")
    pools.add(OTHER, of_step(32, Stage.EXPERTS))
    found = pools.last_step()
    assert found is not None and found.number == 32
    assert [track.name for track in found.tracks] == ["attention-0", "expert-0", "expert-1"]


def test_busy_shares_of_ranks() -> None:
    pools = RecentPools()
    for step in (16, 32, 48):
        pools.add(ATTENTION, of_step(step, Stage.ATTENTION))
        pools.add(EXPERT, of_step(step, Stage.WAIT_DISPATCH))
    uses = {use.name: use.busy_ratio for use in pools.stats().ranks}
    assert uses == {"attention-0": pytest.approx(3 / 9), "expert-0": 0.0}


def test_a_step_of_too_many_spans_keeps_its_first_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MAX_SPANS", 10)
    rows = [(i, i + 1, 16, i // 2, Stage.ATTENTION, 0) for i in range(40)]
    rows += [(41, 42, 16, -1, Stage.LOGITS, 0), (0, 50, 16, -1, Stage.STEP, -1)]
    step = step_timeline(16, {"process": records(*rows)}, "fixed")
    assert step is not None
    layers = [span.layer for span in step.tracks[0].spans]
    assert layers == [0, 0, 1, 1, 2, 2, 3, 3, None]
    assert step.num_left_out == 41 - 9


class LoggingRunner:
    """Runs a layer of attention and one of experts, and may fail between them."""

    def __init__(self, log: StageLog) -> None:
        self.log, self.fails = log, False

    def run(self, plan: StepPlan) -> torch.Tensor:
        start = self.log.add(Stage.ATTENTION, 0, 0, 1, self.log.now())
        if self.fails:
            raise RuntimeError("broken")
        self.log.add(Stage.DISPATCH, 0, 0, 1, start)
        return torch.zeros(1, 4)

    clear_pages = copy_pages = finite_pages = None


def test_one_process_tells_of_one_step_in_sixteen() -> None:
    log = StageLog()
    runner: Any = LoggingRunner(log)
    watch = StepWatch(log)
    executor = LocalExecutor(runner, Sampler(frozenset()), watch=watch)
    plan = StepPlan((MicroBatch((SequenceSlice(0, 0, np.zeros(1, np.int64), (0,), 1),)),))
    request = GenerationRequest(
        request_id="r", prompt_token_ids=(0, 0), params=SamplingParams(max_tokens=1)
    )
    sequences = {0: Sequence(0, request)}  # its second token is still to come: nothing is sampled
    assert watch.last_step() is None
    for number in range(2 * SAMPLED_EVERY):
        executor.run(plan, sequences)
        step = watch.last_step()
        assert step is not None and step.number == number // SAMPLED_EVERY * SAMPLED_EVERY
    assert step is not None
    assert [span.kind for span in step.tracks[0].spans] == ["attention", "experts"]
    runner.fails = True
    with pytest.raises(RuntimeError):
        executor.run(plan, sequences)
    runner.fails = False
    executor.run(plan, sequences)
    step = watch.last_step()
    assert step is not None
    assert len(step.tracks[0].spans) in (2, 3), "the part of a failed step may show, no more"
