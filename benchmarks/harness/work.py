"""What every engine is asked to do, and how the clock is read. Knows no engine."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Engine(Protocol):
    """Something that continues prompts greedily, never stopping early."""

    def generate(self, prompts: list[list[int]], num_output: int) -> list[list[int]]:
        """-> `num_output` token ids for each prompt."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Sizes in tokens."""

    single_prompt: int = 128
    single_output: int = 128
    batch_size: int = 16
    batch_prompt: int = 128
    batch_output: int = 64
    prefill_prompt: int = 1024
    repeat: int = 3
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        single = self.single_prompt + self.single_output
        return max(single, self.batch_prompt + self.batch_output, self.prefill_prompt + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Medians. Decode alone is the time of a long answer less the time of a one-token answer."""

    ttft_s: float  # one prompt of `single_prompt` tokens, alone
    single_decode_tok_s: float
    batch_total_tok_s: float  # all answers' tokens over the whole time, prompts included
    batch_decode_tok_s: float
    prefill_tok_s: float
    samples_s: dict[str, list[float]]  # every timed run
    first_answers: list[list[int]]  # the batch's tokens in the first timed run, to compare engines


def measure(engine: Engine, work: Work, vocab_size: int) -> Figures:
    """Each kind of work once to warm up and `repeat` times timed, always with fresh prompts."""
    rng = random.Random(work.seed)

    def timed(num_prompts: int, length: int, output: int) -> tuple[list[float], list[list[int]]]:
        times, first = [], []
        for round_ in range(work.repeat + 1):
            prompts = _prompts(rng, num_prompts, length, vocab_size)
            seconds, answers = _clock(lambda p=prompts: engine.generate(p, output))  # type: ignore[misc]
            if round_ == 1:
                first = answers
            times.append(seconds)
        return times[1:], first

    ttft, _ = timed(1, work.single_prompt, 1)
    single, _ = timed(1, work.single_prompt, work.single_output)
    batch_first, _ = timed(work.batch_size, work.batch_prompt, 1)
    batch, answers = timed(work.batch_size, work.batch_prompt, work.batch_output)
    prefill, _ = timed(1, work.prefill_prompt, 1)
    m = statistics.median
    batch_more = work.batch_size * (work.batch_output - 1)
    return Figures(
        ttft_s=m(ttft),
        single_decode_tok_s=_rate(work.single_output - 1, m(single) - m(ttft)),
        batch_total_tok_s=_rate(work.batch_size * work.batch_output, m(batch)),
        batch_decode_tok_s=_rate(batch_more, m(batch) - m(batch_first)),
        prefill_tok_s=_rate(work.prefill_prompt, m(prefill)),
        samples_s={
            "ttft": ttft,
            "single": single,
            "batch_first": batch_first,
            "batch": batch,
            "prefill": prefill,
        },
        first_answers=answers,
    )


def _rate(num_tokens: int, seconds: float) -> float:
    """0 if the clock noise swallowed the work (sizes too small to measure)."""
    return num_tokens / seconds if seconds > 0 else 0.0


def _prompts(rng: random.Random, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random ids from 16 on (below are special tokens), so that no prefix is ever shared."""
    return [[rng.randrange(16, vocab_size) for _ in range(length)] for _ in range(count)]


def _clock(work: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    answers = work()
    return time.perf_counter() - start, answers
