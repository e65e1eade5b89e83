"""The measurements of one engine, and the comparison of moe-serve with one peer, from the turns
that they took together, and with its targets.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One engine in one duel. `error` is the reason if it could not finish; the other fields are
    then partial.
    """

    engine: str
    load_s: float = 0.0  # from the start of the process until it can take work
    peak_bytes: int = 0  # largest resident size, summed over its processes
    rest_bytes: int = 0  # proportional share of memory after the work
    cache_bytes: int | None = None  # of its KV cache, if it says
    versions: dict[str, str] = field(default_factory=dict)
    samples_s: dict[str, list[float]] = field(default_factory=dict)  # kind of work -> seconds
    answers: list[list[int]] = field(default_factory=list)  # the batch's, in the first timed round
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures from medians.

    The time of decoding alone is that of a long answer minus that of a one-token answer.
    """

    ttft_s: float  # one prompt of `single_prompt` tokens, alone
    single_decode_tok_s: float
    batch_total_tok_s: float  # all answers' tokens over the whole time, prompts included
    batch_decode_tok_s: float
    prefill_tok_s: float
    load_s: float
    peak_gib: float
    rest_gib: float


def figures_of(results: Sequence[Result], work: Work) -> Figures | None:
    """Computes an engine's figures over all its finished duels; None if no duel finished."""
    done = [result for result in results if result.error is None]
    if not done:
        return None

    def seconds(kind: str) -> float:
        return statistics.median([s for result in done for s in result.samples_s[kind]])

    ttft, batch = seconds("ttft"), seconds("batch")
    batch_more = work.batch_size * (work.batch_output - 1)
    return Figures(
        ttft_s=ttft,
        single_decode_tok_s=_rate(work.single_output - 1, seconds("single") - ttft),
        batch_total_tok_s=_rate(work.batch_size * work.batch_output, batch),
        batch_decode_tok_s=_rate(batch_more, batch - seconds("batch_first")),
        prefill_tok_s=_rate(work.prefill_prompt, seconds("prefill")),
        load_s=statistics.median(result.load_s for result in done),
        peak_gib=max(result.peak_bytes for result in done) / 2**30,
        rest_gib=max(result.rest_bytes for result in done) / 2**30,
    )


def _rate(num_tokens: int, seconds: float) -> float:
    """Returns the rate, or 0 if the work is too small compared with the noise of the clock."""
    return num_tokens / seconds if seconds > 0 else 0.0


LESS_IS_BETTER = frozenset({"ttft_s", "load_s", "peak_gib", "rest_gib"})
MIN_SINGLE_RATIO = 1.3  # over llama.cpp, decoding one stream
MIN_BATCH_RATIO = 1.25  # over the best peer, answers to many prompts at once
MIN_PREFILL_RATIO = 1.05  # over the best peer
MAX_MEMORY_RATIO = 1.25  # of the checkpoint's bytes, the cache on top
MAX_LOAD_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Figures of two engines that both finished; `own` has moe-serve's figures in this duel
    only.
    """

    peer: str
    own: Figures
    theirs: Figures

    def ratio(self, key: str) -> float | None:
        """Returns a ratio above 1 if moe-serve is better; None if a figure could not be
        measured.
        """
        own, theirs = float(getattr(self.own, key)), float(getattr(self.theirs, key))
        if not own or not theirs:
            return None
        return theirs / own if key in LESS_IS_BETTER else own / theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A target of moe-serve, and whether it was met; None if it was not measured."""

    what: str
    wanted: str
    measured: str
    is_met: bool | None


def bars_of(
    own: Figures | None,
    comparisons: Sequence[Comparison],
    checkpoint_bytes: int,
    cache_bytes: int,
) -> list[Bar]:
    """Returns the targets; the best peer is the one with the smallest ratio."""
    llama = [c for c in comparisons if c.peer.startswith("llama.cpp")]
    return [
        _ratio_bar("one stream", "single_decode_tok_s", llama, MIN_SINGLE_RATIO),
        _ratio_bar("many at once", "batch_total_tok_s", comparisons, MIN_BATCH_RATIO),
        _ratio_bar("prefill", "prefill_tok_s", comparisons, MIN_PREFILL_RATIO),
        _cost_bar(
            "peak memory (GiB)",
            own.peak_gib if own else None,
            (MAX_MEMORY_RATIO * checkpoint_bytes + cache_bytes) / 2**30,
        ),
        _cost_bar("load (s)", own.load_s if own else None, MAX_LOAD_S),
    ]


def _ratio_bar(what: str, key: str, comparisons: Sequence[Comparison], least: float) -> Bar:
    ratios = [(ratio, c.peer) for c in comparisons if (ratio := c.ratio(key)) is not None]
    wanted = f">= {least:.2f}x"
    if not ratios:
        return Bar(what=what, wanted=wanted, measured="", is_met=None)
    ratio, peer = min(ratios)
    return Bar(what=what, wanted=wanted, measured=f"{ratio:.2f}x of {peer}", is_met=ratio >= least)


def _cost_bar(what: str, measured: float | None, most: float) -> Bar:
    return Bar(
        what=what,
        wanted=f"<= {most:.2f}",
        measured="" if measured is None else f"{measured:.2f}",
        is_met=None if measured is None else measured <= most,
    )
