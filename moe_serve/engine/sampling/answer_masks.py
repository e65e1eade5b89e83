"""Computes the tokens that may be taken at the points of a step.

Masks combine constraints, allowed tokens, bad words, and the end of reasoning whose budget is
spent.

C rows with a mask, W words of 32 tokens each (on a little-endian machine).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe_kernels.interface.token_sampler import TokenMasks, num_words
from moe_serve.engine.request.draft_counts import MAX_DRAFT
from moe_serve.engine.request.matcher import SequenceMatcher
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.thought_counter import ThoughtCounter
from moe_serve.engine.sampling.grammar.grammars import Grammars
from moe_serve.engine.sampling.sampler import Sampled
from moe_serve.engine.sampling.sampling_point import SamplingPoint
from moe_serve.errors import InvalidGrammarError

_NOTHING_LEFT = "its parameters together allow no token here"


@dataclass(frozen=True, slots=True)
class MaskCost:
    """The cost of a mask. `cpu_s` is the grammar's processor time, which does not depend on the
    load of the machine; `wall_s` is the time that neighbours waited."""

    cpu_s: float
    wall_s: float

    def __add__(self, other: MaskCost) -> MaskCost:
        return MaskCost(self.cpu_s + other.cpu_s, self.wall_s + other.wall_s)


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """The masks of a step. `masks` is None if no row is restricted.

    `failures` maps rows to the reason why they can take no token. `costs` maps the first row of
    each sequence that follows a grammar to the cost of all its masks.
    """

    masks: TokenMasks | None = None
    failures: dict[int, str] = field(default_factory=dict)
    costs: dict[int, MaskCost] = field(default_factory=dict)


class AnswerMasks:
    """Makes masks for one model. A point's mask depends on its own history and request only."""

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], grammars: Grammars | None = None
    ) -> None:
        self._vocab_size, self._grammars, self._eos = vocab_size, grammars, sorted(eos_token_ids)
        self._any_W = _bits(range(vocab_size), num_words(vocab_size))

    def of(self, points: Rows[SamplingPoint]) -> MaskedRows:
        """Returns one mask for each restricted row."""
        rows = [row for row, point in enumerate(points) if _is_masked(point)]
        if not rows:
            return MaskedRows()
        bits_CW = np.empty((len(rows), len(self._any_W)), np.uint32)
        failures: dict[int, str] = {}
        costs: dict[int, MaskCost] = {}
        start = 0
        while start < len(rows):
            sequence, end = points[rows[start]].sequence, start + 1
            while end < len(rows) and points[rows[end]].sequence is sequence:
                end += 1
            cpu, clock = time.thread_time(), time.perf_counter()
            self._fill_run(points, rows[start:end], bits_CW[start:end], failures)
            if sequence.rules.constraint is not None:
                costs[rows[start]] = MaskCost(time.thread_time() - cpu, time.perf_counter() - clock)
            start = end
        return MaskedRows(TokenMasks(np.array(rows, np.int64), bits_CW), failures, costs)

    def forced(
        self, runs: Mapping[int, Rows[Sampled]], sequences: Mapping[int, Sequence]
    ) -> dict[int, tuple[int, ...]]:
        """Returns what grammars force behind the tokens just sampled, by sequence id. These tokens
        are drafts: the model may spell the same text otherwise."""
        found: dict[int, tuple[int, ...]] = {}
        for key, sequence in sequences.items():
            matcher = sequence.matcher
            if matcher is None or key not in runs:
                continue
            run = runs[key]
            if not run[-1].is_valid or run[-1].token_id in self._eos:
                continue
            answer = sequence.token_ids[sequence.num_prompt_tokens :]
            tokens = matcher.forced([*answer, *(s.token_id for s in run)], MAX_DRAFT)
            if tokens:
                found[key] = tokens
        return found

    def _fill_run(
        self,
        points: Rows[SamplingPoint],
        rows: list[int],
        bits_CW: NDArray[np.uint32],
        failures: dict[int, str],
    ) -> None:
        """Fills the masks of one sequence's rows. If the mask of a row bans the drafted token
        behind it, the later rows will not count, so their masks do not matter.
        """
        is_void = False
        for bits_W, row in zip(bits_CW, rows, strict=True):
            if is_void:
                bits_W[:] = self._any_W
                continue
            point = points[row]
            why = self._fill(point, bits_W)
            if why is not None:
                failures[row] = why
            is_void = why is not None or not (point.is_at_end or _allows(bits_W, point.next_token))

    def _fill(self, point: SamplingPoint, bits_W: NDArray[np.uint32]) -> str | None:
        """Fills the mask of one row. Returns the reason if no token is allowed."""
        params, thoughts = point.params, point.sequence.thoughts
        is_constrained = point.rules.constraint is not None
        bits_W[:] = 0 if is_constrained else self._any_W
        if is_constrained:
            try:
                why = self._matcher(point.sequence).fill(point.answer, bits_W)
            except InvalidGrammarError as error:
                why = str(error)
            if why is not None or self._is_final(point):
                return why
            if not _without(bits_W, self._eos).any():
                return None  # the answer is complete: only end tokens are left
        if params.allowed_token_ids:
            bits_W &= _bits(params.allowed_token_ids, len(bits_W))
        # A tokenizer may have tokens that the model has no logits for.
        banned = [token for token in _bad_tokens(point) if token < self._vocab_size]
        if point.is_short:
            banned += [*self._eos, *params.stop_token_ids]
        elif params.ignore_eos and is_constrained:
            banned += self._eos
        bits_W[:] = _without(bits_W, banned)
        if thoughts is not None:
            thoughts.read(point.sequence.token_ids, point.position)  # unless it is there already
            bits_W[:] = _heeding(bits_W, thoughts)
        return None if bits_W.any() else _NOTHING_LEFT

    def _is_final(self, point: SamplingPoint) -> bool:
        """Returns whether the mask of a row's grammar is the mask of the row, the usual case."""
        params, sequence = point.params, point.sequence
        has_rules = params.allowed_token_ids or point.rules.bad_word_ids or params.ignore_eos
        return not (has_rules or sequence.thoughts is not None or point.is_short)

    def _matcher(self, sequence: Sequence) -> SequenceMatcher:
        """Returns the sequence's matcher, made on first use."""
        if sequence.matcher is None:
            constraint = sequence.rules.constraint
            assert constraint is not None, f"{sequence.request.request_id} has no constraint"
            if self._grammars is None:
                raise InvalidGrammarError("This engine has no support for grammars.")
            sequence.matcher = SequenceMatcher(self._grammars.matcher_within(constraint))
        return sequence.matcher


