"""Kills and freezes ranks at random under load; checks that nothing hangs, leaks or fails.

    python benchmarks/run.py fault_soak --minutes 10 --kills 20 --seed 1 --json soak.json
    python benchmarks/run.py fault_soak --minutes 30 --speculation auto --pages 96 --aborters 2

Every answer, with tokens and log probabilities, is compared with that of a server of one process.
The exit status is 0 only if nothing went wrong. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table

from harness.environment import write_report
from soak.load import Tally, answers_of, keep_aborting, keep_asking, questions
from soak.served import Served, Usage

VOCAB_SIZE = 4096  # of the demonstration model
_WARM_UP_S = 5.0  # before the first measurement, and before the last
_RECOVERY_S = 60.0  # until all ranks are back after the last blow
_LOOK_S = 0.1
_GAP_S = 10.0  # after a blow, gaps are attributed to it
_MAX_GROWTH_MIB, _MAX_GROWTH = 40.0, 4  # of the coordinator; of its descriptors and threads
_WAKE_S = 4.0  # after it was frozen; by then it is fenced


@dataclass(frozen=True, slots=True)
class Blow:
    """A planned fault; `at` is in seconds from the start."""

    at: float
    kind: Literal["SIGKILL", "SIGSTOP"]
    victim: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """A fault that was caused; `moment` is a time of time.monotonic."""

    blow: Blow
    moment: float
    pid: int


def draw_blows(names: list[str], num_blows: int, seconds: float, seed: int) -> list[Blow]:
    """Draws one fault at a random moment in every equal part of the time; two of three are
    kills.
    """
    rng = random.Random(seed)
    part = seconds / max(1, num_blows)
    return [
        Blow(
            (index + rng.random()) * part,
            "SIGSTOP" if rng.random() < 1 / 3 else "SIGKILL",
            rng.choice(names),
        )
        for index in range(num_blows)
    ]


class Striker:
    """Kills and freezes ranks, and resumes frozen ones, which the server should have declared
    dead.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self.struck: list[Struck] = []
        self._frozen: list[tuple[float, psutil.Process]] = []

    def strike(self, blow: Blow) -> bool:
        """Causes a fault; returns False if the rank has no process at present, or is frozen
        already.
        """
        process = self._served.ranks().get(blow.victim)
        if process is None or self._is_frozen(process):
            return False
        try:
            if blow.kind == "SIGKILL":
                process.kill()
            else:
                process.suspend()
                self._frozen.append((time.monotonic() + _WAKE_S, process))
        except psutil.NoSuchProcess:
            return False
        self.struck.append(Struck(blow=blow, moment=time.monotonic(), pid=process.pid))
        return True

    def _is_frozen(self, process: psutil.Process) -> bool:
        return any(frozen.pid == process.pid for _, frozen in self._frozen)

    def wake_due(self) -> None:
        """Sends SIGCONT to frozen ranks whose time has come."""
        now = time.monotonic()
        due = [process for moment, process in self._frozen if moment <= now]
        self._frozen = [item for item in self._frozen if item[0] > now]
        for process in due:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


@dataclass(frozen=True, slots=True)
class Run:
    """The results from the first request to the last."""

    tally: Tally
    striker: Striker
    usages: list[Usage]  # after the warm-up, now and then, and at the end
    seconds: float
    has_recovered: bool
    longest_pause_s: float  # of this process itself: gaps up to it are not the server's


def main() -> int:
    arguments = _parser().parse_args()
    console = Console()
    asked = questions(arguments.questions, VOCAB_SIZE, arguments.seed)
    with Served(0, 0, arguments.heartbeat, speculation="off") as alone:
        expected = asyncio.run(answers_of(alone.url, asked))
    layout = (arguments.attention_ranks, arguments.expert_ranks, arguments.heartbeat)
    with Served(*layout, arguments.pages, arguments.speculation) as served:
        run = asyncio.run(_soak(served, asked, expected, arguments))
        status, num_left = served.stop()
        log = served.log
    report = _report(run, status, num_left, log, arguments)
    _print(console, report)
    write_report(arguments.json, report)
    if arguments.log:
        arguments.log.write_text(log, encoding="utf-8")
    for problem in report["problems"]:
        console.print(f"[red]{problem}[/red]")
    return 1 if report["problems"] else 0


async def _soak(
    served: Served, asked: list[Any], expected: list[Any], arguments: argparse.Namespace
) -> Run:
    tally, stop = Tally(), asyncio.Event()
    striker = Striker(served)
    start, seconds = time.monotonic(), 60 * arguments.minutes
    clients = asyncio.create_task(
        keep_asking(served.url, asked, expected, arguments.clients, tally, stop)
    )
    aborters = asyncio.gather(
        *(keep_aborting(served.url, asked, seed, stop) for seed in range(arguments.aborters))
    )
    await asyncio.sleep(_WARM_UP_S)
    names = sorted(await asyncio.to_thread(served.ranks))
    usages = [served.usage()]
    blows = draw_blows(names, arguments.kills, seconds - 2 * _WARM_UP_S, arguments.seed)
    before, longest_pause_s = time.monotonic(), 0.0
    while (now := time.monotonic() - start) < seconds:
        longest_pause_s = max(longest_pause_s, start + now - before)
        before = start + now
        striker.wake_due()
        if (
            blows
            and blows[0].at + _WARM_UP_S <= now
            and await asyncio.to_thread(striker.strike, blows[0])
        ):
            blows.pop(0)  # without a process: tried again a moment later
        if now > len(usages) * seconds / 20:
            usages.append(await asyncio.to_thread(served.usage))
        await asyncio.sleep(_LOOK_S)
    has_recovered = await _recovered(served, striker, len(names))
    await asyncio.sleep(_WARM_UP_S)
    stop.set()
    await clients
    await aborters
    usages.append(served.usage())
    spent_s = time.monotonic() - start
    return Run(tally, striker, usages, spent_s, has_recovered, longest_pause_s)


