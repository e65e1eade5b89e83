"""Turns the facts known about a request at its arrival into a row of numbers.

F features: its sizes and settings, the past answers to its tenant and to the beginning of its
prompt, the hashed last tokens of the prompt, and optionally the prompt's meaning (the mean of its
tokens' embeddings, say).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_serve.engine.service.lengths.length_bins import Floats
from moe_serve.engine.service.lengths.past_lengths import PastLengths

NUM_LAST, NUM_BUCKETS = 32, 32
BEGINNING = 64  # prompt tokens that tell applications apart: their system prompts differ


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """A request as its length is predicted. `content`: numbers that describe the prompt's meaning,
    equally many for all requests; empty: none."""

    prompt_ids: Sequence[int]
    max_tokens: int | None = None
    temperature: float = 1.0
    tenant: str = ""
    has_tools: bool = False
    has_grammar: bool = False
    has_thinking: bool = False
    has_stop: bool = False  # strings or tokens that end the answer
    num_turns: int = 1
    content: tuple[float, ...] = ()

    @property
    def beginning(self) -> str:
        """A key of the first tokens of the prompt."""
        ids = np.asarray(self.prompt_ids[:BEGINNING], dtype="<u4")
        return hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()


class FeatureMaker:
    """Makes rows from requests and from the past of tenants and beginnings."""

    def __init__(self, tenants: PastLengths, beginnings: PastLengths) -> None:
        self._tenants, self._beginnings = tenants, beginnings

    def row(self, facts: RequestFacts) -> Floats:
        most = math.inf if facts.max_tokens is None else float(facts.max_tokens)
        first = [
            math.log1p(len(facts.prompt_ids)),
            min(20.0, math.log1p(most)),
            facts.temperature,
            float(facts.has_tools),
            float(facts.has_grammar),
            float(facts.has_thinking),
            float(facts.has_stop),
            float(facts.num_turns),
            *_past(self._tenants, facts.tenant),
            *_past(self._beginnings, facts.beginning),
        ]
        last_N = np.asarray(facts.prompt_ids[-NUM_LAST:], dtype=np.uint64)
        return np.concatenate(
            [np.array(first), _buckets(last_N), np.array(facts.content, dtype=np.float64)]
        )


def _past(past: PastLengths, key: str) -> tuple[float, float, float]:
    if not key:
        return (-1.0, -1.0, 0.0)
    found = past.distribution(key)
    middle, high = found.quantile(0.5), found.quantile(0.9)
    return math.log1p(middle), math.log1p(high), math.log1p(past.count(key))


def _buckets(last_N: np.ndarray) -> Floats:
    """Counts tokens by a hash of their ids. The last four count most: they are where an answer
    begins."""
    hashed_N = (last_N * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(59)  # 5 bits
    weights_N = np.ones(len(last_N))
    weights_N[-4:] = 4.0
    counts = np.bincount(hashed_N.astype(np.int64), weights_N, minlength=NUM_BUCKETS)
    return np.asarray(counts, dtype=np.float64)
