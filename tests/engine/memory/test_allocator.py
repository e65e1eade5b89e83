"""The allocator keeps large blocks that were freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource
import sys
import torch
from moe_serve.engine.memory.allocator import keep_freed_memory

x = torch.zeros(64, 4096)

def faults_of_a_draw():
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    probabilities = torch.softmax(x - x.amax(-1, keepdim=True), -1)
    probabilities.double().cumsum(-1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start

if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(40):
    faults_of_a_draw()
print(sum(faults_of_a_draw() for _ in range(5)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_blocks_are_used_again_without_faults() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, "keep"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 500, "5 draws take 5 MiB each: 6400 pages"
