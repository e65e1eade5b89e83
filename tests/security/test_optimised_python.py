"""`python -O` drops assertions, so a request must not be refused by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.security.answer_bad_requests import answers_of
from tests.support.security.real_server import RealServer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(400)  # two servers
def test_bad_requests_are_answered_the_same_without_assertions(server: RealServer) -> None:
    """PYSEC-2026-2303 (an assertion that a request reached): 4xx with and without `-O`."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    command = [sys.executable, "-O", str(ROOT / "tests/support/security/answer_bad_requests.py")]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    plain, *with_assertions = json.loads(json.dumps(answers_of(server)))
    optimised, *without = json.loads(done.stdout)
    assert (plain, optimised) == (0, 1)
    assert with_assertions == without
    assert {status for status, _ in without} == {200, 400, 404}
    assert sum(status == 400 for status, _ in without) > 200
