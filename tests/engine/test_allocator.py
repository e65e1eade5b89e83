"""Large blocks that were freed are kept."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource
import torch
from moe_serve.engine.allocator import keep_freed_memory

def faults_of_a_block():
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(4 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start

assert keep_freed_memory()
for _ in range(3):
    faults_of_a_block()
print(faults_of_a_block())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_a_block_is_used_again_without_faults() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100, "4 MiB are 1024 pages; they would all fault"
