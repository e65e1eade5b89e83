"""A drafting head in one call drafts the same tokens as its kernels one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_kernels.cpu.cpu_library import load_cpu_library
from moe_kernels.interface.head_drafting import DraftBlock, DraftingParts
from moe_kernels.interface.kernels import ExpertWeights, GatedActivation, Kernels
from moe_kernels.kernel_choice import choose_kernels
from moe_kernels.reference.torch_drafting import StepwiseDrafting

native_only = pytest.mark.skipif(
    load_cpu_library().library is None, reason="the native kernels cannot be built here"
)


def make_parts(
    kernels: Kernels, dtype: torch.dtype, width: int, hidden: int, num_blocks: int, vocab_size: int
) -> DraftingParts:
    generator = torch.Generator().manual_seed(width + hidden + vocab_size)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    def norm() -> Tensor:
        return (1 + 0.1 * torch.randn(width, generator=generator)).to(dtype)

    blocks = []
    for _ in range(num_blocks):
        expert = ExpertWeights(random(hidden, width), random(hidden, width), random(width, hidden))
        bank = kernels.experts([expert], GatedActivation())
        blocks.append(DraftBlock(norm_D=norm(), mlp=bank))
    embedding_VD = random(vocab_size, width)
    return DraftingParts(
        embedding_VD=embedding_VD,
        state_norm_D=norm(),
        token_norm_D=norm(),
        output_norm_D=norm(),
        state_in=kernels.linear(random(width, width)),
        token_in=kernels.linear(random(width, width)),
        blocks=tuple(blocks),
        output=kernels.linear(embedding_VD),
        norm_eps=1e-6,
    )


def inputs(dtype: torch.dtype, width: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(7, width, generator=generator).to(dtype)
    return states, torch.randint(vocab_size, (7,), generator=generator)


@native_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("num_blocks", [0, 1, 3])
@pytest.mark.parametrize(
    ("width", "hidden", "vocab_size"), [(256, 320, 4100), (64, 96, 512), (24, 40, 101), (8, 8, 5)]
)
def test_one_call_equals_many(
    dtype: torch.dtype, num_blocks: int, width: int, hidden: int, vocab_size: int
) -> None:
    kernels = choose_kernels(torch.device("cpu"), dtype, "native", 2)
    parts = make_parts(kernels, dtype, width, hidden, num_blocks, vocab_size)
    drafting = kernels.drafting(parts)
    assert drafting is not None
    states, tokens = inputs(dtype, width, vocab_size)
    expected = StepwiseDrafting(kernels, parts)(states, tokens, 6)
    assert torch.equal(drafting(states, tokens, 6), expected)
    for row in range(len(states)):
        alone = drafting(states[row : row + 1], tokens[row : row + 1], 6)
        assert torch.equal(alone[0], expected[row]), "a draft depends on its neighbours"


@native_only
def test_native_drafts_equal_torchs() -> None:
    drafts = []
    for name in ("native", "torch"):
        kernels = choose_kernels(torch.device("cpu"), torch.float32, name, 1)
        parts = make_parts(kernels, torch.float32, 32, 48, 2, 200)
        drafting = kernels.drafting(parts) or StepwiseDrafting(kernels, parts)
        drafts.append(drafting(*inputs(torch.float32, 32, 200), 4))
    assert torch.equal(*drafts)


@native_only
def test_the_first_of_equal_logits_is_drafted() -> None:
    kernels = choose_kernels(torch.device("cpu"), torch.float32, "native", 1)
    parts = make_parts(kernels, torch.float32, 8, 8, 0, 40)
    alike = DraftingParts(
        embedding_VD=torch.ones(40, 8),
        state_norm_D=parts.state_norm_D,
        token_norm_D=parts.token_norm_D,
        output_norm_D=parts.output_norm_D,
        state_in=parts.state_in,
        token_in=parts.token_in,
        blocks=(),
        output=kernels.linear(torch.ones(40, 8)),
        norm_eps=1e-6,
    )
    drafting = kernels.drafting(alike)
    assert drafting is not None
    assert drafting(*inputs(torch.float32, 8, 40), 3).tolist() == [[0, 0, 0]] * 7
    state = torch.full((1, 8), float("nan"))
    assert drafting(state, torch.tensor([3]), 2).tolist() == [[0, 0]], "NaN drafts some token"
