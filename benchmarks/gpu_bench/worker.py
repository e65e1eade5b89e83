"""Measures one engine in a separate process on a GPU: `python -m gpu_bench.worker JOB OUTCOME`.

When the process ends, so does everything that the engine left in the device's memory, before the
next one starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from gpu_bench.job import OWN, PEER, Job, Outcome
from harness.work import Kind, make_prompts

Save = Callable[[Outcome], None]
_ROOM = 1.1  # of the weights: activations, cache and graphs come on top


class Engine(Protocol):
    """An interface: continues prompts greedily and never stops early."""

    @property
    def facts(self) -> dict[str, str]: ...

    def generate(self, prompts: list[list[int]], num_output: int) -> list[list[int]]: ...


def main() -> None:
    job, path = Job.read(Path(sys.argv[1])), Path(sys.argv[2])
    if job.entrant.engine == PEER:
        hide_our_kernels()
    run_job(job, lambda outcome: outcome.write(path))


def hide_our_kernels() -> None:
    """Removes the repository from `sys.path`, because transformers would import our folder as
    `kernels`.

    The modules of ours that its adapter needs are imported before that.
    """
    for name in ("model", "random_weights"):
        importlib.import_module(f"gpu_bench.{name}")
    folders = [Path(entry or ".") for entry in sys.path]
    sys.path[:] = [
        entry
        for entry, folder in zip(sys.path, folders, strict=True)
        if not (folder / "kernels").is_dir()
    ]


def run_job(job: Job, save: Save) -> Outcome:
    """Creates the engine and gives it each kind of work; reports a failure in one line."""
    outcome = Outcome(error=refusal(job))
    if not outcome.error:
        started = time.perf_counter()
        try:
            engine = make_engine(job)
        except Exception as error:  # an engine may fail in any way, and the others go on
            outcome.error = told(error)
        else:
            outcome.load_s = time.perf_counter() - started
            outcome.facts = dict(engine.facts)
            _run_kinds(job, engine, outcome, save)
    outcome.is_done = not outcome.error
    save(outcome)
    return outcome


def refusal(job: Job) -> str:
    """Returns the reason why the job cannot begin, or an empty text."""
    if job.entrant.engine == PEER and importlib.util.find_spec("transformers") is None:
        return "transformers is not installed here"
    if torch.device(job.device).type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        if free < _ROOM * job.num_bytes:
            return (
                f"the weights take {job.num_bytes / 2**30:.1f} GiB, and the device has "
                f"{free / 2**30:.1f} GiB free: choose a smaller --model, or packed weights"
            )
    return ""


def make_engine(job: Job) -> Engine:
    """Creates the engine; its module is imported only here, because transformers may be missing."""
    module = "own_engine" if job.entrant.engine == OWN else "hugging_face"
    name = "OwnEngine" if job.entrant.engine == OWN else "Transformers"
    made: Engine = getattr(importlib.import_module(f"gpu_bench.{module}"), name)(job)
    return made


def _run_kinds(job: Job, engine: Engine, outcome: Outcome, save: Save) -> None:
    """Gives every entrant the same prompts. After a kind of work failed, the others are still
    tried.
    """
    for kind in job.work.kinds():
        rng = random.Random(f"{job.work.seed} {kind.num_prompts} {kind.num_prompt_tokens}")
        try:
            _run_kind(job, engine, outcome, kind, rng)
        except Exception as error:  # as above; memory above all
            outcome.failures[kind.name] = told(error)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if torch.cuda.is_available():
            outcome.peak_bytes = torch.cuda.max_memory_allocated()
        save(outcome)


def _run_kind(job: Job, engine: Engine, outcome: Outcome, kind: Kind, rng: random.Random) -> None:
    """Runs a kind of work once to compile and capture, and then `repeat` times."""
    for round_ in range(job.work.repeat + 1):
        prompts = make_prompts(rng, kind, job.vocab_size)
        started = time.perf_counter()
        answers = engine.generate(prompts, kind.num_output)
        seconds = time.perf_counter() - started
        lengths = {len(answer) for answer in answers}
        if lengths != {kind.num_output}:
            raise RuntimeError(f"answers of {sorted(lengths)} tokens, not {kind.num_output}")
        if round_ > 0:
            outcome.samples_s.setdefault(kind.name, []).append(seconds)
        if kind.name == "single" and round_ == 0:
            outcome.answers = answers


def told(error: BaseException) -> str:
    """Returns one line about a failure: the first line for torch's out-of-memory errors."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


if __name__ == "__main__":
    main()