def _is_masked(point: SamplingPoint) -> bool:
    """Returns whether a row needs a mask. Within its thinking budget and after the reasoning it
    does not."""
    rules, allowed = point.rules, point.params.allowed_token_ids
    is_thinking_free = _is_thinking_free(point)
    is_bound = rules.constraint or allowed or rules.bad_word_ids
    return bool(is_bound or not is_thinking_free)


def _is_thinking_free(point: SamplingPoint) -> bool:
    """Reads the history and returns whether the thinking budget leaves the next token free."""
    sequence = point.sequence
    markers, budget = point.rules.thinking_markers, point.params.thinking_token_budget
    if markers is None or budget is None:
        return True
    if sequence.thoughts is None:
        sequence.thoughts = ThoughtCounter(markers, budget, sequence.num_prompt_tokens)
    sequence.thoughts.read(sequence.token_ids, point.position)
    return sequence.thoughts.is_free


def _heeding(bits_W: NDArray[np.uint32], thoughts: ThoughtCounter) -> NDArray[np.uint32]:
    """Applies the thinking limit as soon as the other rules allow it. For example an end of
    reasoning waits until a grammar has a complete character."""
    if thoughts.forced is not None:
        only_W = bits_W & _bits([thoughts.forced], len(bits_W))
        return only_W if only_W.any() else bits_W
    if thoughts.barred is not None:
        others_W = _without(bits_W, [thoughts.barred])
        return others_W if others_W.any() else bits_W
    return bits_W


def _bad_tokens(point: SamplingPoint) -> Iterable[int]:
    """Yields tokens that would complete a bad word in the answer."""
    num_prompt, tokens = point.sequence.num_prompt_tokens, point.sequence.token_ids
    for word in point.rules.bad_word_ids:
        start = point.position - len(word) + 1
        if start >= num_prompt and tuple(tokens[start : point.position]) == word[:-1]:
            yield word[-1]


def _allows(bits_W: NDArray[np.uint32], token: int) -> bool:
    return bool(bits_W[token >> 5] >> np.uint32(token & 31) & 1)


def _bits(tokens: Iterable[int], num: int) -> NDArray[np.uint32]:
    is_there = np.zeros(num * 32, np.bool_)
    is_there[np.fromiter(tokens, np.int64)] = True
    bits_W: NDArray[np.uint32] = np.packbits(is_there, bitorder="little").view(np.uint32)
    return bits_W


def _without(bits_W: NDArray[np.uint32], tokens: Iterable[int]) -> NDArray[np.uint32]:
    rest: NDArray[np.uint32] = bits_W.copy()
    for token in tokens:
        rest[token >> 5] &= ~np.uint32(1 << (token & 31))
    return rest
