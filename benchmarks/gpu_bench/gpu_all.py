"""Runs everything that needs a GPU, in pieces: tests, tuning, kernels, the whole engine.

    make gpu-bench ARGS="--seconds 570"       repeat until all is done: each call continues
    python benchmarks/run.py gpu_all --list
    python benchmarks/run.py gpu_all --only tests engine --again

Each piece writes its results while it runs. benchmarks/results/<device>/progress.json lists the
pieces that are done; their output is in logs/ beside it. The most informative pieces come first. A
piece that `--seconds` interrupts runs again in a later call, after the pieces that have not run
yet, and keeps the results that it had written. A piece that failed is repeated only with `--again`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gpu_bench.job import DEFAULT
from harness.environment import child_environment
from kernel_bench.measurement import RESULTS, device_folder
from kernel_bench.shapes import GPU_DECODES, GPU_LAYERS

ROOT = Path(__file__).resolve().parents[2]
FIRST_LAYER = "qwen3-30b-a3b"  # the one that targets are set for
_GPU_TESTS = "tests/moe_kernels/gpu"
_FIRST_TESTS = ("test_graphed_steps.py", "test_gpu_kernels.py", "test_grouped_gemm.py")
_COMPILED_ELSEWHERE = "test_compile_coverage.py"  # asks nothing of a device
_TUNING_S = 240.0  # for the first tuning; the rest of it comes last
_STOP_S = 10.0
_LEAST_S = 30.0  # no piece is begun with less time left


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of work: `part` is tests, tuning, kernels or engine, `command` follows the
    interpreter.

    Without the modules in `needs` the piece is skipped. After `limit_s` it is interrupted, and is
    not continued in this call.
    """

    name: str
    part: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The result of a piece: "done", "failed", "cut" (interrupted) or "left out"."""

    state: str
    seconds: float
    last_line: str


def main() -> int:
    arguments = parse_arguments()
    pieces = [piece for piece in all_pieces() if piece.part in arguments.only]
    if arguments.list:
        for piece in pieces:
            print(f"{piece.name:40} python {' '.join(piece.command)}")
        return 0
    if not torch.cuda.is_available():
        print("torch finds no CUDA GPU here; --list says what would run", file=sys.stderr)
        return 1
    folder = RESULTS / device_folder(torch.device("cuda"))
    return run(pieces, folder, arguments.seconds, is_again=arguments.again)


def parse_arguments() -> argparse.Namespace:
    parts = ("tests", "tuning", "kernels", "engine")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, help="of this call; default: until all is done")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART")
    parser.add_argument("--again", action="store_true", help="also what is done, or failed")
    parser.add_argument("--list", action="store_true", help="the pieces in order; runs nothing")
    return parser.parse_args()


def all_pieces() -> list[Piece]:
    """Returns the pieces in the order in which they run."""
    return [
        *_tests(),
        _tuning(FIRST_LAYER, _TUNING_S),
        *(_kernels(shape) for shape in (FIRST_LAYER, *GPU_DECODES)),
        *(_engine(name) for name in DEFAULT),
        *(_kernels(shape) for shape in GPU_LAYERS if shape != FIRST_LAYER),
        *(_tuning(layer, None) for layer in GPU_LAYERS if layer != FIRST_LAYER),
    ]


def _tests() -> list[Piece]:
    """Returns the tests: CUDA graphs first, because only a GPU can test them; then the sets;
    then the rest.
    """
    files = sorted(path.name for path in (ROOT / _GPU_TESTS).glob("test_*.py"))
    rest = [name for name in files if name not in (*_FIRST_TESTS, _COMPILED_ELSEWHERE)]
    return [
        *(_test(name.removesuffix(".py"), [name]) for name in _FIRST_TESTS),
        _test("the rest", rest),
    ]


def _test(name: str, files: Iterable[str]) -> Piece:
    """Returns a piece that runs tests. Warnings of other versions do not fail it, and compiling
    may take long.
    """
    return Piece(
        name=f"tests: {name}",
        part="tests",
        command=(
            *("-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"),
            *("-o", "timeout=300"),
            *(f"{_GPU_TESTS}/{file}" for file in files),
        ),
        needs=("pytest", "pytest_timeout", "hypothesis", "tokenizers", "transformers"),
    )


def _tuning(layer: str, limit_s: float | None) -> Piece:
    command = ("scripts/tune_kernels.py", "--write", "--layers", layer)
    return Piece(name=f"tuning: {layer}", part="tuning", command=command, limit_s=limit_s)


def _kernels(shape: str) -> Piece:
    command = ("benchmarks/run.py", "kernels", "--save", "--shapes", shape)
    return Piece(name=f"kernels: {shape}", part="kernels", command=command)


def _engine(entrant: str) -> Piece:
    command = ("benchmarks/run.py", "gpu_engine", "--again", "--entrants", entrant)
    return Piece(name=f"engine: {entrant}", part="engine", command=command)


def run(pieces: list[Piece], folder: Path, seconds: float | None, *, is_again: bool) -> int:
    """Runs the pieces; returns 0 if none failed, in this call or before."""
    ends = float("inf") if seconds is None else time.monotonic() + seconds
    path = folder / "progress.json"
    records = read_records(path)
    for piece in in_turn(pieces, records, is_again=is_again):
        if ends - time.monotonic() < _LEAST_S:
            break
        print(f"{piece.name} ...", flush=True)
        records[piece.name] = record = run_piece(piece, folder, ends - time.monotonic())
        print(
            f"{piece.name}: {record.state}, {record.seconds:.0f} s: {record.last_line}", flush=True
        )
        write_records(records, path)
    states = [records[p.name].state if p.name in records else "waiting" for p in pieces]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    return 1 if "failed" in states else 0


def in_turn(pieces: list[Piece], records: Mapping[str, Record], *, is_again: bool) -> list[Piece]:
    """Returns the pieces to run, with interrupted ones after the others."""
    if is_again:
        return pieces
    states = {piece.name: records[piece.name].state for piece in pieces if piece.name in records}
    new = [piece for piece in pieces if states.get(piece.name, "left out") == "left out"]
    return new + [piece for piece in pieces if states.get(piece.name) == "cut"]


def run_piece(piece: Piece, folder: Path, left_s: float) -> Record:
    """Runs a piece; its output goes to its log, which the next run of the piece replaces."""
    missing = [name for name in piece.needs if importlib.util.find_spec(name) is None]
    if missing:
        return Record(state="left out", seconds=0.0, last_line=f"{', '.join(missing)} missing")
    log = folder / "logs" / f"{piece.name.replace(': ', '-').replace(' ', '_')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    limit_s = min(left_s, piece.limit_s or left_s)
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *piece.command],
            cwd=ROOT,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(None if limit_s == float("inf") else limit_s)
            state = "failed" if code else "done"
        except subprocess.TimeoutExpired:
            state = "cut"
        finally:  # also where this process is interrupted
            stop(process)
    lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    return Record(
        state=state,
        seconds=round(time.monotonic() - started, 1),
        last_line=lines[-1][:200] if lines else "",
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminates the process, so that it can end its children, and kills it after a while."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def environment() -> dict[str, str]:
    """Returns the environment of a piece: no installation, no downloads, no interpreter of
    Triton.
    """
    more = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TRITON_INTERPRET": "0"}
    return child_environment() | more


def read_records(path: Path) -> dict[str, Record]:
    if not path.exists():
        return {}
    return {name: Record(**entry) for name, entry in json.loads(path.read_text("utf-8")).items()}


def write_records(records: dict[str, Record], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {name: asdict(record) for name, record in records.items()}
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
