"""Measures DeepSpeed's MoE layer with its expert-parallel all-to-all, on two ranks of one core
each.

Each rank has half of the batch and half of the experts, as in a layout in which each rank also
computes attention for its half. The layer has the model's shapes and random weights of its own; no
token is dropped.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.environment import worker_environment

_LIMIT_S = 300.0
_REPEAT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedTimes:
    """Seconds of one MoE layer with `rows` on each of the two ranks, or the reason of a failure."""

    rows: int
    layer_s: float = 0.0
    missing: str | None = None


def time_deepspeed(
    sizes: dict[str, Any], rows: int, python: str | None, cores: Sequence[int] | None
) -> DeepSpeedTimes:
    """Runs the two ranks with the interpreter `python`, which has deepspeed; None is this one."""
    interpreter = python or sys.executable
    if not _has_deepspeed(interpreter):
        why = f"deepspeed is not installed in {interpreter}: pip install 'moe-serve[deepspeed]'"
        return DeepSpeedTimes(rows=rows, missing=why)
    job = {**sizes, "rows": [rows], "repeat": _REPEAT}
    port = _free_port()
    ranks = [
        _start(interpreter, rank, port, {**job, "core": cores[rank] if cores else None})
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=_LIMIT_S)[0] for process in ranks]
    except subprocess.TimeoutExpired:
        return DeepSpeedTimes(rows=rows, missing=f"deepspeed did not end in {_LIMIT_S:.0f} s")
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(process.returncode for process in ranks):
        return DeepSpeedTimes(rows=rows, missing="deepspeed failed; its last words are above")
    return DeepSpeedTimes(rows=rows, layer_s=max(json.loads(text)[str(rows)] for text in outputs))


def _has_deepspeed(interpreter: str) -> bool:
    look = "import importlib.util as u; exit(u.find_spec('deepspeed') is None)"
    try:
        return subprocess.run([interpreter, "-c", look], check=False).returncode == 0
    except OSError:
        return False


def _start(interpreter: str, rank: int, port: int, job: dict[str, Any]) -> subprocess.Popen[str]:
    environment = worker_environment(1, is_own=False) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
    }
    process = subprocess.Popen(
        [interpreter, "-m", "pingpong.deepspeed_rank"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
        env=os.environ | environment,
    )
    assert process.stdin is not None, "it is a pipe"
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    return process


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
