"""The runner of the benchmarks lists, describes and refuses names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from run import BENCHMARKS, description, module_path

ROOT = Path(__file__).resolve().parents[2]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/run.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_name_leads_to_a_benchmark_that_names_its_command(name: str) -> None:
    text = module_path(name).read_text("utf-8")
    assert description(name).endswith(".") and "\ndef main(" in text
    assert f"benchmarks/run.py {name}" in text


def test_lists_all_names_with_a_line_each() -> None:
    done = _run()
    assert done.returncode == 0
    lines = done.stdout.splitlines()[2:]
    assert lines == [f"  {name:20}{description(name)}" for name in BENCHMARKS]


def test_passes_arguments_on_and_refuses_an_unknown_name() -> None:
    done = _run("placement", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: run.py placement [-h]")
    assert "--published" in done.stdout
    done = _run("nothing")
    assert done.returncode == 2
    assert done.stderr.startswith("There is no benchmark 'nothing'. The names are: engine, ")
