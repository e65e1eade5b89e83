"""The engines under test behind one `Engine` face. Each is made inside its own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from .work import Engine, Work

DTYPES = ("auto", "float32", "bfloat16", "float16")
TRANSFORMERS_EXPERTS = ("eager", "batched_mm", "grouped_mm")


class MoeServe:
    """`moe_serve.LLM`, the offline twin of the server."""

    def __init__(self, model: str, dtype: str, num_threads: int, work: Work) -> None:
        from moe_serve import LLM, SamplingParams
        from moe_serve.config import DtypeName

        self._params = SamplingParams
        self._llm = LLM(
            model=model,
            dtype=cast(DtypeName, dtype),
            max_model_len=work.longest + 1,
            max_num_seqs=max(work.batch_size, 1),
            num_threads=num_threads,
            prefix_cache=False,  # the same prompts run several times
        )

    def generate(self, prompts: list[list[int]], num_output: int) -> list[list[int]]:
        params = self._params(temperature=0.0, ignore_eos=True, max_tokens=num_output)
        outputs = self._llm.generate(prompts, params, use_progress_bar=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Transformers:
    """`transformers` `generate` with one of its experts implementations and its default cache."""

    def __init__(self, model: str, dtype: str, num_threads: int, experts: str) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(num_threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, experts_implementation=experts
        )
        config = self._model.generation_config
        config.eos_token_id, config.pad_token_id = None, 0
        config.do_sample = False
        config.temperature = config.top_p = config.top_k = None

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], num_output: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        out = self._model.generate(ids, attention_mask=mask, max_new_tokens=num_output)
        answers: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return answers


def make_engine(name: str, model: str, dtype: str, num_threads: int, work: Work) -> Engine:
    """`name`: "moe-serve", or "transformers/<experts implementation>"."""
    kind, _, experts = name.partition("/")
    makers: dict[str, Callable[[], Engine]] = {
        "moe-serve": lambda: MoeServe(model, dtype, num_threads, work),
        "transformers": lambda: Transformers(model, dtype, num_threads, experts),
    }
    return makers[kind]()
