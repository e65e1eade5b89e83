"""Drafts change no token, log probability or end, with any parameter of a request."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moe_serve.config.sections import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from moe_serve.engine.build import build_engine
from moe_serve.engine.drafting.oracle import Oracle
from moe_serve.engine.engine import Engine
from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.thinking_markers import ThinkingMarkers
from tests.support.cluster.layouts import Answer, serve
from tests.support.engine.oracle import give_drafts
from tests.support.sampled_cases import EVERY_CASE

VOCAB_SIZE = 4096  # of the demonstration model
SCHEMA = {
    "type": "object",
    "properties": {"the_first_name": {"type": "string"}, "is_an_adult": {"type": "boolean"}},
    "required": ["the_first_name", "is_an_adult"],
    "additionalProperties": False,
}
THINKING = ThinkingMarkers(end=(60, 61), closings=((60, 61),), is_open=True)
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "top_k": 40, "logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 0},
    {"temperature": 1.0, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"temperature": 0.0, "logit_bias": {5: 4.0, 300: -50.0}, "prompt_logprobs": 1},
    {"temperature": 1.0, "min_tokens": 12, "ignore_eos": False},
    {"temperature": 0.0, "bad_word_ids": ((303,), (14, 303), (262, 281))},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(260, 420))},
    {"temperature": 0.7, "stop_token_ids": tuple(range(255, 275)), "min_tokens": 3},
    {"temperature": 0.0, "constraint": Constraint("json_schema", json.dumps(SCHEMA))},
    {"temperature": 1.0, "constraint": Constraint("regex", "(a long word, |another one, ){3}end")},
    {"temperature": 1.0, "constraint": Constraint("choice", '["the same beginning", "the same"]')},
    {"temperature": 0.7, "constraint": Constraint("lark", 'start: "x = " /[0-9]{2,9}/ " + y"')},
    {"temperature": 1.0, "thinking_token_budget": 9, "thinking_markers": THINKING},
]

BOTH_CHOICES = range(2 * len(PARAMS))
ALL_PARAMS = range(len(PARAMS) + 4)
EVERY_OTHER = range(0, len(PARAMS), 2)


def crowd(seed: int, asked: range, most: int) -> list[GenerationRequest]:
    """Returns a request for each number in `asked`, with answers of up to `most` tokens."""
    rng = np.random.default_rng(seed)

    def one(i: int) -> GenerationRequest:
        fields = {"max_tokens": int(rng.integers(12, most)), "ignore_eos": True} | PARAMS[
            i % len(PARAMS)
        ]
        if "constraint" in fields:
            fields |= {"ignore_eos": False, "max_tokens": most}
        return GenerationRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple(
                rng.integers(256, VOCAB_SIZE, int(rng.integers(1, 60))).tolist()
            ),
            params=SamplingParams(seed=int(rng.integers(99)), **fields),
            choice=i // len(PARAMS),
        )

    return [one(i) for i in asked]


def engine_of(kernels: str, dtype: str, num_pages: int, budget: int, cuts: int) -> Engine:
    config = EngineConfig(
        model=ModelConfig(kernels=kernels, dtype=dtype, num_threads=1, max_model_len=256),  # type: ignore[arg-type]
        cache=CacheConfig(num_pages=num_pages),
        scheduler=SchedulerConfig(max_num_seqs=20, max_batched_tokens=budget, max_held_s=1e6),
    )
    config = replace(config, pipeline=replace(config.pipeline, micro_batches=cuts))
    engine = build_engine(config).engine
    assert isinstance(engine, Engine)
    return engine


@pytest.mark.parametrize(
    ("kernels", "dtype", "num_pages", "budget", "cuts", "drafts", "asked"),
    [
        ("native", "bfloat16", 256, 64, 1, ((0.7, 5), (1.0, 16)), ALL_PARAMS),
        ("native", "float32", 24, 128, 3, ((0.3, 2), (1.0, 16)), ALL_PARAMS),
        ("torch", "float32", 17, 64, 2, ((0.8, 8),), EVERY_OTHER),
        *[("torch", "bfloat16", 256, 40, 1, ((0.8, 8),), BOTH_CHOICES)] * EVERY_CASE,
    ],
)
def test_every_parameter(
    kernels: str,
    dtype: str,
    num_pages: int,
    budget: int,
    cuts: int,
    drafts: tuple[tuple[float, int], ...],
    asked: range,
) -> None:
    """Pages are few, so requests are preempted; the cache is cold, then warm. `drafts` are the
    share of right tokens and the length of a draft.

    torch is slow, and samples with the same code: in float32 it serves every other parameter, and
    bfloat16 runs if every case does.
    """
    if EVERY_CASE:
        asked = BOTH_CHOICES
    requests = crowd(budget, asked, 40 if EVERY_CASE else 24 if kernels == "native" else 16)
    expected = serve(engine_of(kernels, dtype, 256, 512, 1), requests)
    assert all(answer.error is None for answer in expected.values()), f"{expected}"
    answers = {name: answer.token_ids for name, answer in expected.items()}
    engine = engine_of(kernels, dtype, num_pages, budget, cuts)
    for alpha, most in drafts:
        oracle = Oracle(answers, alpha, vocab_size=VOCAB_SIZE, seed=most)
        drafting = give_drafts(engine, oracle, most=most, vocab_size=VOCAB_SIZE)
        random.Random(most).shuffle(requests)
        found: dict[str, Answer] = serve(engine, requests)
        assert found == expected
        assert drafting.counts.total.num_accepted > 20
