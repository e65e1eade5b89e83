"""Detects when the engine makes no progress, and writes one report about it."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from moe_serve import __version__
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.client import EngineClient
from moe_serve.engine.request.stats import EngineStats
from moe_serve.pipeline.timeline.stage_log import StageLog

_log = logging.getLogger(__name__)
_LOOKS = 10  # checks within the time after which a report is written
_MAX_LOOK_S = 5.0


class ActivityReport(Protocol):
    """Describes the engine's activity for hang reports. May be called on any thread, at any
    time.
    """

    def lines(self) -> list[str]:
        """Returns lines of text about the current step and each rank's activity. May take a
        second."""
        ...


class LocalActivity:
    """Describes an engine in one process."""

    def __init__(self, executor: LocalExecutor, log: StageLog) -> None:
        self._executor, self._log = executor, log

    def lines(self) -> list[str]:
        plan, operation = self._executor.plan, self._log.operation
        if plan is None:
            return ["no step was begun yet"]
        num_tokens = sum(batch.num_tokens for batch in plan.micro_batches)
        lines = [
            f"the last step plan: {len(plan.slices)} sequences, {num_tokens} tokens, "
            f"{len(plan.micro_batches)} micro-batches"
        ]
        if operation is not None:
            lines.append(f"the last stage: {operation}, begun {operation.seconds:.1f} s ago")
        return lines


class HangWatch:
    """Watches the engine on its own thread, from construction until `close`.

    A hang lasts while the engine makes no step, and gets one report. Missing ranks do not count as
    a hang: they have their own timeout and messages. Time that the engine waits afterwards in the
    same step counts from their return.
    """

    def __init__(
        self,
        engine: EngineClient,
        activity: ActivityReport | None,
        after_s: float,
        directory: str | None,
    ) -> None:
        self._engine, self._activity, self._after_s = engine, activity, after_s
        self._directory = Path(directory or tempfile.gettempdir()).expanduser()
        self._is_reported = False  # whether the current hang was reported
        self._excused_s = 0.0  # part of the time since the last turn in which ranks were missing
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._thread.start()

    def report(self) -> str:
        """Returns the report for the current moment. Takes a second with ranks."""
        return hang_report(self._engine.stats(), self._activity)

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(_MAX_LOOK_S)

    def _watch(self) -> None:
        while not self._is_closing.wait(min(_MAX_LOOK_S, self._after_s / _LOOKS)):
            try:
                self._look()
            except Exception:  # the top of a thread, which must continue
                _log.exception("the engine could not be checked for a hang")

    def _look(self) -> None:
        stats = self._engine.stats()
        age_s = stats.last_turn_age_s or 0.0
        has_work = stats.load.num_running > 0 or stats.load.num_waiting > 0
        if not has_work or age_s <= self._after_s:  # it makes progress, or is idle
            self._is_reported = False
        if stats.outage_s:
            self._excused_s = age_s
        elif age_s < self._excused_s:
            self._excused_s = 0.0
        is_stuck = has_work and age_s - self._excused_s > self._after_s and not stats.outage_s
        if stats.is_alive and is_stuck and not self._is_reported:
            self._is_reported = True
            self._tell(stats)

    def _tell(self, stats: EngineStats) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        path = self._directory / f"moe-serve-hang-{stamp}-step{stats.num_steps}.txt"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            report = self.report()  # before the file exists, so that readers find it complete
            with path.open("x", encoding="utf-8") as file:  # never an existing file or link
                file.write(report)
            where = f"the report is in {path}"
        except OSError as error:
            where = f"no report was written: {error}"
        _log.error(
            "the engine has made no step for %.0f s with %d sequences running and %d waiting "
            "(step %d); %s",
            stats.last_turn_age_s or 0.0,
            stats.load.num_running,
            stats.load.num_waiting,
            stats.num_steps,
            where,
        )


def hang_report(stats: EngineStats, activity: ActivityReport | None) -> str:
    """Returns a report with places in the code but no values of variables, so no prompts and no
    keys."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    turn, load = stats.last_turn_age_s, stats.load
    lines = [
        f"moe-serve {__version__}, process {os.getpid()}, {now}",
        f"step {stats.num_steps}: {load.num_running} sequences running, {load.num_waiting} "
        f"waiting, {load.num_free_pages} of {load.num_pages} KV pages free",
        "the engine's loop last made progress "
        + ("at an unknown time" if turn is None else f"{turn:.1f} s ago"),
        "",
        *([] if activity is None else activity.lines()),
        "",
        "threads of this process:",
        *_stacks(),
    ]
    return "\n".join(lines) + "\n"


def _stacks() -> list[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        lines += ["", f"{names.get(ident, 'a thread of another library')} ({ident}):"]
        lines += [line.rstrip() for line in traceback.format_stack(frame)]
    return lines
