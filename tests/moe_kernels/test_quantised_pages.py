"""KV pages in few bits: their definition, and attention over them in every set of kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_kernels.interface.attention_shape import AttentionShape
from moe_kernels.interface.kv_form import SCALE_DTYPE, KVForm, KVPages, kv_form, kv_form_refusal
from moe_kernels.kernel_choice import KernelsName
from moe_kernels.reference.paged_attention import paged_attention_reference
from moe_kernels.reference.torch_kv_rows import QuantisedRows, page_rows, quantised, rotated
from tests.moe_kernels import test_latent_attention as latent
from tests.moe_kernels import test_paged_attention as grouped
from tests.support.kernels.kernel_sets import KERNEL_SETS
from tests.support.kernels.prompt_cuts import pieces_of

FORMS = {"int8": kv_form("int8"), "int4": kv_form("int4"), "int4 plain": KVForm(4)}
STORING_ERROR = {"int8": 0.012, "int4": 0.2, "int4 plain": 0.08}  # of the largest value
SHAPES = {
    **{f"{heads} heads": grouped.shape_of(heads) for heads in ((4, 2), (32, 2), (6, 2))},
    "window": grouped.shape_of((4, 2), 40),
    **grouped.SHAPES,
}


class Scene(grouped.Scene):
    """Makes the step of the other tests, over pages of a given form."""

    def __init__(
        self,
        name: KernelsName,
        form: str,
        shape: AttentionShape,
        dtype: torch.dtype,
        spans: list[tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(name, spans or grouped.SPANS, shape, dtype, has_query_scale=True)
        self.form = form
        self.original = _in_form(self.original, FORMS[form])

    def copy_pages(self) -> KVPages:
        parts = (getattr(self.original, name) for name in KVPages.__slots__[:4])
        return KVPages(*(part.clone() for part in parts), self.original.form)

    def expected(self, sequence: grouped.Sequence, pages: KVPages) -> Tensor:
        """Computes attention by definition, from the rows that the stored ones represent."""
        keys, values = (rows.floats() for rows in _quantised_rows(pages))
        keys = rotated(keys, pages.form.rotation(keys.shape[-1]))  # its own inverse
        return super().expected(sequence, KVPages(keys, values))

    def storing_error(self, dtype: torch.dtype) -> float:
        return STORING_ERROR[self.form]


def _in_form(pages: KVPages, form: KVForm) -> KVPages:
    parts = []
    for rows, rotation in (
        (pages.keys.float(), form.rotation(pages.keys.shape[-1])),
        (pages.values.float(), 0),
    ):
        new = quantised(rotated(rows, rotation).flatten(0, 2), form)
        parts += [x.view(*rows.shape[:3], -1) for x in (new.numbers, new.scales)]
    keys, key_scales, values, value_scales = parts
    return KVPages(keys, values, key_scales, value_scales, form)


def _quantised_rows(pages: KVPages) -> tuple[QuantisedRows, QuantisedRows]:
    keys, values = page_rows(pages)
    assert isinstance(keys, QuantisedRows) and isinstance(values, QuantisedRows)
    return keys, values


def cases() -> list[tuple[str, str]]:
    return [(s, f) for s in SHAPES for f in FORMS if s != "odd values" or FORMS[f].bits == 8]


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize(("kind", "form"), cases())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.sampled
def test_matches_the_definition(
    name: KernelsName, kind: str, form: str, dtype: torch.dtype
) -> None:
    scene = Scene(name, form, SHAPES[kind], dtype)
    grouped.check_scene(scene, dtype, f"{name}, {kind}, {form}")


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize(("kind", "form"), cases())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.sampled
def test_a_row_is_bitwise_the_same_alone_and_in_company(
    name: KernelsName, kind: str, form: str, dtype: torch.dtype
) -> None:
    scene = Scene(name, form, SHAPES[kind], dtype)
    together = scene.run(scene.sequences)
    for index, sequence in enumerate(scene.sequences):
        (alone,) = scene.run([sequence])
        assert torch.equal(alone, together[index]), f"{name}, {grouped.SPANS[index]=}"


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("kind", ["(4, 2) heads", "(6, 2) heads", "sinks, window", "many heads"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.sampled
def test_a_row_is_bitwise_the_same_however_the_prompt_is_cut(
    name: KernelsName, kind: str, form: str, chunk: int, dtype: torch.dtype
) -> None:
    """The bytes of the pages are equal too, because prefix sharing and the tiers rely on them."""
    scene = Scene(name, form, SHAPES[kind], dtype, [(0, 260)])
    (sequence,), whole_pages, pages = scene.sequences, scene.copy_pages(), scene.copy_pages()
    (whole,) = scene.run([sequence], whole_pages)
    for start, end in pieces_of(260, chunk):
        piece = grouped.Sequence(sequence.page_table, start, sequence.qkv[start:end].clone())
        (part,) = scene.run([piece], pages)
        assert torch.equal(part, whole[start:end]), f"{name}, {start=}"
    for name_of_part in KVPages.__slots__[:4]:
        one, other = (getattr(each, name_of_part) for each in (whole_pages, pages))
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name_of_part


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("form", FORMS)
def test_what_lies_behind_a_sequence_in_its_page_is_not_seen(name: KernelsName, form: str) -> None:
    scene = Scene(name, form, SHAPES["(4, 2) heads"], torch.bfloat16, [(3, 2)])
    (clean,) = scene.run(scene.sequences)
    for content in (7.0, torch.nan) if name == "native" else (7.0,):  # torch: 0 * NaN is NaN
        for scales in (scene.original.key_scales, scene.original.value_scales):
            assert scales is not None
            scales[:, :, 5:] = content
        (dirty,) = scene.run(scene.sequences)
        assert torch.equal(clean, dirty), f"{content=}"


@pytest.mark.parametrize("form", FORMS)
def test_every_set_stores_the_same_bytes(form: str) -> None:
    """The keys are at position 0, where the rotation does not change them."""
    shape = AttentionShape(num_heads=2, num_kv_heads=2, head_dim=64)
    sets: tuple[KernelsName, ...] = ("torch", "native")
    scenes = [Scene(name, form, shape, torch.float32, [(0, 1)]) for name in sets]
    copies = [scene.copy_pages() for scene in scenes]
    for scene, pages in zip(scenes, copies, strict=True):
        scene.run(scene.sequences, pages)
    assert torch.equal(copies[0].values, copies[1].values)
    assert copies[0].value_scales is not None and copies[1].value_scales is not None
    assert torch.equal(copies[0].value_scales, copies[1].value_scales)


@pytest.mark.sampled
@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("sizes", [(4, 64, 16), (70, 512, 64), (20, 40, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latents_in_8_bits(
    name: KernelsName, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """The latent and the shared key have a scale each; a cut of the prompt changes no bit."""
    scene = latent.Scene(name, latent.shape_of(*sizes), dtype)
    pages = latent_pages(scene)
    out = scene.run(0, latent.LENGTH, pages)
    keys, values = (rows.floats() for rows in _quantised_rows(pages))
    rope = scene.q_rope
    cos, sin = (x[:, None].double() for x in (scene.rotary.cos, scene.rotary.signed_sin))
    half = scene.shape.rope_dim // 2
    turned = rope.double() * cos
    turned += torch.cat((rope[..., half:], rope[..., :half]), -1).double() * sin
    expected = paged_attention_reference(
        torch.cat((scene.q_latent.double(), turned), -1), keys, values, page_table=scene.table,
        first_position=0, scale=scene.shape.softmax_scale,
    )  # fmt: skip
    error = ((out.double() - expected).abs().max() / expected.abs().max()).item()
    assert error < latent.TOLERANCE[dtype], f"{name}, {sizes=}, {error=}"
    plain = scene.empty_pages()
    scene.run(0, latent.LENGTH, plain)
    stored = (keys - plain.keys.float()).abs().amax() / plain.keys.float().abs().amax()
    assert stored < 0.012, f"stored wrongly: {stored}"
    again = latent_pages(scene)
    for first, last in pieces_of(latent.LENGTH, 7):
        assert torch.equal(scene.run(first, last, again), out[first:last]), f"{name}, {first=}"
    assert torch.equal(again.keys, pages.keys)


def latent_pages(scene: latent.Scene) -> KVPages:
    floats, form = scene.empty_pages(), kv_form("int8")
    keys = torch.zeros_like(floats.keys, dtype=torch.int8)
    scales = torch.zeros(*keys.shape[:3], 2, dtype=SCALE_DTYPE)
    return KVPages(keys, keys[..., : scene.shape.latent_dim], scales, scales, form)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_by_hand(form: str) -> None:
    """Special rows: zeros, a constant, tiny and huge values, NaN and infinity."""
    x = torch.zeros(7, 8)
    x[1], x[2], x[3] = 2.0, torch.arange(8.0) - 3.0, torch.arange(8.0) * 1e-35
    x[4], x[5, 3], x[6, 0] = torch.arange(8.0) * 1e30, torch.nan, -torch.inf
    back = quantised(x, FORMS[form]).floats()
    assert back[0].eq(0).all() and back[1].sub(2.0).abs().max() < 0.01
    step = 7 / 15 if FORMS[form].bits == 4 else 4 / 127
    assert (back[2] - x[2]).abs().max() <= step * 0.52, back[2]
    assert back[3].abs().max() < 1e-30, "below 2^-100 a row counts as zeros"
    assert (back[4] / 1e30 - x[4] / 1e30).abs().max() <= (7 / 15 if "4" in form else 7 / 127) * 0.6
    assert back[5].isnan().all() and back[6].isnan().all()


def test_rotation_changes_no_product_and_spreads_a_large_channel() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 50, 96, generator=generator, dtype=torch.float64).unbind(0)
    k[:, 7] *= 40  # an outlier channel, as in the keys of real models
    form = kv_form("int4")
    assert form.rotation(96) == 32 and form.rotation(128) == 128 and form.rotation(80) == 16
    turned_q, turned_k = (rotated(x, 32) for x in (q, k))
    torch.testing.assert_close((turned_q * turned_k).sum(-1), (q * k).sum(-1))
    torch.testing.assert_close(rotated(turned_k, 32), k)
    errors = {}
    for name, rows, back_by in (("plain", k, 0), ("rotated", turned_k, 32)):
        back = rotated(quantised(rows, form).floats(), back_by)
        errors[name] = (((back - k) * q).sum(-1).abs().mean() / (q * k).sum(-1).abs().mean()).item()
    assert errors["rotated"] < 0.6 * errors["plain"], errors


def test_sizes_and_refusals() -> None:
    int8, int4 = kv_form("int8"), kv_form("int4")
    assert int8.row_bytes(64, 1, 2) / 128 == 66 / 128 <= 0.52
    assert int4.row_bytes(64, 1, 2) / 128 == 36 / 128 <= 0.285
    assert int8.row_bytes(576, 2, 2) == 580
    assert kv_form("auto").row_bytes(64, 1, 2) == 128
    shape = {"head_dim": 64, "value_dim": 64}
    assert kv_form_refusal(int8, **shape, is_latent=True) is None
    assert "latent attention" in str(kv_form_refusal(int4, **shape, is_latent=True))
    assert "pairs" in str(kv_form_refusal(int4, head_dim=64, value_dim=5, is_latent=False))
