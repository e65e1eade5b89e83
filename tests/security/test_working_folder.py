"""A server's processes run no code from the folder in which the server is started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_serve.child_python import command_without_switch, module_command

MODULE = "concurrent.futures.thread"  # imports `queue`, and does nothing
WITHOUT_PATH = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def is_run_in(folder: Path, command: Sequence[str]) -> bool:
    (folder / "queue.py").write_text("open('ran', 'w').close()\nfrom _queue import *\n")
    done = subprocess.run(
        command, cwd=folder, env=WITHOUT_PATH, capture_output=True, text=True, timeout=60
    )
    ran = (folder / "ran").exists()
    assert ran or done.returncode == 0, done.stderr
    return ran


@pytest.mark.parametrize("command", [module_command, command_without_switch])
def test_a_module_in_the_working_folder_is_not_run(tmp_path: Path, command: object) -> None:
    assert callable(command)
    assert not is_run_in(tmp_path, command(MODULE))


def test_it_would_be_without_the_care(tmp_path: Path) -> None:
    assert is_run_in(tmp_path, (sys.executable, "-m", MODULE))


def test_arguments_arrive(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("import sys; print(sys.argv[1:], __name__)")
    environment = {"PYTHONPATH": str(tmp_path)}
    for command in (module_command, command_without_switch):
        done = subprocess.run(
            command("shown", "a b", "--c"), env=environment, capture_output=True, text=True
        )
        assert done.stdout == "['a b', '--c'] __main__\n", done.stderr


def test_all_processes_of_ours_are_started_so() -> None:
    root = Path(__file__).resolve().parents[2] / "moe_serve"
    starters = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if '"-m", ' in path.read_text() and "sys.executable" in path.read_text()
    }
    assert starters == {"child_python.py"}
