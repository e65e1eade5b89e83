"""Drafts of a checkpoint's own MTP layer change no answer, and right drafts save steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_serve.config.sections import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    PipelineConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from moe_serve.engine.build import build_engine
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.mtp_drafter import MTPDrafter
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.errors import CheckpointError, ConfigError
from moe_serve.model.stage.mtp_stage import MAX_TOKENS
from tests.support.cluster.layouts import Answer, on_ranks, serve
from tests.support.families.case import VOCAB_SIZE
from tests.support.families.mtp import FILE, write_with_mtp

MTP = SpeculationConfig(method="mtp", max_tokens=4, is_adaptive=False)


@cache
def folder_of(root: Path, name: str) -> Path:
    return write_with_mtp(root / f"drafts-{name}", name)


@cache
def successor_folder(root: Path) -> Path:
    """Writes a model whose next token is always the last one plus 1, which its MTP layer knows.

    Attention and experts add nothing, the head looks for the embedding before its own, and the
    projection passes the embedding on.
    """
    folder = write_with_mtp(root / "successor", "glm4_moe")
    for name in ("model.safetensors", FILE):
        weights = load_file(folder / name)
        for key, tensor in weights.items():
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            elif "norm" in key:
                tensor.fill_(1.0)
            elif key.endswith("eh_proj.weight"):
                tensor.copy_(torch.eye(len(tensor), tensor.shape[1]))
        embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        heads = [key for key in weights if key.endswith("head.weight")]
        weights |= {key: embedding.roll(1, 0).clone() for key in heads}
        save_file(weights, folder / name)
    return folder


def config_of(
    folder: Path, speculation: SpeculationConfig, *, pages: int = 256, budget: int = 64
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=str(folder), num_threads=1, max_model_len=96, device="cpu"),
        cache=CacheConfig(num_pages=pages),
        scheduler=SchedulerConfig(max_num_seqs=12, max_batched_tokens=budget),
        pipeline=PipelineConfig(micro_batches=2),
        speculation=speculation,
    )


def engine_of(config: EngineConfig) -> Engine:
    engine = build_engine(config).engine
    assert isinstance(engine, Engine), f"{engine}"
    return engine


def crowd(count: int, num_tokens: int = 14) -> list[GenerationRequest]:
    """Returns prompts of 1 to 70 tokens, some with the same beginning; one answer fills the
    context."""
    rng = np.random.default_rng(count)
    common = rng.integers(1, VOCAB_SIZE, 40).tolist()

    def one(i: int) -> GenerationRequest:
        own = rng.integers(1, VOCAB_SIZE, int(rng.integers(1, 30))).tolist()
        return GenerationRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple(own if i % 3 == 1 else common + own),
            params=SamplingParams(
                max_tokens=num_tokens + i % 7 if i else 200,
                temperature=(0.0, 0.8, 0.0)[i % 3],
                seed=i,
                ignore_eos=bool(i % 4),
                logprobs=2 if i % 5 == 0 else None,
                repetition_penalty=1.2 if i % 5 == 4 else 1.0,
            ),
            may_draft=i != 7,
        )

    return [one(i) for i in range(count)]


@cache
def expected_of(folder: Path, count: int) -> dict[str, Answer]:
    off = SpeculationConfig()
    return serve(engine_of(config_of(folder, off, budget=512)), crowd(count))


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3-groups", "exaone_moe"])
def test_drafts_change_no_answer(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """Prompts come in chunks, requests are preempted because pages are few, and the cache is
    warm."""
    folder = folder_of(tmp_path_factory.getbasetemp(), name)
    expected, asked = expected_of(folder, 9), crowd(9)
    for pages, budget, turns in ((256, 64, 2), (14, 29, 1)):
        engine = engine_of(config_of(folder, MTP, pages=pages, budget=budget))
        for _ in range(turns):
            assert serve(engine, asked) == expected, f"{pages=}, {budget=}"
        counts = engine.drafts.counts.by_source["mtp"]
        assert counts.num_drafted > 200
        assert pages == 256 or engine.stats().counts.num_preemptions > 0, f"{pages=}"


def test_a_layer_that_is_right_gives_runs_of_tokens(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """All drafted tokens are accepted, so a step gives one token more than it drafted."""
    folder = successor_folder(tmp_path_factory.getbasetemp())
    engine = engine_of(config_of(folder, MTP))
    params = SamplingParams(max_tokens=41, temperature=0, ignore_eos=True)
    asked = [
        GenerationRequest(request_id=f"r{i}", prompt_token_ids=(i, i + 3), params=params)
        for i in range(2, 7)
    ]
    answers = serve(engine, asked)
    for i in range(2, 7):
        first = i + 4
        assert answers[f"r{i}"].token_ids == list(range(first, first + 41))
    counts = engine.drafts.counts.by_source["mtp"]
    assert counts.num_accepted == counts.num_drafted > 0
    assert counts.num_accepted == MAX_TOKENS * counts.num_drafts, "each draft has all its tokens"
    assert engine.stats().num_steps < 25, "41 tokens in runs of five"


def test_an_attention_rank_has_the_layer(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The layer's experts are on the attention rank too, so drafts cross no link; with one and two
    attention ranks."""
    folder = folder_of(tmp_path_factory.getbasetemp(), "glm4_moe")
    expected, asked = expected_of(folder, 9), crowd(9)
    for attention in (1, 2):
        cluster = ClusterConfig(attention_ranks=attention, expert_ranks=1, heartbeat_s=10.0)
        config = replace(config_of(folder, MTP), cluster=cluster)
        assert on_ranks(config, asked) == expected, f"{attention} attention ranks"


@pytest.mark.faults
def test_a_failure_of_the_layer_fails_no_request(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path_factory.getbasetemp(), "glm4_moe")
    engine = engine_of(config_of(folder, MTP))
    monkeypatch.setattr(MTPDrafter, "_guesses", lambda *_: 1 // 0)
    assert serve(engine, crowd(9)) == expected_of(folder, 9)
    assert "mtp" not in engine.drafts.counts.by_source


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    folder = write_with_mtp(tmp_path / "m", "glm4_moe")
    sharded = replace(
        config_of(folder, MTP),
        cluster=ClusterConfig(attention_ranks=1, expert_ranks=1, attention_tp=2),
    )
    with pytest.raises(ConfigError, match="with cluster.attention_tp 1, but .* is 2: use 'auto'"):
        on_ranks(sharded, crowd(1))
    with pytest.raises(ConfigError, match="of qwen3_moe are not known, only those of deepseek"):
        build_engine(EngineConfig(speculation=MTP))
    weights = load_file(folder / FILE)
    del weights["model.layers.3.self_attn.k_proj.weight"]
    save_file(weights, folder / FILE)
    with pytest.raises(CheckpointError, match=r"layers.3.self_attn.k_proj.weight"):
        build_engine(config_of(folder, MTP))
    (folder / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"no weights of an MTP layer .*eh_proj.* 'auto'"):
        build_engine(config_of(folder, MTP))
