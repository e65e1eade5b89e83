"""Describes which requests are sent and when: lengths or a trace, prompts, and arrivals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import count

import numpy as np

from moe_serve.bench.workload.prompt_maker import Block, FilePrompt, Slot
from moe_serve.bench.workload.tier_mix import TierMix
from moe_serve.bench.workload.trace_rows import Trace, TraceCut
from moe_serve.errors import BenchError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A range from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, flag: str, text: str) -> Lengths:
        """Parses "64" or "32:512"."""
        low, colon, high = text.partition(":")
        if not (low.isdecimal() and (high.isdecimal() if colon else True)):
            raise BenchError(f"{flag} must be N or LOW:HIGH, in tokens; got {text!r}.")
        lengths = cls(low=int(low), high=int(high) if colon else int(low))
        if not 1 <= lengths.low <= lengths.high:
            raise BenchError(f"{flag} must have 1 <= LOW <= HIGH, got {text!r}.")
        return lengths

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class GammaArrivals:
    """Draws arrivals at `rate` requests per second, with gamma-distributed gaps.

    `burstiness` is the square of the coefficient of variation of the gaps, 1 / shape: 1 is Poisson,
    larger values give bursts, smaller ones are more even, and 0 is a metronome. With a `swing` the
    rate rises and falls once in every period, beginning with the least:

        rate(t) = rate (1 - swing cos(2 pi t / period))
    """

    rate: float
    burstiness: float = 1.0
    swing: float = 0.0
    period_s: float = 86400.0

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Yields seconds since the start; the first request is due after the first gap."""
        at = 0.0
        mean = 1.0 / self.rate
        while True:
            if self.burstiness == 0:
                at += mean
            else:
                at += float(rng.gamma(1.0 / self.burstiness, mean * self.burstiness))
            yield self._swung(at) if self.swing else at

    def _swung(self, at: float) -> float:
        """Returns when as many requests have come as at a constant rate at time `at`.

        That is Kepler's equation, t - swing sin t = at with a period of 2 pi.
        """
        turn = 2 * math.pi / self.period_s
        wanted, t = at * turn, at * turn
        for _ in range(100):
            error = t - self.swing * math.sin(t) - wanted
            if abs(error) < 1e-12 * max(1.0, t):
                break
            step = error / (1 - self.swing * math.cos(t))
            t -= max(-1.0, min(step, 1.0))
        return t / turn


