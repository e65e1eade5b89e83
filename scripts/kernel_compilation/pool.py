"""Compiles in parallel, and caches the facts of compiled kernels in the user's cache folder, one
small JSON file each. A job has a case's name and a target, because kernels cannot be pickled.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernel_compilation.compilation import cache_key, compile_case, translate_case
from kernel_compilation.facts import CompiledFacts
from moe_kernels.cpu.cpu_library import cache_folder
from moe_kernels.gpu.compile_case import CompileCase, find_cases

_FIELDS = {field.name for field in dataclasses.fields(CompiledFacts)}


def facts_folder() -> Path:
    """Returns the cache folder, beside the compiled CPU kernels."""
    return cache_folder() / "kernel-facts"


def load(key: str, folder: Path) -> CompiledFacts | None:
    """Returns the facts under this key; None if absent or written by another version."""
    try:
        found = json.loads((folder / f"{key}.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return CompiledFacts(**found) if isinstance(found, dict) and set(found) == _FIELDS else None


def store(key: str, facts: CompiledFacts, folder: Path) -> None:
    """Writes the file completely or not at all, because two processes may compile the same
    kernel."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".part")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(facts), file)
    Path(name).replace(folder / f"{key}.json")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The compiler's facts, or the last line of its error message. Translations have no facts."""

    facts: CompiledFacts | None
    error: str
    is_cached: bool


def run_jobs(
    cases: Mapping[str, CompileCase], jobs: Sequence[Job], num_workers: int
) -> Iterator[tuple[Job, Outcome]]:
    """Yields cached results first, and the others when they are ready."""
    missing = []
    for job in jobs:
        key = cache_key(cases[job.case], job.target)
        facts = load(key, facts_folder())
        if facts is None and (job.is_compiled or not _mark(key).exists()):
            missing.append(job)
        else:
            yield job, Outcome(facts, "", True)
    if missing:
        yield from _run_missing(missing, min(num_workers, len(missing)))


def _mark(key: str) -> Path:
    """Returns the empty file that says that a case could be translated."""
    return facts_folder() / f"{key}.translated"


def _run_missing(jobs: Sequence[Job], num_workers: int) -> Iterator[tuple[Job, Outcome]]:
    with (
        _own_triton_cache(),
        ProcessPoolExecutor(num_workers, multiprocessing.get_context("fork")) as pool,
    ):
        futures = {pool.submit(_compile, job): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()


@contextmanager
def _own_triton_cache() -> Iterator[None]:
    """Keeps only the facts; Triton would store hundreds of cubins that are never run."""
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # the workers inherit it
        yield
    if before is None:
        del os.environ["TRITON_CACHE_DIR"]
    else:
        os.environ["TRITON_CACHE_DIR"] = before


@functools.cache
def _cases() -> dict[str, CompileCase]:
    return {case.name: case for case in find_cases()}


def _compile(job: Job) -> Outcome:
    case = _cases()[job.case]
    facts = None
    try:
        if job.is_compiled:
            facts = compile_case(case, job.target)
        else:
            translate_case(case, job.target)
    except Exception as error:  # triton's compiler passes on any exception of its passes
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        return Outcome(None, lines[-1] if len(lines) > 1 else lines[0], False)
    key = cache_key(case, job.target)
    if facts is not None:
        store(key, facts, facts_folder())
    else:
        facts_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        _mark(key).touch()
    return Outcome(facts, "", False)


@dataclass(frozen=True, slots=True)
class Job:
    """A case to compile for a chip, or only to translate into Triton's first language."""

    case: str
    target: int
    is_compiled: bool = True
