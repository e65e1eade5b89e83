"""A run that is killed at any moment leaves no folder that loads and does not block the next
run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moe_serve.model.load.loader import ModelLoader

ROOT = Path(__file__).resolve().parents[2]
# Forks once for each moment: importing torch for each would take seconds.
_CODE = """
import os, signal, sys
from pathlib import Path
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.checkpoint_writer import CheckpointWriter
from moe_serve.model.load.loader import ModelLoader
from moe_serve.quantize.quantise_plan import QuantiseRules
from moe_serve.quantize.quantize_job import QuantiseJob, quantise
from moe_serve.quantize.rounded_matrix import Storage

def killing(function, count):
    calls = iter(range(count))
    def run(*arguments, **named):
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return run

def loads(folder):
    try:
        ModelLoader(folder)
    except CheckpointError:
        return False
    return True

folder, root = map(Path, sys.argv[1:])
MOMENTS = {
    "first": (CheckpointWriter, "write", 0),
    "middle": (CheckpointWriter, "write", 60),
    "unfinished": (CheckpointWriter, "finish", 0),
    "unnamed": (Path, "rename", 0),
    "unconfigured": (Path, "rename", 1),
}
for name, (owner, method, count) in MOMENTS.items():
    pid = os.fork()
    if pid == 0:
        setattr(owner, method, killing(getattr(owner, method), count))
        (root / name).mkdir()
        job = QuantiseJob(
            folder=folder, out=root / name / "out", is_gptq=False,
            rules=QuantiseRules(experts=Storage(4, 32)),
        )
        quantise(job, lambda what, share: None, lambda outcome: {})
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    left = sorted(str(path.relative_to(root)) for path in (root / name).iterdir())
    loading = [each for each in left if loads(root / each)]
    print(name, code, loading, flush=True)
for name in MOMENTS:
    job = QuantiseJob(
        folder=folder, out=root / name / "out", is_gptq=False,
        rules=QuantiseRules(experts=Storage(4, 32)),
    )
    quantise(job, lambda what, share: None, lambda outcome: {})
    print(name, sorted(path.name for path in (root / name).iterdir()), flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_no_folder_loads(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "killed.py"
    file.write_text(_CODE, "utf-8")
    run = [sys.executable, "-m", "tests.support.forks.script", str(file)]
    done = subprocess.run(
        [*run, str(tiny_model), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = ["first", "middle", "unfinished", "unnamed", "unconfigured"]
    lines = done.stdout.splitlines()
    assert lines[:5] == [f"{name} -9 []" for name in names], done.stdout
    assert lines[5:] == [f"{name} ['out']" for name in names], done.stdout
    for name in names:
        assert ModelLoader(tmp_path / name / "out").weight_format.startswith("compressed")
