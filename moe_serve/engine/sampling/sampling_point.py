"""The place of a token to sample: a sequence and a position in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import msgspec

from moe_serve.engine.request.request import DecodingRules
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence


class SamplingPoint(msgspec.Struct, frozen=True, gc=False):
    """A position of a sequence at which a token is sampled.

    Samplers and masks only read the answer's history: the tokens before the position. The sequence
    may also have tokens at the position or behind it; they change nothing.

    A msgspec struct, as one is made per sampled token.
    """

    sequence: Sequence
    position: int

    @property
    def params(self) -> SamplingParams:
        return self.sequence.request.params

    @property
    def rules(self) -> DecodingRules:
        return self.sequence.rules

    @property
    def is_at_end(self) -> bool:
        """True if the history is the whole sequence, the usual case."""
        return self.position == len(self.sequence.token_ids)

    @property
    def next_token(self) -> int:
        """The token at the position. It is there unless the history is the whole sequence."""
        return self.sequence.token_ids[self.position]

    @property
    def num_output_tokens(self) -> int:
        """Number of the answer's tokens in the history."""
        return self.position - self.sequence.num_prompt_tokens

    @property
    def answer(self) -> list[int]:
        """The answer's tokens in the history."""
        return self.sequence.token_ids[self.sequence.num_prompt_tokens : self.position]

    @property
    def output_counts(self) -> Mapping[int, int]:
        """The tokens of the answer in the history, and how often each occurs."""
        return self.sequence.output_counts if self.is_at_end else Counter(self.answer)

    @property
    def seen(self) -> Collection[int]:
        """The tokens of prompt and answer, each once, for a repetition penalty; else empty."""
        if self.is_at_end or not self.sequence.seen:
            return self.sequence.seen
        return dict.fromkeys(self.sequence.token_ids[: self.position])

    @property
    def can_look_ahead(self) -> bool:
        """True if tokens at later positions may be sampled in the same call, as if the tokens
        before them were certain. False if that would spoil state that the sequence keeps of
        its history."""
        params, rules = self.sequence.request.params, self.sequence.rules
        is_limited = rules.thinking_markers is not None and params.thinking_token_budget is not None
        return not (params.has_penalties or is_limited)

    @property
    def is_short(self) -> bool:
        """True if the answer is below the minimum length."""
        sequence = self.sequence
        return self.position - sequence.num_prompt_tokens < sequence.request.params.min_tokens

    @property
    def bans_end(self) -> bool:
        """True if samplers must ban end tokens. With a constraint its mask does it
        (`answer_masks`)."""
        return self.is_short and self.rules.constraint is None
