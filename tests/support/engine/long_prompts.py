"""Requests with prompts of several steps, and an engine that reads them in groups of layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moe_serve.config.sections import EngineConfig
from moe_serve.engine.request.request import GenerationRequest
from tests.support.cluster.layouts import requests


def long_requests(vocab_size: int) -> list[GenerationRequest]:
    """Returns eight requests with prompts of up to 300 tokens, two of which begin alike."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, vocab_size, int(rng.integers(30, 300))).tolist() for _ in range(8)]
    prompts[5] = prompts[2][:150] + prompts[5]
    return [
        replace(each, prompt_token_ids=tuple(prompt))
        for each, prompt in zip(requests(8, vocab_size), prompts, strict=True)
    ]


def in_layers(of: EngineConfig) -> EngineConfig:
    return replace(of, scheduler=replace(of.scheduler, layered_prefill="on"))


def in_chunks(of: EngineConfig) -> EngineConfig:
    return replace(of, scheduler=replace(of.scheduler, layered_prefill="off"))
