"""Copies of a template process behave like ordinary processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forks import popen
from tests.support.forks.order import fixed_variables, program_of

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sys.version_info < (3, 11), reason="no copies here"
)
ROOT = Path(__file__).resolve().parents[2]
SERVE = [sys.executable, "-m", "moe_serve", "serve", "--port", "0", "--num-threads", "1"]


@pytest.fixture(autouse=True, scope="module")
def template() -> Iterator[None]:
    """A template in the current environment, whatever other tests have changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "_fork_exec", popen.ORIGINAL)
        popen.use(popen.Template())
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(SERVE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "ready at" in process.stdout.readline()
        yield process
        process.kill()


def stat_of(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name."""
    return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()


def test_a_copy_is_a_child_with_its_own_command_line(server: subprocess.Popen[str]) -> None:
    assert stat_of(server.pid)[1] == str(os.getpid())
    shown = Path(f"/proc/{server.pid}/cmdline").read_text("utf-8")
    assert shown.rstrip("\0").split("\0") == SERVE
    started = {Path(f"/proc/{pid}/cmdline").read_text("utf-8") for pid in children(server.pid)}
    assert any("template of" in line for line in started), "it was not copied"


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()


def test_its_template_ends_with_it() -> None:
    with subprocess.Popen(SERVE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        left = children(process.pid)
        process.kill()
        assert left
        assert process.wait() == -signal.SIGKILL
        process.stdout.read()  # ends, because no other process holds its output
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() and stat_of(int(pid))[0] != "Z" for pid in left):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_the_exit_code_and_the_streams_are_its_own(tmp_path: Path) -> None:
    wrong = [*SERVE, "--max-num-seqs", "none"]
    done = subprocess.run(wrong, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--max-num-seqs" in done.stderr and "Traceback" not in done.stderr


def test_only_known_programs_in_equal_surroundings_are_copied() -> None:
    program = program_of([sys.executable, "-P", "-m", "moe_serve", "serve", "x"])
    assert program is not None
    assert (program.module, program.arguments, program.safe_path) == (
        "moe_serve", ("serve", "x"), True,
    )  # fmt: skip
    for other in (["sh", "-c", "x"], [sys.executable, "-c", "1"], [sys.executable, "-m", "json"]):
        assert program_of(other) is None
    asked = {"OMP_NUM_THREADS": "1", "MOE_SERVE_PORT": "2", "PYTHONPATH": "x"}
    assert fixed_variables(asked) == {"OMP_NUM_THREADS": "1"}


def test_an_environment_that_changed_for_good_gets_a_new_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These templates and programs import nothing, as it takes seconds."""
    (tmp_path / "nothing.py").touch()
    nothing = [sys.executable, "-m", "tests.support.forks.script", str(tmp_path / "nothing.py")]
    start = "from tests.support.forks import template; template.load = lambda: None; "
    monkeypatch.setattr(popen, "_TEMPLATE", f"{start}{popen._TEMPLATE}")
    monkeypatch.setattr(subprocess, "_fork_exec", popen.ORIGINAL)
    template = popen.Template()
    popen.use(template)
    found = list[dict[str, str]]()
    for value in ("1", "2", "2"):
        monkeypatch.setenv("SOME_VARIABLE", value)
        assert subprocess.run(nothing, cwd=ROOT, check=False).returncode == 0
        found.append(template.variables)
    assert [each["SOME_VARIABLE"] for each in found] == ["1", "1", "2"]
