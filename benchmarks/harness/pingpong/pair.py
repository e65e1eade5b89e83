"""The two ranks as the benchmark sees them: started, given series of steps, ended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_serve.cluster.store import serve_store

from ..environment import child_environment
from .job import RankJob, Series, StepMarks
from .rank import HOST

_END_LIMIT_S = 20.0


class Pair:
    """Both ranks, loaded."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self._epoch = 0
        facts = [self._answer(process) for process in processes]
        self.num_layers: int = facts[0]["num_layers"]

    def take_steps(
        self, delay_s: float, steps: Sequence[Sequence[int]]
    ) -> list[tuple[StepMarks, StepMarks]]:
        """Each step as the attention rank and as the expert rank saw it."""
        self._epoch += 1
        series = Series(epoch=self._epoch, delay_s=delay_s, steps=[list(rows) for rows in steps])
        for process in self._processes:
            _write(process, asdict(series))
        attention, expert = (
            [StepMarks(**marks) for marks in self._answer(process)] for process in self._processes
        )
        return list(zip(attention, expert, strict=True))

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None, "it is a pipe"
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"a rank ended with code {process.wait()}; its last words are above.")
        return json.loads(line)


@contextmanager
def started_pair(
    model: Path, context: int, max_rows: int, cores: Sequence[int] | None
) -> Iterator[Pair]:
    """An attention rank on the first core and an expert rank on the second."""
    store = serve_store(HOST, 0, 60.0)
    roles = ("attention", "expert")
    command = [sys.executable, "-m", "harness.pingpong.rank"]
    processes = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
            env=child_environment(1),
        )
        for _ in roles
    ]
    try:
        for index, (role, process) in enumerate(zip(roles, processes, strict=True)):
            job = RankJob(
                role=role,
                model=str(model.resolve()),
                core=cores[index] if cores else None,
                context=context,
                max_rows=max_rows,
                store_port=store.port,
            )
            _write(process, asdict(job))
        yield Pair(processes)
    finally:
        for process in processes:
            _end(process)


def _write(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin is not None, "it is a pipe"
    with suppress(BrokenPipeError):  # reading tells
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()


def _end(process: subprocess.Popen[str]) -> None:
    """End of input asks it to end."""
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
