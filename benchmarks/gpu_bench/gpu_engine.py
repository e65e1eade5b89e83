"""Measures the whole engine on a GPU with random weights, beside limits and transformers.

    python benchmarks/run.py gpu_engine                         the missing results of Qwen3-30B-A3B
    python benchmarks/run.py gpu_engine --entrants moe-serve --again
    python benchmarks/run.py gpu_engine --tiny --device cpu --json build/tiny.json

One stream and 64 streams of 512 tokens in and 128 out. Results are added to
benchmarks/results/<device>/engine.json one by one. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from gpu_bench.job import ALL, DEFAULT, Entrant, Job, Outcome, entrant_of
from gpu_bench.model import EXPERT_FORMATS, model_names, model_size, read_spec, write_model
from gpu_bench.report import ModelReport, limits_of
from gpu_bench.worker import run_job, told
from harness.environment import child_environment, describe_environment
from harness.machine import MachineLimits
from harness.model_size import ModelSize
from harness.work import Work
from kernel_bench.clock import (
    CPU_SIZES,
    CUDA_SIZES,
    SMOKE_SIZES,
    Budget,
    Clock,
    DeviceLimits,
    measure_limits,
)
from kernel_bench.measurement import RESULTS, device_folder, device_name

_WORK = Work(
    single_prompt=512, single_output=128, batch_size=64, batch_prompt=512, batch_output=128,
    prefill_prompt=4096,
)  # fmt: skip
_TINY_WORK = Work(
    single_prompt=8, single_output=4, batch_size=3, batch_prompt=8, batch_output=4,
    prefill_prompt=20, repeat=1,
)  # fmt: skip


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engine is ended too
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, arguments.model, is_tiny=arguments.tiny)
        machine = measured_machine(device, arguments)
        report = ModelReport(
            model=f"{arguments.model}{' (tiny)' if arguments.tiny else ''}",
            dtype=arguments.dtype,
            work=arguments.work,
            device=device_name(device),
            environment=describe_environment(),
            machine={
                "copy GB/s": machine.read_gb_s,
                "matrix GFLOP/s": machine.gemm_gflop_s(arguments.dtype),
            },
        )
        path = arguments.json or RESULTS / device_folder(device) / "engine.json"
        report.merge(path)
        run_all(arguments, folder, machine, report, path)
    report.show()
    wanted = [report.outcomes.get(name) for name in arguments.entrants]
    has_own = any(o and o.is_done for o in wanted)
    return 0 if has_own else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen3-30B-A3B", choices=model_names(), metavar="MODEL")
    parser.add_argument("--entrants", nargs="+", choices=ALL, default=list(DEFAULT), metavar="NAME",
                        help=str(ALL))  # fmt: skip
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeat", type=int, help="timed runs of each kind of work; default 3")
    parser.add_argument("--batched-tokens", type=int, default=8192, help="of one step, at most")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of one entrant")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--json", type=Path, help="instead of benchmarks/results/<device>/")
    arguments = parser.parse_args()
    if not arguments.tiny and not arguments.device.startswith("cuda"):
        parser.error(f"there is no CUDA GPU to make {arguments.model} on: give --tiny, on the CPU")
    arguments.work = _TINY_WORK if arguments.tiny else _WORK
    if arguments.repeat:
        arguments.work = Work(
            **{name: getattr(arguments.work, name) for name in Work.__slots__}
            | {"repeat": arguments.repeat}
        )
    return arguments


def measured_machine(device: torch.device, arguments: argparse.Namespace) -> MachineLimits:
    """Returns the copy bandwidth and the matrix rate, measured as by the benchmark `kernels`."""
    dtype = getattr(torch, arguments.dtype)
    if arguments.tiny:
        limits = measure_limits(
            Clock(device, Budget(min_runs=1, max_runs=2, seconds=0.0), flush_bytes=0),
            dtype,
            SMOKE_SIZES,
        )
    else:
        sizes = CUDA_SIZES if device.type == "cuda" else CPU_SIZES
        limits = measure_limits(Clock(device, Budget()), dtype, sizes)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return _as_machine(limits)


def _as_machine(limits: DeviceLimits) -> MachineLimits:
    rate = limits.matrix_gflop_s
    return MachineLimits(
        num_threads=0,
        read_gb_s=limits.copy_gb_s,
        gemm_bf16_gflop_s=rate,
        gemm_fp32_gflop_s=rate,
    )


def run_all(
    arguments: argparse.Namespace,
    folder: Path,
    machine: MachineLimits,
    report: ModelReport,
    path: Path,
) -> None:
    """Runs one entrant after the other, and writes the file after each."""
    vocab_size = read_spec(folder).vocab_size
    for name in arguments.entrants:
        entrant = entrant_of(name)
        if name in report.outcomes and report.outcomes[name].is_done and not arguments.again:
            say(f"{name}: measured before (--again measures it again)")
            continue
        size = _size(folder, arguments.dtype, entrant)
        job = Job(
            entrant=entrant,
            folder=str(folder),
            device=arguments.device,
            dtype=arguments.dtype,
            vocab_size=vocab_size,
            num_bytes=size.num_bytes,
            max_batched_tokens=arguments.batched_tokens,
            work=arguments.work,
        )
        say(f"{name} ...")
        started = time.monotonic()
        is_alone = not arguments.tiny
        outcome = run_apart(job, folder, arguments.limit_s) if is_alone else run_here(job)
        say(f"{name}: {outcome.error or 'done'}, {time.monotonic() - started:.0f} s")
        report.outcomes[name] = outcome
        report.limits[name] = limits_of(machine, size, arguments.work)
        report.write(path)


def _size(folder: Path, dtype: str, entrant: Entrant) -> ModelSize:
    bits = EXPERT_FORMATS[entrant.weights].bits if entrant.weights else None
    return model_size(folder, dtype, bits)


def run_here(job: Job) -> Outcome:
    return run_job(job, lambda _: None)


def run_apart(job: Job, folder: Path, limit_s: float) -> Outcome:
    """Runs a job in a separate process. If it ends early, its results so far are kept."""
    asked, answer = folder / "job.json", folder / "outcome.json"
    job.write(asked)
    answer.unlink(missing_ok=True)
    environment = child_environment()
    benchmarks = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = f"{benchmarks}:{environment['PYTHONPATH']}"
    command = [sys.executable, "-m", "gpu_bench.worker", str(asked), str(answer)]
    error = "it ended without an answer"
    try:
        code = subprocess.run(command, env=environment, timeout=limit_s, check=False).returncode
        error = f"it ended with code {code}"
    except subprocess.TimeoutExpired as late:
        error = told(late) if answer.exists() else f"nothing was measured in {limit_s:.0f} s"
    outcome = Outcome.read(answer) if answer.exists() else Outcome(error=error)
    if not outcome.is_done and not outcome.error:
        outcome.error = error
    return outcome


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
