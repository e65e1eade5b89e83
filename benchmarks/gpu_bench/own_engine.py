"""Runs moe-serve's engine in one process on random weights, without a tokenizer or a server."""

from __future__ import annotations

import itertools
from typing import cast

import torch

from gpu_bench.job import Job
from gpu_bench.model import random_weights
from moe_serve.config.sections import (
    CacheConfig,
    DeviceName,
    DtypeName,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from moe_serve.engine.build import build_engine
from moe_serve.engine.request.request import FinishReason, GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams


class OwnEngine:
    """moe-serve's engine. On a CPU it uses the native kernels, or torch's for packed experts."""

    def __init__(self, job: Job) -> None:
        entrant, work, device = job.entrant, job.work, torch.device(job.device)
        pages_of_each = -(-(work.longest + 1) // CacheConfig().page_size)
        is_torch_set = bool(entrant.weights) and device.type == "cpu"
        config = EngineConfig(
            speculation=SpeculationConfig(method="off"),
            model=ModelConfig(
                path=job.folder,
                dtype=cast(DtypeName, job.dtype),
                device=cast(DeviceName, device.type),
                kernels="torch" if is_torch_set else "auto",
                expert_weights="packed" if entrant.weights else "auto",
                max_model_len=work.longest + 1,
                cuda_graphs="auto" if entrant.is_captured else "off",
            ),
            # The longest sequences run alone: the batch's need not all be as long.
            cache=CacheConfig(num_pages=_num_batch_pages(job) + pages_of_each, prefix_cache=False),
            scheduler=SchedulerConfig(
                max_num_seqs=work.batch_size, max_batched_tokens=job.max_batched_tokens
            ),
        )
        dtype: torch.dtype = getattr(torch, job.dtype)
        weights = random_weights(device, dtype, entrant.weights)
        built = build_engine(config, open_weights=weights)
        self._engine, self._ids = built.engine, itertools.count()
        layout = built.layout
        self.facts = {
            "kernels": layout.kernels,
            "expert weights": layout.expert_weights,
            "CUDA graphs": layout.cuda_graphs or "none: no GPU",
            "attention pages": str(layout.num_pages),
        }

    def generate(self, prompts: list[list[int]], num_output: int) -> list[list[int]]:
        """Returns `num_output` greedy token ids for each prompt. Raises RuntimeError if one
        fails.
        """
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_output)
        answers: dict[str, list[int]] = {}
        for prompt in prompts:
            name = f"bench-{next(self._ids)}"
            answers[name] = []
            self._engine.add(
                GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), params=params)
            )
        num_open = len(prompts)
        while num_open:
            for delta in self._engine.step():
                answers[delta.request_id] += delta.token_ids
                if delta.finish_reason is FinishReason.ERROR:
                    raise RuntimeError(f"{delta.request_id}: {delta.error}")
                num_open -= delta.finish_reason is not None
        return list(answers.values())


def _num_batch_pages(job: Job) -> int:
    work, page_size = job.work, CacheConfig().page_size
    return work.batch_size * -(-(work.batch_prompt + work.batch_output + 1) // page_size)
