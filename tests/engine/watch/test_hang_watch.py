"""An engine that makes no progress is reported once; a busy or waiting one is never reported."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.async_engine import AsyncEngine
from moe_serve.engine.build import BuiltEngine
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.stats import EngineLoad, EngineStats
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.engine.watch.hang_watch import HangWatch, LocalActivity, hang_report
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.pipeline.timeline.timeline_recorder import Stage
from tests.support.engine.fake_runner import FakeRunner

STATS = EngineStats(
    num_steps=5,
    load=EngineLoad(num_running=2, num_waiting=1, num_pages=10, num_free_pages=4),
    last_turn_age_s=0.0,
)


class ScriptedEngine:
    """Has only the members that a watch reads."""

    def __init__(self, stats: EngineStats) -> None:
        self.now = stats

    def stats(self) -> EngineStats:
        return self.now


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(STATS)


@pytest.fixture
def watch(engine: ScriptedEngine, tmp_path: Path) -> Iterator[HangWatch]:
    made: Any = engine
    watch = HangWatch(made, None, after_s=3600.0, directory=str(tmp_path / "reports"))
    yield watch
    watch.close()


def reports(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "reports").glob("moe-serve-hang-*.txt"))


def test_one_report_for_each_hang(
    engine: ScriptedEngine, watch: HangWatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for age, step in ((0.0, 5), (3599.0, 5), (3601.0, 5), (9999.0, 5)):
        engine.now = replace(STATS, last_turn_age_s=age, num_steps=step)
        watch._look()
    (report,) = reports(tmp_path)
    assert "step 5: 2 sequences running, 1 waiting, 4 of 10 KV pages free" in report.read_text()
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "no step for 3601 s with 2 sequences running and 1 waiting" in said
    assert str(report) in said
    engine.now = replace(STATS, last_turn_age_s=0.1, num_steps=6)
    watch._look()
    engine.now = replace(STATS, last_turn_age_s=4000.0, num_steps=6)
    watch._look()
    assert len(reports(tmp_path)) == 2, "it had come round in between"


def test_a_rank_that_is_given_up_and_replaced_in_a_hang_gives_no_second_report(
    engine: ScriptedEngine, watch: HangWatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same step hangs: it waits, has no rank, and is repeated."""
    for age_s, outage_s in [(4000.0, 0.0), (4500.0, 3.0), (4600.0, 0.0), (9999.0, 0.0)]:
        engine.now = replace(STATS, last_turn_age_s=age_s, outage_s=outage_s)
        watch._look()
        assert caplog.text.count("has made no step for") == 1


def test_after_an_outage_time_counts_from_its_end(
    engine: ScriptedEngine, watch: HangWatch, tmp_path: Path
) -> None:
    """The step during which ranks were away is repeated, and may take as long as any step."""
    for age_s, outage_s, count in [(4000.0, 1.0, 0), (7500.0, 0.0, 0), (7700.0, 0.0, 1)]:
        engine.now = replace(STATS, last_turn_age_s=age_s, outage_s=outage_s)
        watch._look()
        assert len(reports(tmp_path)) == count
    engine.now = replace(STATS, last_turn_age_s=0.0, num_steps=6)
    watch._look()
    engine.now = replace(STATS, last_turn_age_s=3700.0, num_steps=6)
    watch._look()
    assert len(reports(tmp_path)) == 2, "nothing is excused in later steps"


@pytest.mark.parametrize(
    "change",
    [
        {"last_turn_age_s": 0.5},  # saturated, and comes round
        {"load": EngineLoad()},  # asleep
        {"outage_s": 9000.0},  # waits for ranks
        {"last_turn_age_s": None},  # keeps no time
        {"is_alive": False},  # dead: told elsewhere
    ],
)
def test_no_hang(
    engine: ScriptedEngine, watch: HangWatch, tmp_path: Path, change: dict[str, Any]
) -> None:
    engine.now = replace(STATS, **{"last_turn_age_s": 9999.0, **change})
    watch._look()
    assert reports(tmp_path) == []


def test_a_folder_that_cannot_be_written(
    engine: ScriptedEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    made: Any = engine
    watch = HangWatch(made, None, after_s=3600.0, directory=str(tmp_path / "file"))
    engine.now = replace(STATS, last_turn_age_s=9999.0)
    watch._look()
    watch.close()
    assert "no report was written" in caplog.text


class BlockedRunner(FakeRunner):
    """Blocks in its third step until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.is_blocked = threading.Event(), threading.Event()

    def run(self, plan: StepPlan) -> Any:
        if len(self.plans) == 2:
            self._hold_the_step_here()
        return super().run(plan)

    def _hold_the_step_here(self) -> None:
        self.is_blocked.set()
        assert self.go.wait(100)


def test_a_real_engine_whose_step_blocks(tmp_path: Path) -> None:
    """The report names the function that blocks the step, and the size of the step."""
    runner, scheduler = BlockedRunner(), SchedulerConfig(max_num_seqs=4)
    executor, log = LocalExecutor(runner, Sampler(frozenset())), StageLog()
    log.enter(Stage.EXPERTS, layer=3, micro_batch=0)
    core = Engine(
        executor,
        scheduler=scheduler,
        num_pages=20,
        micro_batches=1,
        max_model_len=100,
        eos_token_ids=frozenset(),
    )
    nothing: Any = None
    engine = AsyncEngine(BuiltEngine(core, nothing, nothing), scheduler)

    def watch() -> None:
        """Watches while the step is blocked, and ends before a later step could seem slow."""
        watching = HangWatch(engine, LocalActivity(executor, log), 0.2, str(tmp_path / "reports"))
        deadline = time.monotonic() + 60
        while not reports(tmp_path):
            assert time.monotonic() < deadline, "no report came"
            time.sleep(0.02)
        watching.close()

    async def main() -> int:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        queue = engine.submit(
            [GenerationRequest(request_id="r", prompt_token_ids=(1, 2), params=params)]
        )
        assert await asyncio.to_thread(runner.is_blocked.wait, 60)
        await asyncio.to_thread(watch)
        runner.go.set()
        deltas: list[TokenDelta] = []
        while not deltas or deltas[-1].finish_reason is None:
            await queue.wait()
            deltas += queue.take()
        return sum(len(delta.token_ids) for delta in deltas)

    try:
        assert asyncio.run(main()) == 5
    finally:
        runner.go.set()
        engine.close()
    (report,) = reports(tmp_path)
    text = report.read_text()
    assert "the last step plan: 1 sequences, 1 tokens, 1 micro-batches" in text
    assert "the last stage: step 0: experts, layer 3, micro-batch 0, begun" in text
    assert "moe-serve-engine (" in text and "in _hold_the_step_here" in text


def test_a_report_says_nothing_of_values() -> None:
    secret = "sword" + "fish"
    assert secret not in hang_report(STATS, None)
    assert "in test_a_report_says_nothing_of_values" in hang_report(STATS, None)


def test_a_report_never_goes_where_a_link_points(
    engine: ScriptedEngine,
    watch: HangWatch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Any user may be able to write to the folder."""
    mine, folder = tmp_path / "mine", tmp_path / "reports"
    mine.write_text("mine")
    folder.mkdir()
    monkeypatch.setattr(time, "strftime", lambda *_: "then")
    (folder / "moe-serve-hang-then-step5.txt").symlink_to(mine)
    engine.now = replace(STATS, last_turn_age_s=3601.0)
    watch._look()
    assert mine.read_text() == "mine"
    assert "no report was written" in caplog.text
