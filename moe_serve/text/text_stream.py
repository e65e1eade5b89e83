"""Converts the engine's token deltas to the text that a client may see."""

from __future__ import annotations

import msgspec

from moe_serve.engine.request.request import (
    DecodingRules,
    FinishReason,
    TokenDelta,
    TokenExperts,
    TokenLogprob,
)
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.text.detokenizer import make_detokenizer
from moe_serve.text.stop_strings import StopStringMatcher, StopStrings
from moe_serve.text.tokenizer import Tokenizer


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New text of one sequence. `finish_reason` is set on the last delta only.

    `token_ids`, `text_offsets` and (if requested) `logprobs` and `routed_experts` have an entry per
    token that counts; their text may be held back for a later delta. `text_offsets` are the
    positions at which each token's text begins in the whole text (before a stop string is cut from
    its end). `stop_reason` is the stop string or the id from `stop_token_ids` that ended it,
    otherwise None. `is_stopped_by_text`: the engine does not know yet, so the owner must abort the
    request there.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    text_offsets: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    routed_experts: tuple[TokenExperts, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    is_stopped_by_text: bool = False


class TextStream:
    """Detokenizes one sequence and ends it at a stop string, however the tokens are grouped.

    `stops` are `params.stop`, prepared by an owner of several sequences with the same ones.
    `kept_ids` are special tokens that stay in the text whatever the parameters say. `follows`: the
    last token of a text that this sequence continues, whose first space is then kept. It is also
    kept if a grammar applies from the first token on, because the grammar requested it. The same
    holds for special tokens within structural tags, the only ones that can occur there. `rules`
    None: those of the parameters.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        stops: StopStrings | None = None,
        kept_ids: frozenset[int] = frozenset(),
        follows: int | None = None,
        rules: DecodingRules | None = None,
    ) -> None:
        self._params = params
        constraint = (rules or DecodingRules.of(params)).constraint
        has_tags = constraint is not None and constraint.kind == "structural_tag"
        self._detokenizer = make_detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens and not has_tags,
            kept_ids=kept_ids,
            follows=follows,
            keeps_first_space=constraint is not None and not constraint.lead,
        )
        self._matcher = StopStringMatcher(
            stops or StopStrings(params.stop), includes_stop=params.include_stop_str_in_output
        )
        self._num_tokens = 0
        self._num_decoded = 0  # characters of text, shown or held back
        self.is_finished = False

    def push(self, delta: TokenDelta) -> TextDelta:
        """Returns the text that `delta` adds. Nothing may be pushed after a finished delta."""
        assert not self.is_finished, "a delta came after the sequence had finished"
        if len(delta.token_ids) == 1 and delta.finish_reason is None:
            return self._push_one(delta)
        hidden = self._is_stop_token_hidden(delta)
        num_decodable = len(delta.token_ids) - hidden
        shown: list[str] = []
        offsets: list[int] = []
        for i, token_id in enumerate(delta.token_ids):
            offsets.append(self._num_decoded)
            self._num_tokens += 1
            if i < num_decodable:
                shown.append(self._show(self._detokenizer.push(token_id)))
                if self._matcher.matched is not None:
                    return self._end_at_stop_string(delta, shown, offsets)
        if delta.finish_reason is not None:
            shown.append(self._show(self._detokenizer.flush()))
            if self._matcher.matched is not None:
                return self._end_at_stop_string(delta, shown, offsets)
            shown.append(self._matcher.flush())
            self.is_finished = True
        return TextDelta(
            text="".join(shown),
            token_ids=delta.token_ids,
            text_offsets=tuple(offsets),
            logprobs=delta.logprobs,
            routed_experts=delta.routed_experts,
            finish_reason=delta.finish_reason,
            stop_reason=self._stop_reason(delta),
        )

    def _push_one(self, delta: TokenDelta) -> TextDelta:
        """Pushes one token: `push` without the steps needed only for several tokens or the last
        one.
        """
        offsets = (self._num_decoded,)
        self._num_tokens += 1
        text = self._show(self._detokenizer.push(delta.token_ids[0]))
        if self._matcher.matched is not None:
            return self._end_at_stop_string(delta, [text], [*offsets])
        return TextDelta(
            text=text,
            token_ids=delta.token_ids,
            text_offsets=offsets,
            logprobs=delta.logprobs,
            routed_experts=delta.routed_experts,
        )

    def _show(self, text: str) -> str:
        if not text:
            return ""
        self._num_decoded += len(text)
        return self._matcher.push(text, is_armed=self._num_tokens >= self._params.min_tokens)

    def _end_at_stop_string(
        self, delta: TokenDelta, shown: list[str], offsets: list[int]
    ) -> TextDelta:
        """Ends at a stop string; tokens after the one that completed it do not count."""
        self.is_finished = True
        count, experts = len(offsets), delta.routed_experts
        return TextDelta(
            text="".join(shown),
            token_ids=delta.token_ids[:count],
            text_offsets=tuple(offsets),
            logprobs=None if delta.logprobs is None else delta.logprobs[:count],
            routed_experts=None if experts is None else experts[:count],
            finish_reason=FinishReason.STOP,
            stop_reason=self._matcher.matched,
            is_stopped_by_text=True,
        )

    def _is_stop_token_hidden(self, delta: TokenDelta) -> bool:
        """Returns whether to hide the token that ended the text: always, unless the client asked
        for it.
        """
        if delta.stop_token_id is None:
            return False
        is_asked_for = delta.stop_token_id in self._params.stop_token_ids
        return not (is_asked_for and self._params.include_stop_str_in_output)

    def _stop_reason(self, delta: TokenDelta) -> int | None:
        is_asked_for = delta.stop_token_id in self._params.stop_token_ids
        return delta.stop_token_id if is_asked_for else None
