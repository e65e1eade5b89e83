"""Runs transformers' `generate` with one of its implementations of experts and its default
cache.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..job import Job, Ready
from . import versions


class Transformers:
    """transformers as an engine; the variant is the implementation of the experts."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.num_threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            job.model, dtype=job.dtype, experts_implementation=job.variant
        )
        config = self._model.generation_config
        config.eos_token_id, config.pad_token_id = None, 0
        config.do_sample = False
        config.temperature = config.top_p = config.top_k = None

    def ready(self) -> Ready:
        return Ready(versions=versions("transformers", "torch"), cache_bytes=None)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], num_output: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        out = self._model.generate(ids, attention_mask=mask, max_new_tokens=num_output)
        answers: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return answers
