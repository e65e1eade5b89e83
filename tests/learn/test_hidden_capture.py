"""The captured states and routes are those that the server computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_serve.cache.kv_cache import KVCache
from moe_serve.config.sections import ModelConfig
from moe_serve.engine.opened_model import OpenedModel
from moe_serve.errors import ConfigError
from moe_serve.learn.documents import TextPiece
from moe_serve.learn.predictor_data import PredictorModel
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.model.step_plan import MicroBatch, RouteAsk, SequenceSlice, StepPlan
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.route_tap import RouteTap
from moe_serve.pipeline.transport import LocalTransport

_RANDOM = np.random.default_rng(0)
PIECES = [TextPiece(_RANDOM.integers(300, 4000, n).astype(np.int64), f"p{n}", "") for n in (40, 17)]


@pytest.fixture(scope="module")
def model() -> PredictorModel:
    return PredictorModel(None)


def served(tokens: np.ndarray) -> np.ndarray:
    """Returns the routes [T, L, K] of a prompt in the server's own loop, in two chunks of
    prefill."""
    cpu = torch.device("cpu")
    loader = OpenedModel.open(demo_model_folder(), ModelConfig(), 1, cpu).loader
    stage, cache = loader.attention_stage(128), KVCache(loader.spec, 8, 16, loader.dtype, cpu)
    tap = RouteTap(loader.spec.router.num_experts)
    pipeline = Pipeline(stage, LocalTransport(loader.expert_stage()), cache, cpu, tap=tap)
    whole = SequenceSlice(
        sequence_id=0, start=0, token_ids=tokens[:16], page_table=(1, 2, 3, 4), num_logits=1
    )
    rest = replace(whole, start=16, token_ids=tokens[16:])
    chosen = []
    for each in (whole, rest):
        plan = StepPlan((MicroBatch((each,)),), RouteAsk(frozenset({0})))
        tap.begin(plan)
        pipeline.run(plan)
        choices = tap.end(plan)
        assert choices is not None
        chosen.append(choices.expert_ids_NLK)
    return np.concatenate(chosen)


def test_captured_routing_is_the_servers(model: PredictorModel) -> None:
    trace = model.capture(PIECES, has_hidden=False, progress=lambda *_: None).trace
    assert trace.model_identity == model.identity and trace.layers == tuple(range(6))
    np.testing.assert_array_equal(trace.expert_ids_NLK[:40], served(PIECES[0].tokens))
    np.testing.assert_array_equal(trace.expert_ids_NLK[40:], served(PIECES[1].tokens))


def test_captured_streams_lead_to_what_was_chosen(model: PredictorModel) -> None:
    captured = model.capture(PIECES, has_hidden=True, progress=lambda *_: None)
    trace = captured.trace
    assert captured.before_router_LTD is not None and captured.before_attention_LTD is not None
    assert trace.token_N is not None
    for layer, router in enumerate(model.routers()):
        logits = router.logits(router.normed(captured.before_router_LTD[layer]))
        chosen = logits.topk(4, -1).indices.numpy()
        same = (chosen[:, :, None] == trace.expert_ids_NLK[:, layer, None]).any(1)
        assert same.mean() > 0.99, f"layer {layer}, but for what bf16 rounds"
    embedded = model.embedding()[torch.from_numpy(trace.token_N).long()]
    torch.testing.assert_close(captured.before_attention_LTD[0], embedded.half())


@pytest.mark.parametrize(
    ("changes", "shape", "why"),
    [
        ({"has_selection_bias": True}, {}, "a bias of the choice"),
        ({}, {"num_groups": 4, "num_groups_kept": 2}, "groups of experts"),
    ],
)
def test_routers_that_choose_by_more_than_logits_are_refused(
    model: PredictorModel,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, bool],
    shape: dict[str, int],
    why: str,
) -> None:
    router = model.spec.router
    other = replace(router, shape=replace(router.shape, **shape), **changes)  # type: ignore[arg-type]
    monkeypatch.setattr(model, "spec", replace(model.spec, router=other))
    for refused in (
        model.routers,
        lambda: model.capture(PIECES, has_hidden=True, progress=lambda *_: None),
    ):
        with pytest.raises(ConfigError, match=rf"demo_model \(qwen3_moe\) has routers with {why}"):
            refused()
    assert model.capture(PIECES, has_hidden=False, progress=lambda *_: None).trace.num_tokens == 57
