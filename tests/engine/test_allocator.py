"""Large blocks that were freed are kept."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource
import sys
import torch
from moe_serve.engine.allocator import keep_freed_memory

def faults_of_blocks():
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.empty(8 << 20, dtype=torch.uint8).fill_(1) for _ in range(3)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start

if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(40):
    faults_of_blocks()
print(sum(faults_of_blocks() for _ in range(5)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_blocks_are_used_again_without_faults() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, "keep"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1000, "5 times 24 MiB are 30 720 pages"
