"""Experts in a slower tier: the same tokens as with all of them in memory, bit for bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers

from experts.memory.expectation import Hint
from experts.memory.expert_memory import ExpertMemory
from moe_serve.cluster.ranks.choice_packing import pack_needed, unpack_needed
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.sections import (
    BatchPolicyName,
    EngineConfig,
    MemoryPolicyName,
    ModelConfig,
    PredictorConfig,
)
from moe_serve.engine.build import build_engine
from moe_serve.engine.execute.next_layer_prediction import check_next_layer
from moe_serve.engine.opened_model import ServedCheckpoint
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.errors import ConfigError
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.model.checkpoint.safetensors_file import SafetensorsFile
from moe_serve.planning.calibration import CalibrationRequest, calibrate
from tests.support.cluster.layouts import Answer, colocated, config, requests, serve
from tests.support.cluster.thread_starter import ThreadStarter

VOCAB_SIZE, NUM_LAYERS, NUM_EXPERTS = 4096, 6, 32  # of the demonstration model
EXPERT_BYTES = 3 * 256 * 96 * 2
ALL_BYTES = NUM_LAYERS * NUM_EXPERTS * EXPERT_BYTES


def within(
    of: EngineConfig, num_bytes: int, policy: MemoryPolicyName = "predicted"
) -> EngineConfig:
    model = replace(of.model, expert_memory_bytes=num_bytes, expert_memory_policy=policy)
    return replace(of, model=model)


@pytest.fixture(scope="module")
def wanted() -> list[GenerationRequest]:
    return requests(5, VOCAB_SIZE, num_tokens=6)


@pytest.fixture(scope="module")
def resident(wanted: list[GenerationRequest]) -> dict[str, Answer]:
    return colocated(config(0, 0), wanted)


@pytest.mark.sampled
@pytest.mark.parametrize("policy", ["lru", "predicted"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_one_process(
    share: float,
    policy: MemoryPolicyName,
    wanted: list[GenerationRequest],
    resident: dict[str, Answer],
) -> None:
    of = within(config(0, 0, 1), int(ALL_BYTES * share), policy)
    engine = build_engine(of).engine
    assert serve(engine, wanted) == resident, f"{policy}, {share:.0%} of the experts"
    stats = engine.stats().expert_memory
    assert stats is not None and 0 < stats.num_reads < stats.num_needed * 2, f"{stats}"
    assert stats.resident_bytes <= ALL_BYTES * share, f"{stats}"


@pytest.mark.parametrize("experts", [1, 2])
def test_ranks(experts: int, wanted: list[GenerationRequest], resident: dict[str, Answer]) -> None:
    """And the ranks' counts come together."""
    of = within(config(1, experts), ALL_BYTES // 2 // experts)
    engine = build_cluster(of, make_starter=ThreadStarter).engine
    try:
        assert serve(engine, wanted) == resident
        stats = engine.stats().expert_memory
        assert stats is not None and stats.num_needed > stats.num_hits > 0, f"{stats}"
        assert ALL_BYTES * 0.4 < stats.budget_bytes <= ALL_BYTES // 2, f"{stats}"
    finally:
        engine.close()


@pytest.mark.sampled
@pytest.mark.parametrize("batch_policy", ["fifo", "expert-aware"])
@pytest.mark.parametrize(("attention", "experts"), [(0, 0), (2, 2)])
def test_requests_tell_what_they_will_need(
    attention: int,
    experts: int,
    batch_policy: BatchPolicyName,
    wanted: list[GenerationRequest],
    resident: dict[str, Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one process and on ranks, under any batch policy; the tokens stay."""
    told: list[Hint | None] = []
    hint = ExpertMemory.hint

    def noted(memory: ExpertMemory, scores_LE: Hint | None) -> None:
        told.append(scores_LE)
        hint(memory, scores_LE)

    monkeypatch.setattr(ExpertMemory, "hint", noted)
    of = within(config(attention, experts, 1), ALL_BYTES // 2, "prefetch")
    of = replace(
        of,
        predictor=PredictorConfig(path=str(demo_model_folder() / "predictor"), min_recall=0.0),
        scheduler=replace(of.scheduler, batch_policy=batch_policy),
    )
    engine = (
        build_cluster(of, make_starter=ThreadStarter).engine if experts else build_engine(of).engine
    )
    try:
        assert serve(engine, wanted) == resident
    finally:
        engine.close()
    known = [scores_LE for scores_LE in told if scores_LE is not None]
    assert len(known) > len(told) / 2, f"{len(known)} hints in {len(told)} steps"
    assert all(scores_LE.shape == (NUM_LAYERS, NUM_EXPERTS) for scores_LE in known)
    assert all(scores_LE.min() >= 0 and scores_LE.max() <= 1 for scores_LE in known)
    assert any(scores_LE.min() < 0.1 < 0.5 < scores_LE.max() for scores_LE in known)


@pytest.mark.parametrize(
    ("attention", "experts", "micro_batches", "router"),
    [
        (0, 0, 1, "auto"),
        (0, 0, 2, "auto"),
        (1, 1, 2, "auto"),
        (2, 2, 2, "attention"),
        (2, 2, 1, "experts"),
    ],
)
def test_the_next_layer_is_foreseen(
    attention: int,
    experts: int,
    micro_batches: int,
    router: str,
    wanted: list[GenerationRequest],
    resident: dict[str, Answer],
) -> None:
    """By its trained predictor, on random prompts too: most of what is said comes. The tokens
    stay."""
    of = config(attention, experts, micro_batches, router=router)
    of = foreseeing(within(of, ALL_BYTES // 2 // max(1, experts), "next-layer"))
    engine = (
        build_cluster(of, make_starter=ThreadStarter).engine if experts else build_engine(of).engine
    )
    try:
        assert serve(engine, wanted) == resident
        stats = engine.stats().expert_memory
    finally:
        engine.close()
    assert stats is not None and stats.num_prefetch_hits > 0, f"{stats}"
    assert 0.8 < stats.num_foreseen / stats.num_foretold <= 1, f"{stats}"
    assert stats.num_foreseen > stats.num_needed / 2, f"{stats}"


def test_a_bad_predictor_is_switched_off(
    wanted: list[GenerationRequest], resident: dict[str, Answer], caplog: pytest.LogCaptureFixture
) -> None:
    """No predictor has a recall of all: the floor is out of reach."""
    of = foreseeing(within(config(0, 0, 1), ALL_BYTES // 2, "next-layer"), min_recall=1.0)
    engine = build_engine(of).engine
    assert serve(engine, wanted) == resident
    assert "the next-layer predictor is switched off: its recall is" in caplog.text
    before = engine.stats().expert_memory
    assert serve(engine, wanted) == resident
    after = engine.stats().expert_memory
    assert before is not None and after is not None
    assert after.num_foretold == before.num_foretold < after.num_needed - before.num_needed


@pytest.mark.parametrize(("attention", "experts"), [(0, 0), (1, 1)])
def test_a_next_layer_predictor_that_does_not_fit_is_refused(
    attention: int, experts: int, tmp_path: Path
) -> None:
    """Before anything is loaded, in one sentence: none, none there, another model's."""

    def refusal(of: EngineConfig) -> str:
        with pytest.raises(ConfigError) as caught:
            if experts:
                build_cluster(of, make_starter=ThreadStarter)
            else:
                build_engine(of)
        return str(caught.value)

    of = within(config(attention, experts, 1), ALL_BYTES, "next-layer")
    start = "model.expert_memory_policy is 'next-layer', but "
    assert refusal(of) == (
        f"{start}predictor.path is null: give a folder with a next-layer predictor."
    )
    there = f"{tmp_path / 'next-layer.json'} does not exist: {tmp_path} holds no such predictor."
    assert refusal(foreseeing(of, tmp_path)) == start + there
    card = (demo_model_folder() / "predictor" / "next-layer.json").read_text("utf-8")
    other = json.loads(card) | {"model": "other", "model_identity": "ab" * 32}
    (tmp_path / "next-layer.json").write_text(json.dumps(other), "utf-8")
    named = "but the next-layer predictor is for the model other (abababababab), not for demo_model"
    assert named in refusal(foreseeing(of, tmp_path))


def test_a_model_whose_routers_it_cannot_know_is_refused() -> None:
    """They add a bias to the choice: the largest logits are not what is chosen."""
    folder = demo_model_folder()
    spec = ServedCheckpoint.read(ModelConfig(path=str(folder))).spec
    biased = replace(spec, router=replace(spec.router, has_selection_bias=True))
    of = foreseeing(within(config(0, 0, 1), ALL_BYTES, "next-layer"))
    check_next_layer(of, folder, spec)
    with pytest.raises(ConfigError, match=r"'next-layer', but demo_model .* a bias of the choice"):
        check_next_layer(of, folder, biased)
    check_next_layer(within(of, ALL_BYTES, "prefetch"), folder, biased)


def foreseeing(
    of: EngineConfig, folder: Path | None = None, min_recall: float = 0.2
) -> EngineConfig:
    """With a next-layer predictor and no other."""
    path = demo_model_folder() / "predictor" if folder is None else folder
    known = PredictorConfig(path=str(path), mode="off", min_recall=min_recall)
    return replace(of, predictor=known)


def test_what_is_needed_by_several_ranks_travels_as_bytes() -> None:
    """By one of two attention ranks: 1 - (1 - p) (1 - q), to within 1 / 255."""
    one, other = np.full((2, 3), 0.5, np.float32), np.full((2, 3), 0.2, np.float32)
    packed = pack_needed([one, None, other])
    assert len(packed) == 6
    assert unpack_needed(packed, (2, 3)) == pytest.approx(np.full((2, 3), 0.6), abs=1 / 255)
    assert pack_needed([None]) == b"" and unpack_needed(b"", (2, 3)) is None
    assert pack_needed([np.zeros((129, 512), np.float32)]) == b"", "too much for a step's message"
    assert unpack_needed(packed, (3, 3)) is None, "of another model"


def test_an_expert_that_cannot_be_read_fails_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process: requests of that step end with an error that names the tensor; later ones
    are served."""
    name = "model.layers.3.mlp.experts.7.up_proj.weight"
    read, calls = SafetensorsFile._read_into, []

    def failing(file: SafetensorsFile, target: memoryview, begin: int) -> None:
        if file.headers[name].begin == begin and not calls:
            calls.append(begin)
            raise OSError(5, "Input/output error")
        read(file, target, begin)

    wanted = requests(7, VOCAB_SIZE, num_tokens=2)  # one of them needs it alone
    resident = colocated(config(0, 0), wanted)
    monkeypatch.setattr(SafetensorsFile, "_read_into", failing)
    engine = build_engine(within(config(0, 0, 1), ALL_BYTES // 2, "lru")).engine
    failed = serve(engine, wanted)
    errors = {answer.error for answer in failed.values() if answer.error is not None}
    assert calls and errors, "a step failed"
    assert serve(engine, wanted) == resident


@pytest.mark.parametrize("num_bytes", [0, -5])
def test_no_budget_is_refused(num_bytes: int) -> None:
    """In a configuration that no loader of configurations has seen."""
    with pytest.raises(ConfigError, match=rf"must be 1 or more, got {num_bytes}: give a p"):
        build_engine(within(config(0, 0, 1), num_bytes))


def test_too_little_memory_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"is 200000, but an expert takes 147456 bytes.*294912"):
        build_engine(within(config(0, 0, 1), 200_000))


@pytest.fixture
def dense_folder(tmp_path: Path) -> Path:
    """A checkpoint of an MoE family whose layers are all dense."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}
    model = transformers.Qwen3MoeConfig(
        **sizes,
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[0, 1],
        max_position_embeddings=512,
    )
    transformers.Qwen3MoeForCausalLM(model).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_folder() / name, tmp_path)
    return tmp_path


def test_a_model_without_routed_experts_is_refused(dense_folder: Path) -> None:
    """Only where it has a use for them: one process serves it."""
    alone = config(0, 0, 1)
    alone = replace(alone, model=replace(alone.model, path=str(dense_folder)))
    assert build_engine(alone).spec.num_layers == 2
    reason = "none of the 2 layers of this checkpoint has routed experts"
    with pytest.raises(ConfigError, match=rf"^model.expert_memory_bytes is 1048576, but {reason}"):
        build_engine(within(alone, 2**20))
    ranks = replace(alone, cluster=config(1, 2, 1).cluster)
    for refused in (ranks, within(ranks, 2**20)):
        with pytest.raises(ConfigError, match=rf"^cluster.expert_ranks is 2, but {reason}"):
            build_cluster(refused, ThreadStarter)


def test_a_model_without_routed_experts_is_not_calibrated(dense_folder: Path) -> None:
    request = CalibrationRequest(folder=dense_folder, device="cpu", num_threads=1, is_quick=True)
    with pytest.raises(ConfigError, match="has no routed experts in any layer"):
        calibrate(request, lambda stage, share: None)
