"""The path of a streamed chat from its route to its expert kernel stays short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_chat_reaches_the_experts_in_few_calls() -> None:
    path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels"))
    traced = subprocess.run(
        [sys.executable, "-m", "trace_chat"],
        cwd=ROOT / "scripts",
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    last = traced.stdout.splitlines()[-1]
    found = re.fullmatch(r"(\d+) calls in (\d+) files \(limits: 14 and 10\)", last)
    assert traced.returncode == 0 and found, traced.stdout[-3000:] + traced.stderr[-3000:]
    assert "create_chat_completion" in traced.stdout and "__call__" in traced.stdout
    assert int(found[1]) <= 14 and int(found[2]) <= 10
