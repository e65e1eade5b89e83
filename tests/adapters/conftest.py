"""A tiny checkpoint with separate experts, a shared expert and attention biases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.families.all_cases import CASES
from tests.support.families.parity import write_checkpoint


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("adapters") / "base", CASES["qwen2_moe"])
