"""Tiny checkpoints to quantise, and texts for calibration."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from tests.support.families.case import TINY, Case
from tests.support.families.parity import write_checkpoint

QWEN3 = Case(
    Qwen3MoeConfig(
        **TINY
        | {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "num_experts": 8,
            "moe_intermediate_size": 32,
            "intermediate_size": 64,
            "norm_topk_prob": True,
        }
    )
)
WORDS = ("the cat sat on a mat and saw two birds", "in one old tree while rain fell")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE in fp32: 2 layers of 8 experts, top 2."""
    return write_checkpoint(tmp_path_factory.mktemp("quantize") / "tiny", QWEN3)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two domains with documents of about 90 tokens."""
    folder = tmp_path_factory.mktemp("texts")
    known = " ".join(WORDS).split()
    for number, name in enumerate(("first", "second")):
        documents = []
        for index in range(60):
            words = [known[(index * 7 + i * (3 + number)) % len(known)] for i in range(20)]
            documents.append(" ".join(words))
        text = "\n<|endoftext|>\n".join(documents)
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder
