"""A request inside the engine: its tokens, its progress and its pages."""

from __future__ import annotations

import secrets
from collections.abc import Set

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.page_key import following_keys, token_array
from moe_serve.engine.request.matcher import SequenceMatcher
from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenLogprob
from moe_serve.engine.request.standing import Standing
from moe_serve.engine.request.thought_counter import ThoughtCounter


class Sequence:
    """A request's tokens, of which the first `num_computed_tokens` are in the cache.

    Prompt chunks, decoding and recomputation after a preemption all do the same: they let
    `num_computed_tokens` catch up with `num_tokens`.

        token_ids  [ prompt ............ | generated ... ]
                   [0, num_computed) in the cache   ...num_tokens
    """

    __slots__ = (
        "_prompt",
        "awaited_key",
        "id",
        "is_detached",
        "is_plain",
        "is_proven",
        "is_running",
        "is_sound",
        "kv_window",
        "matcher",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_found_pages",
        "num_parked_layers",
        "num_parked_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_restarts",
        "num_shared_pages",
        "num_tier_loads",
        "num_tier_tokens",
        "output_counts",
        "owns_pages",
        "page_keys",
        "page_size",
        "page_table",
        "prompt_logprobs",
        "request",
        "rules",
        "seed",
        "seen",
        "standing",
        "started_at",
        "thoughts",
        "token_ids",
        "waits_since",
    )

    def __init__(self, sequence_id: int, request: GenerationRequest) -> None:
        self.id = sequence_id
        self.request = request
        self.rules = request.rules
        self.kv_window = request.params.kv_window  # None: every row sees all keys before it
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self._prompt: NDArray[np.int32] | None = None  # see `tokens`
        self.num_computed_tokens = 0
        self.num_parked_tokens = 0  # next tokens that have passed some layers; 0: none has
        self.num_parked_layers = 0  # the number of these layers
        self.num_preemptions = 0  # because pages ran out; kept by the scheduler
        self.num_restarts = 0  # preemptions, and moves away from a lost rank
        self.is_running = False  # kept by the scheduler
        self.started_at: float | None = None  # when it first joined a step, on the engine's clock
        self.standing: Standing | None = None  # with service tiers only; kept by the scheduler
        self.waits_since = request.arrival_time  # or when it was last preempted, same clock
        self.is_proven = True  # nothing computed since the last valid sampled token
        self.is_sound = True  # no NaN or infinity was found in its pages
        self.is_detached = False  # it has hidden pages, so what it computes is not shared
        self.owns_pages = False  # the pages behind those are its own; kept by PrefixSharing
        self.page_size = 0  # of the cache that has its pages; kept by the scheduler
        self.page_table: list[int] = []
        self.num_shared_pages = 0  # at the table's start, visible to other sequences
        self.num_found_pages = 0  # shared pages that it found when it started
        self.num_cached_tokens = 0  # prompt tokens that came from the cache
        self.num_tier_loads = 0  # times that it waited for pages of a tier, since it was queued
        self.num_tier_tokens = 0  # tokens of pages that were loaded for it
        self.page_keys: list[bytes] = []  # root key and keys of full pages; empty: no cache
        self.awaited_key: bytes | None = None  # key of a page that another sequence computes
        self.output_counts: dict[int, int] = {}
        has_repetition = request.params.repetition_penalty != 1.0
        self.seen = dict.fromkeys(self.token_ids if has_repetition else ())  # an ordered set
        self.prompt_logprobs: list[TokenLogprob] = []
        self.matcher: SequenceMatcher | None = None  # for its constraint, where it is sampled
        self.thoughts: ThoughtCounter | None = None  # for its thinking budget, likewise
        # the next token is that with the largest unchanged logit; no log probabilities
        self.is_plain = request.params.is_plain and self.rules.is_plain
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
        """True if prompt log probabilities are still to be returned. They go with the first token,
        so a later recomputation needs none."""
        return self.rules.prompt_logprobs is not None and self.num_output_tokens == 0

    def take_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Returns the prompt's log probabilities once, None for its first token; None if not
        requested."""
        if not self.wants_prompt_logprobs:
            return None
        taken = (None, *self.prompt_logprobs)
        self.prompt_logprobs = []
        return taken

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def num_missing_pages(self, num_tokens: int) -> int:
        """Returns the number of pages to add so that the table covers `num_tokens` tokens."""
        return -(-num_tokens // self.page_size) - len(self.page_table)

    @property
    def held_pages(self) -> list[int]:
        """Its pages, without those behind a window that it gave back."""
        return [page for page in self.page_table if page]

    @property
    def num_full_pages(self) -> int:
        """Number of completely computed pages, which are no longer written to."""
        return self.num_computed_tokens // self.page_size

    def num_unread(self, count: int) -> int:
        """Returns how many of the next `count` tokens to compute are the prompt's."""
        return max(0, min(count, self.num_prompt_tokens - self.num_computed_tokens))

    @property
    def can_share(self) -> bool:
        return bool(self.page_keys) and self.is_sound and not self.is_detached

    def hidden_pages(self, position: int) -> range:
        """Returns the indices of the pages that the row at a position does not see. The rows of the
        prompt see all."""
        if self.kv_window is None or position < self.num_prompt_tokens:
            return range(0)
        return self.kv_window.hidden_pages(position, self.page_size)

    def num_plain(self, num_tokens: int) -> int:
        """Returns how many of the first tokens see all keys before them. Only these are shared."""
        if self.kv_window is None:
            return num_tokens
        least = max(self.num_prompt_tokens, self.kv_window.first_hiding(self.page_size))
        return min(num_tokens, least)

    @property
    def num_joint_tokens(self) -> int:
        """Number of the next tokens that one step may compute: those that see the same pages."""
        pending, start = self.num_pending_tokens, self.num_computed_tokens
        if self.kv_window is None or pending <= 1:
            return pending
        plain = self.num_plain(self.num_tokens) - start
        return min(pending, plain if plain > 0 else self.kv_window.run(start, self.page_size))

    @property
    def num_dropped_tokens(self) -> int:
        """Number of tokens that the row computed last did not see."""
        return len(self.hidden_pages(self.num_computed_tokens - 1)) * self.page_size

    def extend_keys(self, num_pages: int) -> None:
        """Extends `page_keys` to the first `num_pages` pages, which must be full of tokens."""
        known = len(self.page_keys) - 1
        if num_pages > known:
            size = self.page_size
            tokens = self.tokens(known * size, num_pages * size)
            self.page_keys += following_keys(self.page_keys[-1], tokens, size)

    def tokens(self, start: int, end: int) -> NDArray[np.int32]:
        """Returns the tokens from index `start` to `end`, to be read only. Those of a prompt are
        needed several times, so the prompt is converted once."""
        if end > self.num_prompt_tokens:
            return token_array(self.token_ids[start:end])
        if self._prompt is None:
            self._prompt = token_array(self.token_ids[: self.num_prompt_tokens])
        return self._prompt[start:end]

    def pending(self, count: int) -> NDArray[np.int64]:
        """Returns the next `count` tokens to compute."""
        start = self.num_computed_tokens
        if count == 1:
            return np.array((self.token_ids[start],), dtype=np.int64)
        return self.tokens(start, start + count).astype(np.int64)

    def park(self, num_tokens: int, num_layers: int) -> None:
        """Records that the next tokens have passed the first layers; (0, 0): no layer."""
        self.num_parked_tokens, self.num_parked_layers = num_tokens, num_layers
        self.is_proven = self.is_proven and not num_tokens  # its pages have new values

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1
        if self.request.params.repetition_penalty != 1.0:
            self.seen[token_id] = None

    def truncate(self, num_tokens: int) -> None:
        """Removes the answer's tokens from index `num_tokens` on, as if they had never been there.
        Their pages must have been truncated before (`Scheduler.truncate`)."""
        least = max(self.num_prompt_tokens, self.num_computed_tokens)
        assert least <= num_tokens <= self.num_tokens, f"{num_tokens} not in {least}.."
        for token in self.token_ids[num_tokens:]:
            self.output_counts[token] -= 1
            if not self.output_counts[token]:
                del self.output_counts[token]
        del self.token_ids[num_tokens:]
        if self.page_keys:
            del self.page_keys[1 + num_tokens // self.page_size :]
        if self.seen:
            self.seen = dict.fromkeys(self.token_ids)
        if self.matcher is not None:
            self.matcher.go_back(self.num_output_tokens)
        if self.thoughts is not None:
            self.thoughts.go_back(num_tokens)

    def restart(self) -> None:
        """Forgets what was computed, as the pages are gone. The tokens stay."""
        self.num_computed_tokens = 0
        self.park(0, 0)
        self.is_proven = True
        self.is_detached = self.owns_pages = False
        self.num_shared_pages = self.num_found_pages = self.num_tier_loads = 0
        self.num_restarts += 1
        self.prompt_logprobs = []

    def leave_engine(self) -> None:
        """Restarts the sequence without any state of the engine that it ran on."""
        self.restart()
        self.page_table, self.page_keys, self.awaited_key = [], [], None
        self.is_running, self.is_sound = False, True


Schedule = dict[int, tuple[Sequence, int]]  # sequence id -> (sequence, tokens to compute)


def may_draft(sequence: Sequence, count: int) -> bool:
    """Returns whether a sequence gets its next token from one row, and the client lets it draft.
    `count` is the number of tokens that it computes in the step."""
    is_decoding = count == 1 and sequence.num_pending_tokens == 1 and sequence.num_output_tokens > 0
    return is_decoding and sequence.request.drafts


def sequences_of(schedule: Schedule) -> dict[int, Sequence]:
    """Returns the scheduled sequences by their ids."""
    return {key: sequence for key, (sequence, _) in schedule.items()}


class StopRule:
    """Decides when a sequence ends, from the model's end tokens and its maximum length."""

    def __init__(self, eos_token_ids: frozenset[int], max_model_len: int) -> None:
        self._eos, self.max_model_len = eos_token_ids, max_model_len

    def reason(
        self, sequence: Sequence, token_id: int, num_output_tokens: int
    ) -> FinishReason | None:
        """Returns why the sequence ends with `token_id`, the last of `num_output_tokens` in its
        answer; None if it continues."""
        params = sequence.request.params
        is_eos = token_id in self._eos
        if is_eos and sequence.rules.constraint is not None:
            return FinishReason.STOP  # its mask has applied min_tokens and ignore_eos
        is_stop = (is_eos and not params.ignore_eos) or token_id in params.stop_token_ids
        if is_stop and num_output_tokens >= params.min_tokens:
            return FinishReason.STOP
        is_last = self.is_last(sequence, num_output_tokens)
        return FinishReason.LENGTH if is_last else None

    def num_left(self, sequence: Sequence) -> int:
        """Returns the number of tokens after which the answer has its maximum length."""
        left = self.max_model_len - sequence.num_tokens
        max_tokens = sequence.rules.max_tokens
        return left if max_tokens is None else min(left, max_tokens - sequence.num_output_tokens)

    def ends(self, sequence: Sequence) -> Set[int]:
        """Returns the tokens that end the answer once it has its minimum length."""
        params = sequence.request.params
        if params.ignore_eos and sequence.rules.constraint is None:
            return frozenset(params.stop_token_ids)
        return self._eos.union(params.stop_token_ids)

    def is_last(self, sequence: Sequence, num_output_tokens: int) -> bool:
        """Returns whether an answer of `num_output_tokens` has its maximum length."""
        max_tokens = sequence.rules.max_tokens
        is_full = sequence.num_prompt_tokens + num_output_tokens >= self.max_model_len
        return is_full or (max_tokens is not None and num_output_tokens >= max_tokens)