_TIMES, _LENGTHS, _TIERS = 3, 4, 5  # streams of random numbers; 1 and 2 are the prompts'


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Shared prefixes: each prompt begins with one of `num_prefixes` texts of `num_tokens`."""

    num_tokens: int = 0
    num_prefixes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload; the same seed gives the same slots. Exactly one of `concurrency`, `arrivals` and
    the trace's own times applies.

    It ends after `num_requests`, with the trace, or after `duration_s`, whichever comes first.
    """

    seed: int
    concurrency: int | None = None  # a closed loop
    arrivals: GammaArrivals | None = None  # an open loop
    trace: Trace | None = None  # lengths, and also the times if neither of the above is given
    cut: TraceCut | None = None  # changes already made to the trace
    files: tuple[FilePrompt, ...] = ()
    source: str | None = None  # the name of the trace's file or the prompts'
    prompt_tokens: Lengths = field(default_factory=lambda: Lengths(low=512, high=512))
    output_tokens: Lengths = field(default_factory=lambda: Lengths(low=64, high=64))
    prefixes: SharedPrefixes = field(default_factory=SharedPrefixes)
    num_requests: int | None = None
    duration_s: float | None = None
    tiers: TierMix | None = None  # None: requests have the tiers of the trace, if any

    @property
    def is_open(self) -> bool:
        return self.concurrency is None

    @property
    def mode(self) -> str:
        """Describes how requests arrive, for tables."""
        if self.concurrency is not None:
            return f"closed loop, {self.concurrency} at once"
        if self.arrivals is None:
            return "open loop, times of the trace"
        burstiness = self.arrivals.burstiness
        kind = "Poisson" if burstiness == 1 else f"gamma, burstiness {burstiness:g}"
        text = f"open loop, {self.arrivals.rate:g} requests/s ({kind})"
        if not self.arrivals.swing:
            return text
        period = f"{self.arrivals.period_s:g} s"
        return f"{text[:-1]}, {self.arrivals.swing:.0%} more and less in turn over {period})"

    @property
    def planned(self) -> int | None:
        """The largest number of requests; None if only `duration_s` ends the run."""
        if self.trace is None or self.trace_repeats:
            return self.num_requests
        return min(len(self.trace.rows), self.num_requests or len(self.trace.rows))

    @property
    def trace_repeats(self) -> bool:
        """True if the trace supplies only lengths, which may be used repeatedly."""
        return self.trace is not None and (self.concurrency, self.arrivals) != (None, None)

    @property
    def shares_prompts(self) -> bool:
        """True if prompts share prefixes that a prefix cache can find."""
        rows = () if self.trace is None else self.trace.rows
        may_share = any(row.blocks or row.prompt is not None for row in rows)
        return may_share or self.prefixes.num_tokens > 0 or bool(self.files)

    def facts(self) -> dict[str, object]:
        """Returns the settings as JSON types, for a report."""
        names = [item.name for item in fields(TraceCut) if item.name != "max_requests"]
        cut = {f"trace_{name}": self.cut and getattr(self.cut, name) for name in names}
        return {
            "mode": self.mode,
            "is_open": self.is_open,
            "seed": self.seed,
            "concurrency": self.concurrency,
            "rate": self.arrivals and self.arrivals.rate,
            "burstiness": self.arrivals and self.arrivals.burstiness,
            "swing": self.arrivals and self.arrivals.swing,
            "period_s": self.arrivals and self.arrivals.period_s,
            "source": self.source,
            **cut,
            "num_trace_rows": None if self.trace is None else len(self.trace.rows),
            "num_file_prompts": len(self.files) or None,
            "prompt_tokens": None if self.source else str(self.prompt_tokens),
            "output_tokens": None if self.cut else str(self.output_tokens),
            "prefix_tokens": self.prefixes.num_tokens,
            "num_prefixes": self.prefixes.num_prefixes,
            "num_requests": self.num_requests,
            "duration_s": self.duration_s,
            "tiers": self.tiers and self.tiers.facts(),
        }

    def slots(self) -> Iterator[Slot]:
        times = self._times()
        rng = np.random.default_rng([self.seed, _LENGTHS])
        tier_rng = np.random.default_rng([self.seed, _TIERS])
        for index in count():
            if self.planned is not None and index >= self.planned:
                return
            slot = self._slot(index, rng)
            at_s = next(times) if times is not None else slot.at_s
            if self.is_open and self.duration_s is not None and at_s >= self.duration_s:
                return
            yield replace(slot, at_s=at_s, tier=self._tier(slot.tier, float(tier_rng.random())))

    def _tier(self, own: str, place: float) -> str:
        if self.tiers is None:
            return own
        return (self.tiers.named(own) if own else self.tiers.at(place)).name

    def _times(self) -> Iterator[float] | None:
        if self.arrivals is None:
            return None
        return self.arrivals.times(np.random.default_rng([self.seed, _TIMES]))

    def _slot(self, index: int, rng: np.random.Generator) -> Slot:
        if self.trace is not None:
            row = self.trace.rows[index % len(self.trace.rows)]
            return Slot(
                index=index,
                at_s=row.at_s,
                prompt_tokens=row.prompt_tokens,
                output_tokens=row.output_tokens,
                blocks=row.blocks,
                prompt=row.prompt,
                tier=row.tier,
                tenant=row.tenant,
                session=row.session,
            )
        num_output = self.output_tokens.draw(rng)
        if self.files:
            line = self.files[index % len(self.files)]
            return Slot(
                index=index,
                at_s=0.0,
                prompt_tokens=0,
                output_tokens=line.output_tokens or num_output,
                prompt=line.prompt,
            )
        num_own = self.prompt_tokens.draw(rng)
        shared = self.prefixes.num_tokens
        which = int(rng.integers(self.prefixes.num_prefixes))
        return Slot(
            index=index,
            at_s=0.0,
            prompt_tokens=num_own + shared,
            output_tokens=num_output,
            blocks=(Block(key=f"shared {which}", num_tokens=shared),) if shared else (),
        )
