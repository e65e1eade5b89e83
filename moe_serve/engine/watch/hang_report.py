"""Why nothing goes on: what the engine and its ranks are at, and where every thread is."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from datetime import datetime, timezone

from moe_serve import __version__
from moe_serve.engine.request.client import EngineStats
from moe_serve.engine.watch.witness import Witness


def hang_report(stats: EngineStats, witness: Witness | None) -> str:
    """Code places only: no values of variables, so no prompts and no keys."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    turn = stats.last_turn_age_s
    lines = [
        f"moe-serve {__version__}, process {os.getpid()}, {now}",
        f"step {stats.num_steps}: {stats.num_running} sequences running, {stats.num_waiting} "
        f"waiting, {stats.num_free_pages} of {stats.num_pages} KV pages free",
        "the engine's loop last came round "
        + ("at an unknown time" if turn is None else f"{turn:.1f} s ago"),
        "",
        *([] if witness is None else witness.testify()),
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
