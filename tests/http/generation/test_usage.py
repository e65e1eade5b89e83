"""`server.request_metrics`: an answer's own times, by vLLM's and llama.cpp's names."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from moe_serve.engine.request.request import FinishReason, GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.http.generation.usage import llama_timings, timing_of
from moe_serve.http.metrics.finished_sequence import FinishedSequence

NAMES = {
    "time_to_first_token_ms",
    "generation_time_ms",
    "queue_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}


def finished(**changes: Any) -> FinishedSequence:
    request = GenerationRequest(
        request_id="r", prompt_token_ids=(1,), params=SamplingParams(), arrival_time=100.0
    )
    values: dict[str, Any] = {
        "request": request, "reason": FinishReason.LENGTH, "num_tokens": 5, "num_cached_tokens": 0,
        "started": 102.0, "first_token": 105.0, "ended": 112.0,
    }  # fmt: skip
    return FinishedSequence(**{**values, **changes})


def test_what_the_times_are() -> None:
    assert timing_of(finished()) == {
        "time_to_first_token_ms": 3000.0,
        "generation_time_ms": 7000.0,
        "queue_time_ms": 2000.0,
        "mean_itl_ms": 1750.0,  # 7 s for the 4 after the first
        "tokens_per_second": 0.5,  # 5 in the 10 s since the first step
    }


def test_the_times_by_llama_cpp_s_names() -> None:
    request = GenerationRequest(
        request_id="r", prompt_token_ids=(1,) * 8, params=SamplingParams(), arrival_time=100.0
    )
    assert llama_timings(finished(request=request, num_cached_tokens=2)) == {
        "cache_n": 2,
        "prompt_n": 6,
        "prompt_ms": 3000.0,
        "prompt_per_token_ms": 500.0,
        "prompt_per_second": 2.0,
        "predicted_n": 5,
        "predicted_ms": 7000.0,
        "predicted_per_token_ms": 1400.0,
        "predicted_per_second": 0.714,
    }
    at_once = llama_timings(finished(ended=105.0, num_tokens=1))
    assert at_once is not None and at_once["predicted_per_second"] == 0.0
    assert llama_timings(finished(first_token=None, num_tokens=0)) is None


def test_what_is_not_known_is_null() -> None:
    assert timing_of(finished(num_tokens=1))["mean_itl_ms"] is None
    never = timing_of(finished(started=None, first_token=None, num_tokens=0))
    assert set(never) == NAMES and set(never.values()) == {None}


@pytest.mark.parametrize("route", BODIES)
def test_whole_and_streamed(make_app: Callable[..., FastAPI], route: str) -> None:
    client, body = TestClient(make_app(request_metrics=True)), BODIES[route]
    times = client.post(route, json=body).json()["metrics"]
    drafts = times.pop("speculative_decoding")
    assert drafts["num_draft_tokens"] == 0, "the engine of this test drafts nothing"
    assert set(times) == NAMES and None not in times.values() and min(times.values()) >= 0
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    lines = client.post(route, json=stream).text.split("\n\n")[:-2]
    chunks = [json.loads(line[6:]) for line in lines]
    assert [set(chunk.get("metrics", ())) for chunk in chunks if "metrics" in chunk] == [
        NAMES | {"speculative_decoding"}
    ]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 6
    assert chunks[-1]["metrics"]["tokens_per_second"] > 0
    assert chunks[-1]["timings"]["predicted_n"] == 6
    assert client.post(route, json=body).json()["timings"]["predicted_ms"] >= 0


@pytest.mark.parametrize("route", BODIES)
def test_not_of_several_sequences_and_not_unasked(
    make_app: Callable[..., FastAPI], route: str
) -> None:
    asked, body = TestClient(make_app(request_metrics=True)), BODIES[route]
    assert "metrics" not in asked.post(route, json={**body, "n": 2}).json()
    plain = TestClient(make_app()).post(route, json=body).json()
    assert "metrics" not in plain and "timings" not in plain
