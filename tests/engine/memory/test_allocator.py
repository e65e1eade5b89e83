"""The allocator keeps large blocks that were freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.engine import draw_faults


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_blocks_are_used_again_without_faults() -> None:
    done = subprocess.run(
        [sys.executable, "-m", draw_faults.__name__], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 500, "5 draws take 5 MiB each: 6400 pages"
