"""One engine in a process of its own: reads a Task as JSON on stdin, writes a Result as JSON.

Its own process, so that neither memory, thread pools nor caches of one engine help another.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from .engines import make_engine
from .environment import child_environment
from .work import Figures, Work, measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to run, on which checkpoint. `result` is the file to write."""

    engine: str
    model: str
    dtype: str
    num_threads: int
    vocab_size: int
    work: Work
    result: str
    started: float  # of the wall clock, when the process was started


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`figures` is None if the engine failed; `error` then says why."""

    engine: str
    load_s: float = 0.0  # from the start of the process until it can take work
    peak_rss_mib: float = 0.0
    figures: Figures | None = None
    error: str | None = None


def run_in_process(
    engine: str, model: Path, dtype: str, num_threads: int, vocab_size: int, work: Work
) -> Result:
    """Start a worker, wait for it, and read its result."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        task = Task(
            engine=engine,
            model=str(model.resolve()),
            dtype=dtype,
            num_threads=num_threads,
            vocab_size=vocab_size,
            work=work,
            result=str(path),
            started=time.time(),
        )
        here = Path(__file__).resolve().parents[1]
        done = subprocess.run(
            [sys.executable, "-m", "harness.worker"],
            input=json.dumps(asdict(task)),
            text=True,
            cwd=here,
            env=child_environment(num_threads),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            reason = lines[-1] if lines else f"exit code {done.returncode}"
            return Result(engine=engine, error=reason)
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Result(**fields | {"figures": Figures(**fields["figures"])})


def _work_on(task: Task) -> Result:
    engine = make_engine(task.engine, task.model, task.dtype, task.num_threads, task.work)
    load_s = time.time() - task.started
    figures = measure(engine, task.work, task.vocab_size)
    return Result(
        engine=task.engine, load_s=load_s, peak_rss_mib=_peak_rss_kib() / 1024, figures=figures
    )


def _peak_rss_kib() -> int:
    """From Linux's VmHWM: `ru_maxrss` would start at the parent's size."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    fields = json.load(sys.stdin)
    task = Task(**fields | {"work": Work(**fields["work"])})
    result = asdict(_work_on(task))
    Path(task.result).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
