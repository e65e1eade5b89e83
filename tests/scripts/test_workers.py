"""`pytest --workers` runs every test once, in forks, and reports what a single process reports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
CONFTEST = "import os\nSTARTED_BY = os.getpid()\n"
SHARED = """
import os
from pathlib import Path
import pytest

@pytest.fixture(scope="module")
def number(tmp_path_factory):
    with open(Path(__file__).with_suffix(".log"), "a") as log:
        log.write(f"{os.getpid()} ")
    yield os.getpid()
    with open(Path(__file__).with_suffix(".log"), "a") as log:
        log.write("ended")

def test_one(number, tmp_path):
    assert number == os.getpid() != os.getppid()
    assert "w" in tmp_path.parent.name

def test_two(number, capfd):
    print("to be read")
    assert number == os.getpid()
    assert capfd.readouterr().out == "to be read\\n"
"""
MIXED = """
import os, signal, warnings
import pytest

def test_passes(): pass
def test_fails():
    print("written before")
    assert 1 == 2
@pytest.mark.skip(reason="never")
def test_is_skipped(): pass
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
def test_runs_after_a_death(): pass
@pytest.fixture
def broken(): raise ValueError("no such thing")
def test_has_no_fixture(broken): pass
def test_warns(): warnings.warn("look here")
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "pytest", "-p", "tests.support.forks.workers", "--workers", "2",
        "-p", "no:cacheprovider", "--rootdir", str(folder), "-c", os.devnull,
        "--basetemp", str(folder / "temporary"), *arguments, str(folder),
    ]  # fmt: skip
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_files_share_their_fixtures(tmp_path: Path) -> None:
    names = [f"test_{letter}" for letter in "abcdef"]
    for name in names:
        (tmp_path / f"{name}.py").write_text(SHARED)
    done = run(tmp_path)
    assert done.returncode == 0 and "12 passed" in done.stdout, done.stdout + done.stderr
    for name in names:
        text = (tmp_path / f"{name}.log").read_text()
        assert re.fullmatch(r"\d+ ended", text), f"{name}: {text}"


def test_every_outcome_is_reported(tmp_path: Path) -> None:
    (tmp_path / "test_mixed.py").write_text(MIXED)
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
    done = run(tmp_path, "-ra")
    assert done.returncode == 1
    assert "2 failed, 4 passed, 1 skipped, 1 warning, 1 error" in done.stdout, done.stdout
    for text in (
        "test_fails - assert 1 == 2",
        "written before",
        "The worker died: exit status -9.",
        "test_has_no_fixture - ValueError: no such thing",
        "look here",
        "never",
    ):
        assert text in done.stdout, done.stdout


def test_the_first_failure_ends_all(tmp_path: Path) -> None:
    waits = "import time\ndef test_waits(): time.sleep(100)\n"
    for number in range(4):
        (tmp_path / f"test_waits{number}.py").write_text(waits)
    (tmp_path / "test_fails.py").write_text(
        "def test_fails(): assert False\ndef test_more(): pass\n"
    )
    done = run(tmp_path, "-x")
    assert done.returncode == 1 and "stopping after 1 failures" in done.stdout, done.stdout


def test_what_fails_outside_of_tests_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_runtest_protocol(): raise LookupError('not in a test')\n"
    )
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    done = run(tmp_path)
    assert done.returncode == 3 and "not in a test" in done.stdout, done.stdout
