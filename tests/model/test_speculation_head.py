"""A drafting head loads, is refused if it does not fit, and drafts the same with all kernels."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_kernels.kernel_choice import KernelsName
from moe_serve.config.sections import ModelConfig
from moe_serve.engine.opened_model import ServedCheckpoint
from moe_serve.errors import CheckpointError
from moe_serve.model.spec import ModelSpec
from moe_serve.model.speculation_head import HEAD_FILE, Guess, SpeculationHead, read_head
from tests.support.kernels.kernel_sets import KERNEL_SETS, make_kernels

VOCAB_SIZE, WIDTH, HIDDEN = 4096, 256, 32


@cache
def spec() -> ModelSpec:
    return ServedCheckpoint.read(ModelConfig()).spec


def random_weights(num_blocks: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    norms = ("state_norm", "token_norm", "output_norm")
    weights = {name: torch.ones(WIDTH) for name in norms}
    weights |= {name: random(WIDTH, WIDTH) for name in ("state_in", "token_in")}
    for index in range(num_blocks):
        weights[f"blocks.{index}.norm"] = torch.ones(WIDTH)
        weights[f"blocks.{index}.gate"] = random(HIDDEN, WIDTH)
        weights[f"blocks.{index}.up"] = random(HIDDEN, WIDTH)
        weights[f"blocks.{index}.down"] = random(WIDTH, HIDDEN)
    return weights


def write(folder: Path, weights: dict[str, Tensor]) -> Path:
    save_file(weights, folder / HEAD_FILE)
    return folder


def load(folder: Path, name: KernelsName) -> SpeculationHead:
    kernels = make_kernels(name, torch.float32)
    embedding_VD = torch.randn(VOCAB_SIZE, WIDTH, generator=torch.Generator().manual_seed(4))
    return SpeculationHead.load(folder, spec(), kernels, embedding_VD, kernels.linear(embedding_VD))


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("num_blocks", [0, 2])
def test_a_draft_is_a_chain_of_tokens(tmp_path: Path, name: KernelsName, num_blocks: int) -> None:
    head = load(write(tmp_path, random_weights(num_blocks)), name)
    hidden_SD, token_ids_S = torch.randn(5, WIDTH), torch.arange(5)
    drafts = head.draft(hidden_SD, token_ids_S, 4)
    tokens = [draft.token_ids for draft in drafts]
    assert [len(draft) for draft in tokens] == [4] * 5
    assert all(0 <= token < VOCAB_SIZE for draft in tokens for token in draft)
    shorter = head.draft(hidden_SD, token_ids_S, 2)
    assert [draft[:2] for draft in tokens] == [draft.token_ids for draft in shorter]
    assert [d.confidences[:2] for d in drafts] == [draft.confidences for draft in shorter]
    assert head.draft(hidden_SD, token_ids_S, 0) == [Guess((), ())] * 5
    assert head.draft(hidden_SD, token_ids_S, 4, least=1.1) == [Guess((), ())] * 5
    assert head.draft(hidden_SD[:0], token_ids_S[:0], 4) == []
    reference = load(tmp_path, "torch").draft(hidden_SD, token_ids_S, 1)
    same = [a[:1] == b.token_ids for a, b in zip(tokens, reference, strict=True)]
    assert sum(same) >= 4, "rounding to int8 changes few guesses"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"state_in": torch.ones(WIDTH, 128)}, r"state_in has the shape \(256, 128\)"),
        ({"output_norm": torch.ones(512)}, r"output_norm has the shape \(512,\)"),
        ({"blocks.0.down": torch.ones(WIDTH, HIDDEN + 1)}, r"needs \(256, 32\)"),
        ({"blocks.1.norm": torch.ones(WIDTH)}, "tensor blocks.1.down has|blocks.1.* is missing"),
        ({"lm_head": torch.ones(2)}, "tensor lm_head is unknown"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    tmp_path: Path, changed: dict[str, Tensor], message: str
) -> None:
    write(tmp_path, random_weights() | changed)
    with pytest.raises(CheckpointError, match=message) as failure:
        read_head(tmp_path, spec())
    assert str(tmp_path) in str(failure.value), "the message names the folder"
    assert "trained for this model" in str(failure.value), "the message says what to do"


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    weights = random_weights()
    del weights["token_in"]
    with pytest.raises(CheckpointError, match="tensor token_in is missing"):
        read_head(write(tmp_path, weights), spec())


@pytest.mark.parametrize("content", [None, b"", b"no safetensors"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / HEAD_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"speculation\.head .* cannot be read"):
        read_head(tmp_path, spec())
