"""Pages behind a model's own window are taken back when pages run out, and no answer changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moe_kernels.kernel_choice import KernelsName
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.engine.build import build_engine
from moe_serve.engine.engine import Engine
from moe_serve.engine.opened_model import ServedCheckpoint
from tests.support.cluster.layouts import colocated, config, requests, serve
from tests.support.cluster.thread_starter import ThreadStarter
from tests.support.kernels.kernel_sets import KERNEL_SETS

NUM_TOKENS, NUM_PAGES = 30, 12


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_fewer_sequences_are_put_back_and_no_answer_changes(
    checkpoints: dict[str, Path], kernels: KernelsName, has_prefix_cache: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    of = config(0, 0, 1, folder=checkpoints["mixtral-window"], kernels=kernels)
    of = replace(of, model=replace(of.model, max_model_len=128))
    wanted = requests(6, 300, num_tokens=NUM_TOKENS)
    expected = serve(build_engine(of).engine, wanted)
    cache = replace(of.cache, num_pages=NUM_PAGES, prefix_cache=has_prefix_cache)
    small = replace(of, cache=cache)
    counts = []
    for frees in (True, False):
        engine = build_engine(small).engine
        assert isinstance(engine, Engine)
        if not frees:
            monkeypatch.setattr(engine._scheduler.sharing, "_window", None)
        assert serve(engine, wanted) == expected, f"{frees=}"
        engine.check_integrity()
        assert engine.stats().load.num_free_pages == NUM_PAGES
        counts.append(engine.stats().counts.num_preemptions)
    assert counts[0] < counts[1], counts


@pytest.mark.parametrize("shards", [1, 2])
def test_ranks_take_them_back_too(checkpoints: dict[str, Path], shards: int) -> None:
    of = config(1, 1, 3 - shards, folder=checkpoints["mixtral-window"], attention_tp=shards)
    of = replace(of, model=replace(of.model, max_model_len=128))
    wanted = requests(6, 300, num_tokens=NUM_TOKENS)
    expected = colocated(of, wanted)
    counts = []
    for frees in (True, False):
        small = replace(of, cache=replace(of.cache, num_pages=NUM_PAGES))
        engine = build_cluster(small, make_starter=ThreadStarter).engine
        try:
            if not frees:
                for own in engine._engines.values():
                    own._scheduler.sharing._window = None
            assert serve(engine, wanted) == expected, f"{frees=}"
            engine.check_integrity()
            assert engine.stats().load.num_free_pages == NUM_PAGES
            counts.append(engine.stats().counts.num_preemptions)
        finally:
            engine.close()
    assert counts[0] < counts[1], counts


def test_only_models_whose_layers_all_have_windows(checkpoints: dict[str, Path]) -> None:
    of = config(0, 0).model
    windows = {
        name: ServedCheckpoint.read(replace(of, path=str(checkpoints[name]))).spec.window
        for name in ("mixtral-window", "mixtral", "qwen3_moe")
    }
    assert windows == {"mixtral-window": 24, "mixtral": None, "qwen3_moe": None}
