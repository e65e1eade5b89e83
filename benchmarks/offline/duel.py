"""Loads moe-serve and one peer side by side, and gives them turns with the same prompts.

If the machine is slow for a minute, it is then slow for both. There is one peer at a time, because
all of them together would not fit into memory. The peers on the command line:

--peer transformers                    in this interpreter, its first variant
--peer transformers/eager              another variant
--peer vllm/eager=envs/vllm/bin/python in an environment of its own
"""

from __future__ import annotations

import random
import sys
import tempfile
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.environment import worker_environment
from harness.work import Kind, Work, make_prompts

from .contestant import Contestant, ContestantError
from .job import Job, Ready, Turn
from .result import Result

OWN = "moe-serve"
VARIANTS = {
    "llama.cpp": ("",),
    "vllm": ("compiled", "eager"),
    "vllm-zentorch": ("compiled", "eager"),
    "transformers": ("grouped_mm", "eager", "batched_mm"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """An engine, its variant, and the interpreter that has it installed. `weights`: a folder, or a
    GGUF file, that it reads in place of the run's.
    """

    engine: str
    variant: str = ""
    python: str = sys.executable
    weights: Path | None = None

    @property
    def name(self) -> str:
        name = f"{self.engine}/{self.variant}" if self.variant else self.engine
        return name if self.weights is None else f"{name} {self.weights.stem}"


def parse_peer(text: str) -> Entrant:
    """`NAME[/VARIANT][=PYTHON]`. Raises what argparse turns into a message."""
    name, _, python = text.partition("=")
    engine, _, variant = name.partition("/")
    if engine not in VARIANTS:
        raise ArgumentTypeError(f"{engine!r} is none of {', '.join(VARIANTS)}")
    variants = VARIANTS[engine]
    if variant and variant not in variants:
        choices = ", ".join(v for v in variants if v) or "none"
        raise ArgumentTypeError(f"{engine} has no variant {variant!r}: {choices}")
    return Entrant(engine=engine, variant=variant or variants[0], python=python or sys.executable)


_BENCHMARKS = Path(__file__).resolve().parents[1]
# Import the worker and then leave the path as it was: a peer may import a package that has the name
# of one of our folders.
_START = (
    f"import sys; sys.path.insert(0, {str(_BENCHMARKS)!r}); from offline.worker import main; "
    "sys.path.pop(0); main()"
)
_ELSEWHERE = Path(tempfile.gettempdir())


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings that all engines of a run share."""

    model: Path
    gguf: Path | None
    dtype: str  # never "auto"
    num_threads: int
    vocab_size: int
    work: Work
    is_read_first: bool = True  # so that loading finds the files in the page cache


@dataclass(slots=True)
class _Corner:
    """One engine during a duel."""

    entrant: Entrant
    contestant: Contestant
    ready: Ready | None = None
    load_s: float = 0.0
    samples_s: dict[str, list[float]] = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)
    error: str | None = None

    def load(self, setup: Setup) -> None:
        try:
            self.ready, self.load_s = self.contestant.make(_job(self.entrant, setup))
        except ContestantError as error:
            self.error = str(error)

    def take_turn(self, kind: Kind, turn: Turn, is_timed: bool) -> None:
        """Runs one turn; an engine that failed once gets no further turns."""
        if self.error is not None:
            return
        try:
            answer = self.contestant.generate(turn)
        except ContestantError as error:
            self.error = f"{kind.name}: {error}"
            return
        if is_timed:
            self.samples_s.setdefault(kind.name, []).append(answer.seconds)
            if kind.name == "batch":
                self.answers = self.answers or answer.token_ids

    def result(self) -> Result:
        memory = self.contestant.memory
        return Result(
            engine=self.entrant.name,
            load_s=self.load_s,
            peak_bytes=memory.peak_bytes,
            rest_bytes=memory.proportional_bytes(),
            cache_bytes=self.ready.cache_bytes if self.ready else None,
            versions=self.ready.versions if self.ready else {},
            samples_s=self.samples_s,
            answers=self.answers,
            error=self.error,
        )


def run_duel(entrants: Sequence[Entrant], setup: Setup) -> list[Result]:
    """Loads both engines, then runs each kind of work in turns. Returns one result per entrant."""
    corners: list[_Corner] = []
    try:
        for entrant in entrants:
            if setup.is_read_first:
                _read_once(_files(entrant, setup))
            command = [entrant.python, "-c", _START]
            environment = worker_environment(setup.num_threads, is_own=entrant.engine == OWN)
            corner = _Corner(entrant, Contestant(command, environment, _ELSEWHERE))
            corners.append(corner)
            corner.load(setup)
        _take_turns(corners, setup)
        return [corner.result() for corner in corners]
    finally:
        for corner in corners:
            corner.contestant.close()


def _take_turns(corners: list[_Corner], setup: Setup) -> None:
    """Runs each kind of work once to warm up and `repeat` times timed, with an alternating first
    turn.
    """
    rng = random.Random(setup.work.seed)
    for kind in setup.work.kinds():
        for round_ in range(setup.work.repeat + 1):
            is_timed = round_ > 0
            turn = Turn(
                prompts=make_prompts(rng, kind, setup.vocab_size),
                num_output=kind.num_output if is_timed else kind.warm_up_output,
            )
            for corner in corners if round_ % 2 else corners[::-1]:
                corner.take_turn(kind, turn, is_timed)
        sys.stderr.write(f"  {kind.name}\n")


def _job(entrant: Entrant, setup: Setup) -> Job:
    model, gguf = _weights(entrant, setup)
    return Job(
        engine=entrant.engine,
        variant=entrant.variant,
        model=str(model.resolve()),
        gguf=str(gguf.resolve()) if gguf else None,
        dtype=setup.dtype,
        num_threads=setup.num_threads,
        max_model_len=setup.work.longest + 1,
        max_num_seqs=max(setup.work.batch_size, 1),
    )


def _weights(entrant: Entrant, setup: Setup) -> tuple[Path, Path | None]:
    if entrant.engine == "llama.cpp":
        return setup.model, entrant.weights or setup.gguf
    return entrant.weights or setup.model, setup.gguf


def _files(entrant: Entrant, setup: Setup) -> list[Path]:
    model, gguf = _weights(entrant, setup)
    if entrant.engine == "llama.cpp" and gguf:
        return [gguf]
    return sorted(model.glob("*.safetensors"))


def _read_once(paths: Sequence[Path]) -> None:
    """Reads the files once, so that every engine loads from the page cache and none from the
    disk.
    """
    for path in paths:
        with path.open("rb") as file:
            while file.read(16 * 2**20):
                continue