async def _recovered(served: Served, striker: Striker, num_ranks: int) -> bool:
    """Waits until all ranks are back; returns False if this takes too long."""
    end = time.monotonic() + _RECOVERY_S
    while time.monotonic() < end:
        striker.wake_due()
        usage = await asyncio.to_thread(served.usage)
        if usage.num_ranks == num_ranks and await asyncio.to_thread(served.is_ready):
            return True
        await asyncio.sleep(_LOOK_S)
    return False


def _report(
    run: Run, status: int, num_left: int, log: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    tally, struck = run.tally, run.striker.struck
    gaps = [tally.gap_after(item.moment, item.moment + _GAP_S) for item in struck]
    report: dict[str, Any] = {
        "layout": f"{arguments.attention_ranks}A{arguments.expert_ranks}E",
        "speculation": arguments.speculation,
        "seconds": round(run.seconds, 1),
        "blows": [
            asdict(item.blow) | {"gap_s": round(gap, 3)}
            for item, gap in zip(struck, gaps, strict=True)
        ],
        "num_answers": tally.num_answers,
        "num_tokens": tally.num_tokens,
        "num_wrong": len(tally.wrong),
        "num_failed": len(tally.failed),
        "first_failures": tally.failed[:3],
        "longest_gap_s": round(tally.longest_gap_s, 3),
        "longest_pause_s": round(run.longest_pause_s, 3),
        "median_gap_s": round(statistics.median(gaps), 3) if gaps else 0.0,
        "num_losses_logged": log.count(" is lost"),
        "num_tracebacks": log.count("Traceback"),
        "first_usage": asdict(run.usages[0]),
        "last_usage": asdict(run.usages[-1]),
        "usages": [asdict(usage) for usage in run.usages],
        "exit_status": status,
        "num_ranks_left": num_left,
    }
    return report | {"problems": _problems(run, report, arguments)}


def _problems(run: Run, report: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    first, last = run.usages[0], run.usages[-1]
    checks = {
        f"{report['num_wrong']} answers were wrong": report["num_wrong"],
        f"{report['num_failed']} requests failed": report["num_failed"],
        f"no token came for {report['longest_gap_s']} s": report["longest_gap_s"]
        > 60 + report["longest_pause_s"],
        f"only {len(run.striker.struck)} blows were dealt": len(run.striker.struck)
        < arguments.kills,
        "not all ranks came back": not run.has_recovered,
        f"{report['num_tracebacks']} tracebacks in the log": report["num_tracebacks"],
        f"{last.num_zombies} zombies": last.num_zombies,
        f"memory grew from {first.rss_mib} to {last.rss_mib} MiB": last.rss_mib
        > first.rss_mib + _MAX_GROWTH_MIB,
        f"descriptors grew from {first.num_fds} to {last.num_fds}": last.num_fds
        > first.num_fds + _MAX_GROWTH,
        f"threads grew from {first.num_threads} to {last.num_threads}": last.num_threads
        > first.num_threads + _MAX_GROWTH,
        f"exit status {report['exit_status']}": report["exit_status"],
        f"{report['num_ranks_left']} ranks outlive the server": report["num_ranks_left"],
    }
    return [text for text, is_wrong in checks.items() if is_wrong]


def _print(console: Console, report: dict[str, Any]) -> None:
    table = Table(f"{report['layout']}, {report['seconds']} s", "")
    killed = sum(blow["kind"] == "SIGKILL" for blow in report["blows"])
    table.add_row("killed, frozen", f"{killed}, {len(report['blows']) - killed}")
    table.add_row("answers, tokens", f"{report['num_answers']}, {report['num_tokens']}")
    table.add_row("wrong, failed", f"{report['num_wrong']}, {report['num_failed']}")
    table.add_row(
        "longest time without a token",
        f"{report['longest_gap_s']} s (median after a blow {report['median_gap_s']} s; "
        f"longest pause of this process {report['longest_pause_s']} s)",
    )
    first, last = report["first_usage"], report["last_usage"]
    for name in first:
        table.add_row(name, f"{first[name]} -> {last[name]}")
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="default %(default)s")
    parser.add_argument("--kills", type=int, default=20, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default %(default)s")
    parser.add_argument("--attention-ranks", type=int, default=2, help="default %(default)s")
    parser.add_argument("--expert-ranks", type=int, default=3, help="default %(default)s")
    parser.add_argument("--clients", type=int, default=8, help="default %(default)s")
    parser.add_argument("--questions", type=int, default=32, help="different ones, %(default)s")
    parser.add_argument("--heartbeat", type=float, default=1.0, help="seconds, %(default)s")
    parser.add_argument("--pages", type=int, default=512, help="of a rank; few cause preemptions")
    parser.add_argument("--speculation", help="a method of --speculative-config")
    parser.add_argument("--aborters", type=int, default=0, help="clients that leave early")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, help="where to put the server's stderr")
    return parser
