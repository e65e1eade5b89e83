"""Pages on the wire: any number of shards writes them, and any other reads the same values."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.interface.kv_form import kv_form
from moe_serve.cache.kv_cache import KVCache
from moe_serve.cache.transfer.wire_pages import WirePages
from moe_serve.config.sections import ModelConfig
from moe_serve.engine.opened_model import ServedCheckpoint
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.tensor_shard import TensorShard
from tests.support.families.all_cases import CASES
from tests.support.families.parity import write_checkpoint

NUM_PAGES, PAGE_SIZE = 5, 4
SHARDS = (1, 2, 4)


def spec_with(num_kv_heads: int) -> ModelSpec:
    spec = ServedCheckpoint.read(ModelConfig()).spec
    layers = tuple(
        replace(layer, attention=replace(layer.attention, num_heads=8, num_kv_heads=num_kv_heads))
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


@pytest.fixture(scope="module")
def latent_spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = write_checkpoint(tmp_path_factory.mktemp("latent"), CASES["deepseek_v2-lite"])
    return ServedCheckpoint.read(ModelConfig(path=str(folder))).spec


def random_cache(spec: ModelSpec, form: str, seed: int) -> KVCache:
    cache = KVCache(
        spec,
        NUM_PAGES,
        PAGE_SIZE,
        torch.bfloat16,
        torch.device("cpu"),
        kv_form(form),  # type: ignore[arg-type]
    )
    noise = torch.Generator().manual_seed(seed)
    for part in cache.parts:
        values = torch.randint(-100, 100, part.shape, generator=noise)
        part.copy_(values if part.dtype != torch.uint8 else values + 100)
    return cache


def shards_of(whole: KVCache, spec: ModelSpec, count: int, form: str) -> list[KVCache]:
    """Divides a cache's heads as the shards of a rank hold them."""
    shards = []
    for index in range(count):
        shard = random_cache(TensorShard(index, count).spec(spec), form, 99 + index)
        own, num_heads = shard.parts[0].shape[1], whole.parts[0].shape[1]
        first = index * min(count, num_heads) // count * own
        for part, of_whole in zip(shard.parts, whole.parts, strict=True):
            part.copy_(of_whole[:, first : first + own])
        shards.append(shard)
    return shards


def wires(caches: list[KVCache], num_heads: int) -> list[WirePages]:
    count = len(caches)
    return [WirePages(cache, num_heads, index, count) for index, cache in enumerate(caches)]


def as_elsewhere(wire: WirePages) -> WirePages:
    """Returns it as if its pages were not in main memory."""
    wire._pieces = [replace(piece, rows=None) for piece in wire._pieces]
    return wire


def bits(part: Tensor) -> bytes:
    return part.contiguous().view(torch.uint8).numpy().tobytes()


def carry(
    sources: list[WirePages], targets: list[WirePages], pages: list[int], places: list[int]
) -> None:
    memory: NDArray[np.uint8] = np.zeros((8, sources[0].num_bytes), dtype=np.uint8)
    slots = [7, 2, 3, 0, 5][: len(pages)]
    for wire in sources:
        wire.save(pages, slots, memory)
    for wire in targets:
        wire.load(places, memory[slots])


def check(spec: ModelSpec, form: str, pages: list[int], places: list[int]) -> None:
    whole = random_cache(spec, form, 1)
    num_heads = spec.attention.num_kv_heads
    kept = random_cache(spec, form, 2)
    for source, target in itertools.product(SHARDS, SHARDS):
        if num_heads > 1 and (num_heads % source and source % num_heads):
            continue
        ours = shards_of(whole, spec, source, form)
        theirs = shards_of(kept, spec, target, form)
        wanted = random_cache(spec, form, 2)
        for part, of_whole in zip(wanted.parts, whole.parts, strict=True):
            part[places] = of_whole[pages]
        a, b = wires(ours, num_heads), wires(theirs, num_heads)
        if source == 2:
            a = [as_elsewhere(wire) for wire in a]
        if target == 2:
            b = [as_elsewhere(wire) for wire in b]
        assert {each.geometry for each in a} == {each.geometry for each in b}
        carry(a, b, pages, places)
        for got, right in zip(theirs, shards_of(wanted, spec, target, form), strict=True):
            for part, other in zip(got.parts, right.parts, strict=True):
                assert bits(part) == bits(other), f"{source} -> {target} shards, {form}"


@pytest.mark.sampled
@settings(max_examples=4, deadline=None)
@given(st.permutations(range(1, NUM_PAGES + 1)), st.integers(1, NUM_PAGES))
@pytest.mark.parametrize("form", ["auto", "int8", "int4"])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_any_shards_to_any_others(
    num_kv_heads: int, form: str, pages: list[int], count: int
) -> None:
    """Every page arrives bit by bit, at any place, and no other page changes."""
    check(spec_with(num_kv_heads), form, list(pages)[:count], list(reversed(pages))[:count])


@pytest.mark.parametrize("form", ["auto", "int8"])
def test_latents(latent_spec: ModelSpec, form: str) -> None:
    check(latent_spec, form, [1, 4], [2, 3])


def test_what_differs_has_another_geometry() -> None:
    def geometry(heads: int, form: str, page_size: int = PAGE_SIZE) -> bytes:
        cache = KVCache(
            spec_with(heads),
            2,
            page_size,
            torch.bfloat16,
            torch.device("cpu"),
            kv_form(form),  # type: ignore[arg-type]
        )
        return WirePages(cache, heads).geometry

    made = [geometry(2, "auto"), geometry(4, "auto"), geometry(2, "int8"), geometry(2, "auto", 8)]
    assert len(set(made)) == len(made)


def test_values_that_are_not_finite_are_found() -> None:
    cache = random_cache(spec_with(2), "auto", 1)
    wire = WirePages(cache, 2)
    assert wire.are_finite([1, 2, 3])
    cache.parts[-1][2, 1, 3, 0] = float("nan")
    assert wire.are_finite([1, 3]) and not wire.are_finite([1, 2])
    wire.clear([2])
    assert wire.are_finite([2])
