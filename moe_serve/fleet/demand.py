"""Describes the requests that a fleet must serve: their rate, and their sizes in a few buckets.

A balancer knows a prompt's length when a request arrives, and not how long its answer will be. So
buckets are ranges of prompt lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from moe_serve.bench.figures.summary import Slo
from moe_serve.bench.workload.prompt_maker import Slot
from moe_serve.errors import ConfigError

MAX_BUCKETS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Requests with prompts of at most `most_prompt` tokens, and more than the bucket before.

    `rate`: requests per second; `prompt`, `computed`, `output`: mean tokens of a prompt, of its
    part that no earlier prompt shares, and of an answer.
    """

    most_prompt: int
    rate: float
    prompt: float
    computed: float
    output: float

    @property
    def tokens(self) -> float:
        """Mean tokens of a request at its end."""
        return self.prompt + self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The requests, and the limits that a share `attainment` of them must meet."""

    slots: tuple[Slot, ...]
    seed: int
    slo: Slo
    attainment: float
    whole: Bucket
    buckets: tuple[Bucket, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(slot.prompt_tokens + slot.output_tokens for slot in self.slots)

    @property
    def span_s(self) -> float:
        """Seconds from the first to the last arrival."""
        return max(self.slots[-1].at_s, 1e-9)


def demand_of(
    slots: Sequence[Slot], seed: int, slo: Slo, attainment: float, *, shares_prefixes: bool
) -> Demand:
    """Summarises requests in the order of their arrival. Raises ConfigError if they have no
    rate.
    """
    if len(slots) < 2 or slots[-1].at_s <= 0:
        raise ConfigError(
            f"a plan needs requests that arrive over some time; got {len(slots)} within "
            f"{slots[-1].at_s if slots else 0:g} s: give --trace or --request-rate, and --requests."
        )
    if not 0 < attainment < 1:
        raise ConfigError(f"attainment must be in (0, 1), got {attainment:g}.")
    prompts = np.array([slot.prompt_tokens for slot in slots])
    outputs = np.array([slot.output_tokens for slot in slots])
    computed = prompts - (_shared(slots) if shares_prefixes else 0)
    span_s = slots[-1].at_s * len(slots) / (len(slots) - 1)

    def bucket(is_in: np.ndarray, most: int) -> Bucket:
        return Bucket(
            most_prompt=most,
            rate=float(is_in.sum()) / span_s,
            prompt=float(prompts[is_in].mean()),
            computed=float(np.maximum(computed[is_in], 1).mean()),
            output=float(outputs[is_in].mean()),
        )

    steps = np.linspace(0, 1, MAX_BUCKETS + 1)[1:]
    edges = [0, *np.unique(np.quantile(prompts, steps, method="inverted_cdf")).tolist()]
    buckets = [
        bucket((low < prompts) & (prompts <= high), int(high)) for low, high in pairwise(edges)
    ]
    return Demand(
        slots=tuple(slots),
        seed=seed,
        slo=slo,
        attainment=attainment,
        whole=bucket(np.ones(len(slots), dtype=bool), int(prompts.max())),
        buckets=tuple(buckets),
    )


def _shared(slots: Sequence[Slot]) -> np.ndarray:
    """Counts the tokens of each prompt that begin an earlier one, block by block."""
    seen: set[str] = set()
    counts = []
    for slot in slots:
        count, is_found = 0, True
        for block in slot.blocks:
            is_found = is_found and block.key in seen
            count += block.num_tokens if is_found else 0
        seen.update(block.key for block in slot.blocks)
        counts.append(count)
    return np.array(counts)
