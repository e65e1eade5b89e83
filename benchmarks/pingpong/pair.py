"""Starts the two ranks, gives them series of steps, and ends them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.environment import child_environment
from moe_serve.cluster.control.secret import new_secret

from .job import RankJob, Series, StepMarks
from .way import Way

_END_LIMIT_S = 20.0


class Pair:
    """Both ranks, loaded."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]], way: Way) -> None:
        self._processes, self._way = processes, way
        self._epoch = 0
        facts = [_answer(process) for process in processes]
        self.num_layers: int = facts[0]["num_layers"]

    def take_steps(
        self,
        delay_s: float,
        steps: Sequence[Sequence[int]],
        *,
        is_parted: bool = False,
        is_counted: bool = False,
        is_timed: bool = True,
    ) -> list[tuple[StepMarks, StepMarks]]:
        """Returns each step as the attention rank and as the expert rank measured it.

        `is_timed` False: without the times of its messages.
        """
        self._epoch += 1
        left_s = self._way.delay(delay_s)
        series = Series(
            epoch=self._epoch,
            delay_s=left_s,
            steps=[list(rows) for rows in steps],
            is_parted=is_parted,
            is_counted=is_counted,
            is_timed=is_timed,
        )
        for process in self._processes:
            _write(process, asdict(series))
        attention, expert = (
            [StepMarks(**marks) for marks in _answer(process)] for process in self._processes
        )
        return list(zip(attention, expert, strict=True))


@contextmanager
def started_pair(
    model: Path, context: int, max_rows: int, cores: Sequence[int] | None, way: Way
) -> Iterator[Pair]:
    """Starts an attention rank on the first core and an expert rank on the second.

    The first rank serves the store, because this process may have no access to the network of the
    ranks.
    """
    processes: list[subprocess.Popen[str]] = []
    port, secret = 0, new_secret()
    try:
        for place, role in enumerate(("attention", "expert")):
            processes.append(_start())
            job = RankJob(
                role=role,
                model=str(model.resolve()),
                core=cores[place] if cores else None,
                context=context,
                max_rows=max_rows,
                host=way.addresses[place],
                network=way.networks[place],
                store_host=way.addresses[0],
                store_port=port,
                secret=secret.text,
            )
            _write(processes[place], asdict(job))
            port = port or _answer(processes[place])["store_port"]
        yield Pair(processes, way)
    finally:
        for process in processes:
            _end(process)


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pingpong.rank"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
        env=child_environment(1),
    )


def _answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None, "it is a pipe"
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a rank ended with code {process.wait()}; its last words are above.")
    return json.loads(line)


def _write(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin is not None, "it is a pipe"
    with suppress(BrokenPipeError):  # the next read reports it
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()


def _end(process: subprocess.Popen[str]) -> None:
    """Closes the input of a rank, which asks it to end."""
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
