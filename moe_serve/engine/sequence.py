"""A request inside the engine: its tokens, how many of them are computed, and its pages."""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from moe_serve.config import PAGE_SIZE
from moe_serve.engine.request import GenerationRequest, TokenLogprob


class Sequence:
    """`num_computed_tokens` runs after `num_tokens`: prompt chunks, decode and recomputation after
    a preemption are all the same catching up.

        token_ids  [ prompt ............ | generated ... ]
                   [0, num_computed) in the cache   ...num_tokens
    """

    __slots__ = (
        "id",
        "is_proven",
        "is_running",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "output_counts",
        "page_table",
        "prompt_logprobs",
        "request",
        "seed",
        "seen",
        "token_ids",
    )

    def __init__(self, sequence_id: int, request: GenerationRequest) -> None:
        self.id = sequence_id
        self.request = request
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.is_running = False  # kept by the scheduler
        self.is_proven = True  # nothing computed since the last token that was sampled and valid
        self.page_table: list[int] = []
        self.output_counts: dict[int, int] = {}
        has_repetition = request.params.repetition_penalty != 1.0
        self.seen = dict.fromkeys(self.token_ids if has_repetition else ())  # an ordered set
        self.prompt_logprobs: list[TokenLogprob] = []
        seed = request.params.seed
        self.seed = secrets.randbits(63) if seed is None else seed

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Until the first token is out: they go with it, and a recomputation needs none."""
        return self.request.params.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def num_missing_pages(self, num_tokens: int) -> int:
        """Pages to add so that the table covers `num_tokens` tokens."""
        return -(-num_tokens // PAGE_SIZE) - len(self.page_table)

    def pending(self, count: int) -> NDArray[np.int64]:
        """The next `count` tokens to compute."""
        start = self.num_computed_tokens
        return np.array(self.token_ids[start : start + count], dtype=np.int64)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1
        if self.request.params.repetition_penalty != 1.0:
            self.seen[token_id] = None

    def restart(self) -> None:
        """Forget what was computed (the pages are gone); the tokens stay."""
        self.num_computed_tokens = 0
        self.is_proven = True
        self.num_preemptions += 1
        self.prompt_logprobs = []
