"""When a sequence is at its end, as far as tokens say."""

from __future__ import annotations

from moe_serve.engine.execute.step_executor import RowFailure
from moe_serve.engine.request.request import FinishReason, TokenDelta
from moe_serve.engine.request.sequence import Sequence

NO_TOKEN = RowFailure("the step returned no token for this request")  # only a faulty rank does this
NAN = RowFailure("the model produced NaN for this request")
TOO_DEAR = RowFailure(
    "its grammar costs too much to follow while other requests wait for a seat; use one that is "
    "less ambiguous, or try again later",
    is_of_request=True,
)


class Ends:
    """Of one model: which tokens end a text, and how long it may be."""

    def __init__(self, eos_token_ids: frozenset[int], max_model_len: int) -> None:
        self._eos, self._max_model_len = eos_token_ids, max_model_len

    def reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Why it ends with this token, the last that it has; None: it goes on."""
        params = sequence.request.params
        is_eos = token_id in self._eos
        if is_eos and params.constraint is not None:
            return FinishReason.STOP  # its mask has seen to min_tokens and ignore_eos
        is_stop = (is_eos and not params.ignore_eos) or token_id in params.stop_token_ids
        if is_stop and sequence.num_output_tokens >= params.min_tokens:
            return FinishReason.STOP
        is_last = self.is_last(sequence, sequence.num_output_tokens)
        return FinishReason.LENGTH if is_last else None

    def is_last(self, sequence: Sequence, num_output_tokens: int) -> bool:
        """Whether an answer of so many tokens is as long as it may be."""
        max_tokens = sequence.request.params.max_tokens
        is_full = sequence.num_prompt_tokens + num_output_tokens >= self._max_model_len
        return is_full or (max_tokens is not None and num_output_tokens >= max_tokens)


def failed(sequence: Sequence, failure: RowFailure) -> TokenDelta:
    """The last that is told of it."""
    return TokenDelta(
        request_id=sequence.request.request_id,
        finish_reason=FinishReason.ERROR,
        num_preemptions=sequence.num_preemptions,
        error=failure.why,
        is_of_request=failure.is_of_request,
    )
