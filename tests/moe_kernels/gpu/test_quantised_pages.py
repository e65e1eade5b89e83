"""Triton over KV pages in few bits: the definition, and equal bits in every cut of the rows."""

from __future__ import annotations

import pytest
import torch

from moe_kernels.interface.attention_shape import AttentionShape
from tests.moe_kernels import test_latent_attention as latent
from tests.moe_kernels.test_paged_attention import Sequence, check_scene
from tests.moe_kernels.test_quantised_pages import FORMS, Scene, latent_pages

SPANS = [(0, 5), (11, 1), (30, 3), (0, 18)]
SHAPES = {
    "plain": AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16),
    "rest, narrow values": AttentionShape(
        num_heads=2, num_kv_heads=1, head_dim=24, value_dim=10, has_sinks=True, sliding_window=12
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matches_the_definition_alone_and_cut(form: str, kind: str, dtype: torch.dtype) -> None:
    scene = Scene("triton", form, SHAPES[kind], dtype, SPANS)
    check_scene(scene, dtype, f"{form}, {kind}")
    whole = scene.run(scene.sequences)
    pages, sequence = scene.copy_pages(), scene.sequences[3]
    for start in range(0, 18, 16):
        piece = Sequence(sequence.page_table, start, sequence.qkv[start : start + 16])
        (part,) = scene.run([piece], pages)
        assert torch.equal(part, whole[3][start : start + 16]), f"{start=}"


def test_latents_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch kernels over the same rows give the expected values."""
    monkeypatch.setattr(latent, "LENGTH", 40)
    outs = []
    for name in ("torch", "triton"):
        scene = latent.Scene(name, latent.shape_of(4, 20, 8), torch.float32)  # type: ignore[arg-type]
        pages = latent_pages(scene)
        outs.append((scene.run(0, 40, pages), pages))
    (expected, stored), (out, own) = outs
    assert (out - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (stored.keys.int() - own.keys.int()).abs().max() <= 1
