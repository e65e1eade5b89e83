"""A drafting head in one call drafts the same tokens as its kernels one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_kernels.cpu.cpu_library import load_cpu_library
from moe_kernels.interface.head_drafting import DraftBlock, DraftingParts, HeadDrafting
from moe_kernels.interface.kernels import ExpertWeights, GatedActivation, Kernels
from moe_kernels.interface.quantised_matrix import INT8, MatrixForm, QuantisedMatrix, Weight
from moe_kernels.kernel_choice import choose_kernels
from moe_kernels.reference.torch_drafting import StepwiseDrafting

native_only = pytest.mark.skipif(
    load_cpu_library().library is None, reason="the native kernels cannot be built here"
)


def make_parts(
    kernels: Kernels,
    dtype: torch.dtype,
    width: int,
    hidden: int,
    num_blocks: int,
    vocab_size: int,
    matrix: Callable[[Tensor], Weight] = lambda weight: weight,
) -> DraftingParts:
    generator = torch.Generator().manual_seed(width + hidden + vocab_size)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    def norm() -> Tensor:
        return (1 + 0.1 * torch.randn(width, generator=generator)).to(dtype)

    blocks = []
    for _ in range(num_blocks):
        gate, up, down = random(hidden, width), random(hidden, width), random(width, hidden)
        expert = ExpertWeights(matrix(gate), matrix(up), matrix(down))
        bank = kernels.experts([expert], GatedActivation())
        blocks.append(DraftBlock(norm_D=norm(), mlp=bank))
    embedding_VD = random(vocab_size, width)
    return DraftingParts(
        embedding_VD=embedding_VD,
        state_norm_D=norm(),
        token_norm_D=norm(),
        output_norm_D=norm(),
        state_in=kernels.linear(matrix(random(width, width))),
        token_in=kernels.linear(matrix(random(width, width))),
        blocks=tuple(blocks),
        output=kernels.linear(matrix(embedding_VD)),
        norm_eps=1e-6,
    )


def in_int8(weight_NK: Tensor) -> QuantisedMatrix:
    scales_N1 = weight_NK.float().abs().amax(dim=1, keepdim=True) / 127
    values_NK = (weight_NK.float() / scales_N1).round().to(torch.int8)
    form = MatrixForm(values="int8", scales="float32", group=weight_NK.shape[1])
    return QuantisedMatrix(
        form=form,
        table=INT8,
        bytes_NB=values_NK.view(torch.uint8),
        num_columns=weight_NK.shape[1],
        scales_NG=scales_N1,
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
    assert_alike(drafting, StepwiseDrafting(kernels, parts), *inputs(dtype, width, vocab_size))


def assert_alike(
    drafting: HeadDrafting, stepwise: HeadDrafting, states: Tensor, tokens: Tensor
) -> None:
    """Asserts that both draft the same, of any length, whatever rows are beside a row."""
    sure = stepwise(states, tokens, 1).confidences_SM.median().item()
    for least in (0.0, sure * 0.1, sure * 1.01, 1.0):
        expected, found = stepwise(states, tokens, 6, least), drafting(states, tokens, 6, least)
        assert torch.equal(found.tokens_SM, expected.tokens_SM), f"{least=}"
        assert torch.allclose(found.confidences_SM, expected.confidences_SM, 1e-4, 1e-6)
        for row in range(len(states)):
            alone = drafting(states[row : row + 1], tokens[row : row + 1], 6, least)
            assert torch.equal(alone.tokens_SM[0], expected.tokens_SM[row]), "a neighbour counts"


@native_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_head_in_int8_drafts_in_one_call_too(dtype: torch.dtype) -> None:
    """Its guesses are nearly those of the exact head."""
    exact = choose_kernels(torch.device("cpu"), dtype, "native", 2)
    kernels = exact.for_drafts()
    assert kernels is not None
    sizes = (256, 320, 2, 512)
    parts = make_parts(kernels, dtype, *sizes, matrix=in_int8)
    drafting = kernels.drafting(parts)
    assert drafting is not None
    states, tokens = inputs(dtype, 256, 512)
    assert_alike(drafting, StepwiseDrafting(kernels, parts), states, tokens)
    first = StepwiseDrafting(exact, make_parts(exact, dtype, *sizes))(states, tokens, 1)
    same = drafting(states, tokens, 1).tokens_SM == first.tokens_SM
    assert same.sum() >= len(states) - 1, "rounding changes few guesses"


@native_only
def test_native_drafts_equal_torchs() -> None:
    drafts = []
    for name in ("native", "torch"):
        kernels = choose_kernels(torch.device("cpu"), torch.float32, name, 1)
        parts = make_parts(kernels, torch.float32, 32, 48, 2, 200)
        drafting = kernels.drafting(parts) or StepwiseDrafting(kernels, parts)
        drafts.append(drafting(*inputs(torch.float32, 32, 200), 4).tokens_SM)
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
    found = drafting(*inputs(torch.float32, 8, 40), 3)
    assert found.tokens_SM.tolist() == [[0, 0, 0]] * 7
    assert torch.allclose(found.confidences_SM, torch.tensor(1 / 40)), "all tokens are alike"
    state, token = torch.full((1, 8), float("nan")), torch.tensor([3])
    assert drafting(state, token, 2).tokens_SM.tolist() == [[0, 0]], "NaN drafts some token"
    assert drafting(state, token, 2, 0.5).tokens_SM.tolist() == [[-1, -1]], "but not a sure one"
