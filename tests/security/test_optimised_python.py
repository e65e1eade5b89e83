"""`python -O` drops assertions, so a request must not be refused by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(400)  # two servers
def test_bad_requests_are_answered_the_same_without_assertions() -> None:
    """PYSEC-2026-2303 (an assertion that a request reached): 4xx with and without `-O`."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    answers = []
    for flags in ([], ["-O"]):
        script = ROOT / "tests/support/security/answer_bad_requests.py"
        command = [sys.executable, *flags, str(script)]
        environment = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append(json.loads(done.stdout))
    (plain, *with_assertions), (optimised, *without) = answers
    assert (plain, optimised) == (0, 1)
    assert with_assertions == without
    assert {status for status, _ in without} == {200, 400, 404}
    assert sum(status == 400 for status, _ in without) > 200
