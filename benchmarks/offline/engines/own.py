"""Runs `moe_serve.LLM`, the offline counterpart of the server."""

from __future__ import annotations

from typing import cast

from moe_serve import LLM, SamplingParams
from moe_serve.config.sections import DtypeName, LowBitProductsName

from ..job import Job, Ready
from . import versions


class MoeServe:
    def __init__(self, job: Job) -> None:
        self._llm = LLM(
            model=job.model,
            dtype=cast(DtypeName, job.dtype),
            max_model_len=job.max_model_len,
            max_num_seqs=job.max_num_seqs,
            num_threads=job.num_threads,
            prefix_cache=False,  # the same prompts run several times
            speculation="off",
            low_bit_products=cast(LowBitProductsName, job.variant or "exact"),
        )

    def ready(self) -> Ready:
        layout = self._llm.layout
        found = versions("moe-serve", "torch") | {
            "kernels": layout.kernels,
            "weights": layout.expert_weights,
        }
        return Ready(versions=found, cache_bytes=layout.kv_bytes)

    def generate(self, prompts: list[list[int]], num_output: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_output)
        outputs = self._llm.generate(prompts, params, use_progress_bar=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
