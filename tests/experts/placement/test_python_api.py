"""The example of the Python API runs as the page shows it and prints the page's output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from experts.placement.placement_error import PlacementInputError
from experts.placement.plan_file import read_placement
from experts.placement.problem.devices import ClusterDevices
from experts.placement.problem.model_facts import ModelFacts
from experts.placement.problem_sources import ProblemRequest

ROOT = Path(__file__).resolve().parents[3]
TRACE = ROOT / "configs/placement/demo-model.safetensors"


def example() -> tuple[str, str]:
    """Returns the code of the page's section and the output below it."""
    page = (ROOT / "docs/guide/python-api.md").read_text("utf-8")
    section = page[page.index("## Placement") :]
    blocks, block = list[str](), ""
    for line in section.splitlines():
        if line.startswith("    ") or (block and not line):
            block += f"{line}\n"
        elif block:
            blocks.append(dedent(block).strip())
            block = ""
    code, _, printed = blocks[0].rpartition("\n\n")
    return code, printed


def test_the_example_of_the_page_prints_what_the_page_says(tmp_path: Path) -> None:
    """It runs in its own process, which must not load moe_serve or torch."""
    code, printed = example()
    code = code.replace('Path("configs', f'Path({str(ROOT)!r}, "configs')
    code += "\nimport sys; assert not {'torch', 'moe_serve'} & sys.modules.keys()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == printed
    assert read_placement(tmp_path / "plan.json").num_ranks == 8


def test_a_wrong_input_is_named() -> None:
    devices = ClusterDevices.even(8)
    with pytest.raises(PlacementInputError, match="8 devices cannot be spread evenly over 3 nodes"):
        ClusterDevices.even(8, num_nodes=3)
    with pytest.raises(PlacementInputError, match="give --trace or --load"):
        ProblemRequest(files=(), devices=devices).read()
    model = ModelFacts(num_experts=33)
    with pytest.raises(PlacementInputError, match="the loads have 32 experts, but the model has"):
        ProblemRequest(files=(TRACE,), devices=devices, model=model, num_experts=32).read()
