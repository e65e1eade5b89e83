"""Compares the decode throughput of two policies on one model, with the same requests in turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batching.queue import SHORTEST
from batching.requests import LONGEST, PREFIX, Request
from harness.interval import Interval
from moe_serve import LLM, SamplingParams
from moe_serve.config.sections import BatchPolicyName
from moe_serve.offline.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class DuelResult:
    """Generated tokens per second of processor time, and the ratio of both in each round."""

    policy: str
    size: int
    num_requests: int
    num_generated: int
    fifo_tokens_s: float
    tokens_s: float
    ratio: Interval
    is_same_tokens: bool


class Rival:
    """A loaded model with one policy.

    The first round reads the prompts; later rounds find them in the prefix cache, so nearly only
    decoding is timed.
    """

    def __init__(
        self, model: str, policy: BatchPolicyName, size: int, num_pages: int,
        num_threads: int, num_groups: int, predictor: str | None,
    ) -> None:  # fmt: skip
        self.llm = LLM(
            model, batch_policy=policy, predictor=predictor, max_num_seqs=size,
            num_pages=num_pages, num_threads=num_threads, micro_batches=num_groups,
            speculation="off",
        )  # fmt: skip

    def round(
        self, prompts: list[list[int]], params: list[SamplingParams]
    ) -> tuple[float, list[RequestOutput]]:
        """Returns the seconds of processor time of this process, and the answers."""
        clock = time.process_time()
        outputs = self.llm.generate(prompts, params, use_progress_bar=False)
        return time.process_time() - clock, outputs


def run_duel(
    fifo: Rival, other: Rival, name: str, requests: Sequence[Request], size: int, num_rounds: int
) -> DuelResult:
    """Runs one uncounted round of each and then `num_rounds` rounds, in alternating order."""
    rng = np.random.default_rng(0)
    prompts = [[int(token) for token in request.prefix(0)] for request in requests]
    lengths = rng.integers(SHORTEST, LONGEST + 1, len(prompts)).tolist()
    params = [
        SamplingParams(max_tokens=n, temperature=0.8, seed=seed, ignore_eos=True)
        for seed, n in enumerate(lengths)
    ]
    first, second = fifo.round(prompts, params)[1], other.round(prompts, params)[1]
    is_same = [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in second]
    seconds: dict[int, list[float]] = {0: [], 1: []}
    for index in range(num_rounds):
        for which in (0, 1) if index % 2 == 0 else (1, 0):
            seconds[which].append((fifo, other)[which].round(prompts, params)[0])
    total = sum(lengths)
    ratios = [a / b for a, b in zip(seconds[0], seconds[1], strict=True)]
    return DuelResult(
        policy=name,
        size=size,
        num_requests=len(prompts),
        num_generated=total,
        fifo_tokens_s=total / float(np.mean(seconds[0])),
        tokens_s=total / float(np.mean(seconds[1])),
        ratio=Interval.of(ratios),
        is_same_tokens=is_same,
    )


def pages_for(num_requests: int) -> int:
    """Returns the number of pages that keep every prompt in the prefix cache."""
    return num_requests * (-(-(PREFIX + LONGEST) // 16) + 1)
