"""Opens a model with or without a disk tier, sends prompts, and waits for the tier."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import numpy as np

from moe_serve import LLM, SamplingParams
from moe_serve.cache.tiers.store import TierStats

_FIRST = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def prompt_of(llm: LLM, length: int, seed: int) -> list[int]:
    """Returns random token ids."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = rng.integers(10, llm.layout.vocab_size - 10, length).tolist()
    return tokens


def opened(arguments: argparse.Namespace, folder: Path | None, num_pages: int | None = None) -> LLM:
    """Opens the model, with a tier in `folder`, and waits until the tier is open."""
    llm = LLM(
        arguments.model,
        speculation="off",
        num_threads=arguments.threads,
        num_pages=num_pages,
        max_model_len=None if num_pages is None else num_pages * 16 - 16,
        kv_disk=None if folder is None else str(folder),
        kv_disk_key_file=None if folder is None else arguments.key_file,
    )
    while folder is not None and not tier_of(llm).is_reading:
        time.sleep(0.01)
    return llm


def tier_of(llm: LLM) -> TierStats:
    tier = llm.stats().tier
    assert tier is not None, "the model was opened with a tier"
    return tier


def timed(llm: LLM, prompt: list[int], params: SamplingParams = _FIRST) -> float:
    begin = time.perf_counter()
    llm.generate([prompt], params, use_progress_bar=False)
    return time.perf_counter() - begin


def until_stored(llm: LLM) -> None:
    """Lets the engine hand over what it computed, and waits until it is written."""
    while (tier := tier_of(llm)).num_queued:
        llm.generate([[1, 2, 3]], _FIRST, use_progress_bar=False)
        if sum(tier.saves.values()) == 0:
            time.sleep(0.01)


def drop_file_cache(folder: Path) -> None:
    os.sync()
    for path in folder.glob("*/*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def med(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ms"
