"""KV pages in few bits: for each page data type, answers are always the same bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_kernels.interface.kv_form import kv_form
from moe_kernels.kernel_choice import KernelsName, native_refusal
from moe_serve.cache.kv_cache import KVCache
from moe_serve.cache.page_bytes import PageBytes
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.sections import EngineConfig, KVDtypeName, ModelConfig, PipelineConfig
from moe_serve.engine.build import build_engine
from moe_serve.engine.opened_model import ServedCheckpoint
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.errors import ConfigError
from moe_serve.offline.llm import LLM
from tests.engine.conftest import VARIANTS
from tests.engine.test_disk_tier import answers, content
from tests.support.cluster.layouts import Answer, config, requests, serve
from tests.support.cluster.thread_starter import ThreadStarter
from tests.support.families.all_cases import CASES
from tests.support.families.parity import write_checkpoint
from tests.support.sampled_cases import EVERY_CASE

LATENT = "deepseek_v3-groups"
FORMS: tuple[KVDtypeName, ...] = ("int8", "int4")
NATIVE_REFUSAL = native_refusal(torch.device("cpu"), torch.float32)
needs_native = pytest.mark.skipif(NATIVE_REFUSAL is not None, reason=str(NATIVE_REFUSAL))
# torch is slow: it reads one model of each kind of attention, unless every case runs.
ALL_VARIANTS = (*VARIANTS, LATENT)
WITH_TORCH = ALL_VARIANTS if EVERY_CASE or NATIVE_REFUSAL is not None else ("olmoe", LATENT)
WITH_KERNELS = [
    *((variant, "torch") for variant in WITH_TORCH),
    *(pytest.param(variant, "native", marks=needs_native) for variant in ALL_VARIANTS),
]


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / LATENT, CASES[LATENT])


def with_pages(of: EngineConfig, kv_dtype: KVDtypeName, **cache: Any) -> EngineConfig:
    return replace(of, cache=replace(of.cache, kv_dtype=kv_dtype, **cache))


def answered(
    of: EngineConfig, wanted: list[GenerationRequest], asks_again: bool = False
) -> dict[str, Answer]:
    engine = build_engine(of).engine
    found = serve(engine, wanted)
    if asks_again:
        assert serve(engine, wanted) == found, "what the cache has gives another answer"
        assert engine.stats().counts.num_hit_tokens > 0
    return found


def check_some(found: dict[str, Answer], expected: dict[str, Answer], where: str) -> None:
    assert found and found == {name: expected[name] for name in found}, where


@pytest.mark.sampled
@pytest.mark.parametrize(("variant", "kernels"), WITH_KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", FORMS)
def test_alone_batched_chunked_shared_preempted(
    checkpoints: dict[str, Path], latent: Path, variant: str, kernels: KernelsName, dtype: str,
    kv_dtype: KVDtypeName,
) -> None:  # fmt: skip
    if variant == LATENT:
        kv_dtype = "int8"
    folder = latent if variant == LATENT else checkpoints[variant]
    of = config(0, 0, 2, folder=folder, dtype=dtype, kernels=kernels)
    of = with_pages(of, kv_dtype)
    # Windows give pages back: it takes more requests until some are preempted.
    crowd = requests(9, 300, num_tokens=12) if "window" in variant else requests(8, 300)
    expected = answered(of, crowd, asks_again=True)
    of = replace(of, pipeline=PipelineConfig(micro_batches=1))
    scheduler = replace(of.scheduler, max_batched_tokens=9, max_num_seqs=1)
    alone = replace(of, scheduler=scheduler)
    alone = with_pages(alone, kv_dtype, prefix_cache=False)
    check_some(answered(alone, crowd if EVERY_CASE else crowd[:3]), expected, "alone, chunked")
    large = with_pages(of, kv_dtype, page_size=32, num_pages=128)
    check_some(answered(large, crowd if EVERY_CASE else crowd[3:7]), expected, "large pages")
    model = replace(of.model, max_model_len=128)
    num_pages = 9 if variant == "mixtral-window" else 11  # pages behind a window are taken back
    small = with_pages(replace(of, model=model), kv_dtype, num_pages=num_pages, prefix_cache=False)
    engine = build_engine(small).engine
    assert serve(engine, crowd) == expected, "preempted"
    assert engine.stats().counts.num_preemptions > 0


@pytest.mark.parametrize("kv_dtype", FORMS)
def test_a_restart_finds_pages_of_its_own_form_only(
    tiny: str, kv_dtype: KVDtypeName, tmp_path: Path
) -> None:
    with LLM(tiny, prefix_cache=False, kv_dtype=kv_dtype) as llm:
        cold = content(answers(llm))
    folder = str(tmp_path / "kv")
    for turn in range(2):
        with LLM(tiny, kv_disk=folder, kv_dtype=kv_dtype) as llm:
            outputs = answers(llm)
        assert content(outputs) == cold
        assert [output.num_cached_tokens for output in outputs] == [80 * turn] * 3
    other: KVDtypeName = "int8" if kv_dtype == "int4" else "auto"
    with LLM(tiny, kv_disk=folder, kv_dtype=other) as llm:
        assert [output.num_cached_tokens for output in answers(llm)] == [0, 0, 0]


@pytest.mark.parametrize("kv_dtype", FORMS)
@pytest.mark.parametrize(
    ("attention", "experts", "cluster"),
    [(2, 1, {}), pytest.param(1, 1, {"attention_tp": 2}, marks=needs_native)],
    ids=str,
)
def test_ranks_and_shards(
    tiny: str, attention: int, experts: int, cluster: dict[str, Any], kv_dtype: KVDtypeName
) -> None:
    wanted = requests(6, 300)
    expected = serve(
        build_engine(with_pages(config(0, 0, 2, folder=Path(tiny)), kv_dtype)).engine, wanted
    )
    of = config(attention, experts, 2, folder=Path(tiny), **cluster)
    built = build_cluster(
        with_pages(of, kv_dtype, memory_tier_bytes=2**20, checkpoint_after_s=0.0),
        make_starter=ThreadStarter,
    )
    try:
        assert built.layout.kv_dtype == kv_dtype
        assert serve(built.engine, wanted) == expected
    finally:
        built.engine.close()


def test_pages_are_smaller_and_are_copied_whole(checkpoints: dict[str, Path], latent: Path) -> None:
    for path in (checkpoints["qwen3_moe"], latent):
        spec = ServedCheckpoint.read(ModelConfig(path=str(path))).spec
        for name in FORMS if path != latent else FORMS[:1]:
            form = kv_form(name)
            caches = [
                KVCache(spec, 4, 16, torch.bfloat16, torch.device("cpu"), form) for _ in range(2)
            ]
            source, target = map(PageBytes, caches)
            assert source.num_bytes == 16 * spec.kv_bytes_per_token(2, form)
            assert source.num_bytes < 0.6 * 16 * spec.kv_bytes_per_token(2)
            for part in caches[0].parts:
                part.copy_(torch.randint(0, 100, part.shape))
            data = np.empty(source.num_bytes, dtype=np.uint8)
            source.read(2, data)
            target.write(3, data)
            for one, other in zip(caches[0].parts, caches[1].parts, strict=True):
                assert torch.equal(one[2], other[3]) and not other[1:3].any()
            scales = caches[0].layers[1].key_scales
            assert scales is not None and caches[0].finite([1, 2, 3]) == [True] * 3
            scales[2, 0, 5, 0] = torch.nan
            assert caches[0].finite([1, 2, 3]) == [True, False, True]


def test_latent_attention_refuses_4_bits(latent: Path) -> None:
    of = with_pages(config(0, 0, folder=latent), "int4")
    with pytest.raises(ConfigError, match=r"^cache\.kv_dtype is 'int4', but latent attention .*"):
        build_engine(of)
    ranks = with_pages(config(1, 1, folder=latent), "int4")
    with pytest.raises(ConfigError, match=r"cache\.kv_dtype is 'int4', but latent attention"):
        build_cluster(ranks, make_starter=ThreadStarter)


@needs_native
def test_other_bits_give_other_log_probabilities(tiny: str) -> None:
    """A server that forgot the setting would pass the other tests."""
    found = [
        answered(with_pages(config(0, 0, 1, folder=Path(tiny)), name), requests(8, 300))
        for name in ("auto", *FORMS)
    ]  # type: ignore[arg-type]
    assert found[0] != found[1] and found[1] != found[2]
