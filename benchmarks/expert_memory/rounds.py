"""Prompts of mixed domains (pieces of the texts in turn, drawn with a seed), and engines that
differ only in their expert memory and take turns at the same requests.
"""

from __future__ import annotations

import lzma
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experts.memory.memory_stats import MemoryStats
from harness.interval import Interval
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.text.tokenizer import Tokenizer

_MAX_CHARACTERS = 300_000  # of a file
BUILT_IN = (
    "The harbour was quiet that morning. Old Anna carried her basket along the wall, counting the "
    "boats that had come back and the ones that had not, and said nothing to anybody. ",
    "def merge(left, right):\n    result = []\n    while left and right:\n        side = left if "
    "left[0] <= right[0] else right\n        result.append(side.pop(0))\n    return result\n",
    "Sei f eine stetige Funktion auf einem abgeschlossenen Intervall. Dann nimmt f dort ihr "
    "Maximum und ihr Minimum an. Der Vertrag bedarf zu seiner Wirksamkeit der Schriftform. ",
    "Question: A train leaves at 9:40 and arrives at 12:05. How long does the journey take? "
    "Answer: From 9:40 to 12:00 are 140 minutes, and 5 more make 145 minutes. ",
)


def token_streams(paths: Sequence[Path], tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the tokens of each text: of the given files (.xz too), or of built-in texts."""
    texts = [_text(path) for path in paths] or [text * 40 for text in BUILT_IN]
    return [tokenizer.encode(text) for text in texts]


def draw(
    streams: Sequence[Sequence[int]], count: int, num_tokens: int, seed: int
) -> list[tuple[int, ...]]:
    """Draws `count` pieces from the streams in turn."""
    rng = np.random.default_rng(seed)
    pieces = []
    for index in range(count):
        stream = streams[index % len(streams)]
        start = int(rng.integers(0, max(1, len(stream) - num_tokens)))
        pieces.append(tuple(stream[start : start + num_tokens]))
    return pieces


def _text(path: Path) -> str:
    if path.suffix == ".xz":
        with lzma.open(path, "rt", encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_CHARACTERS)
    return path.read_text(encoding="utf-8", errors="replace")[:_MAX_CHARACTERS]


TOLD = ", told"  # suffix of the name of an engine that gets request predictions


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of one engine over all rounds."""

    name: str
    tokens_per_s: Interval
    over_first: Interval  # its speed over that of the first engine with a memory, round by round
    hit_rate: Interval  # of needed experts; 1 without a memory
    row_hit_rate: Interval
    wait_share: Interval  # of the time
    megabytes_read_per_token: Interval
    prefetched: int
    prefetch_hits: int
    read_over_untold: Interval | None = None  # bytes relative to the policy without predictions


@dataclass(frozen=True, slots=True)
class _Turn:
    tokens_per_s: float
    seconds: float
    stats: MemoryStats
    answers: dict[str, list[int]]


def run_rounds(
    engines: Mapping[str, DrivenEngine],
    rounds: Sequence[Sequence[tuple[int, ...]]],
    num_tokens: int,
) -> list[Outcome]:
    """Runs all rounds; the first one is a warm-up. Raises if two engines answer differently."""
    turns: dict[str, list[_Turn]] = {name: [] for name in engines}
    for number, prompts in enumerate(rounds):
        order = list(engines)[:: 1 if number % 2 else -1]
        for name in order:
            turns[name].append(_turn(engines[name], prompts, num_tokens))
        first, *others = (each[-1].answers for each in turns.values())
        assert all(answers == first for answers in others), "a memory changed tokens"
    with_memory = [name for name in engines if turns[name][-1].stats.budget_bytes]
    return [
        _outcome(name, each[1:], turns[with_memory[0]][1:], turns.get(name.removesuffix(TOLD)))
        for name, each in turns.items()
    ]


def _turn(engine: DrivenEngine, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> _Turn:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    before = engine.stats().expert_memory or MemoryStats()
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        request = GenerationRequest(
            request_id=str(index), prompt_token_ids=prompt, params=params, choice=0
        )
        answers[request.request_id] = []
        engine.add(request)
    while engine.num_running or engine.num_waiting:
        for delta in engine.step():
            assert delta.error is None, delta.error
            answers[delta.request_id] += delta.token_ids
    seconds = time.perf_counter() - start
    stats = (engine.stats().expert_memory or MemoryStats()) - before
    return _Turn(len(prompts) * num_tokens / seconds, seconds, stats, answers)


def _outcome(
    name: str, turns: list[_Turn], first: list[_Turn], untold: list[_Turn] | None
) -> Outcome:
    read = None
    if untold is not None and name.endswith(TOLD):
        pairs = zip(turns, untold[1:], strict=True)
        read = Interval.of([a.stats.bytes_read / max(1, b.stats.bytes_read) for a, b in pairs])
    tokens = sum(len(answer) for answer in turns[0].answers.values())
    return Outcome(
        name=name,
        tokens_per_s=Interval.of([turn.tokens_per_s for turn in turns]),
        over_first=Interval.of(
            [a.tokens_per_s / b.tokens_per_s for a, b in zip(turns, first, strict=True)]
        ),
        hit_rate=Interval.of([turn.stats.hit_rate for turn in turns]),
        row_hit_rate=Interval.of([turn.stats.row_hit_rate for turn in turns]),
        wait_share=Interval.of([turn.stats.wait_seconds / turn.seconds for turn in turns]),
        megabytes_read_per_token=Interval.of(
            [turn.stats.bytes_read / tokens / 1e6 for turn in turns]
        ),
        prefetched=sum(turn.stats.num_prefetched for turn in turns),
        prefetch_hits=sum(turn.stats.num_prefetch_hits for turn in turns),
        read_over_untold=read,
    )
