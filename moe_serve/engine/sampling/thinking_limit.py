"""Converts a thinking budget into the token markers that the engine needs."""

from __future__ import annotations

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.thinking_markers import ThinkingMarkers
from moe_serve.errors import InvalidRequestError
from moe_serve.text.assistant.formats import ReasoningFormat
from moe_serve.text.tokenizer import Tokenizer, blank_ids, spellings

_NAME = "thinking_token_budget"


def limiting_markers(
    params: SamplingParams,
    constraint: Constraint | None,
    reasoning: ReasoningFormat | None,
    prompt: str,
    tokenizer: Tokenizer,
    *,
    can_call: bool = False,
) -> ThinkingMarkers | None:
    """Returns the markers for enforcing a thinking budget; None if there is nothing to limit.

    `constraint` is the grammar of the answer. `prompt` (or just its end) tells whether the
    reasoning has begun. Raises InvalidRequestError if the model's reasoning markers are unknown.
    """
    if params.thinking_token_budget in (None, -1):
        return None
    if reasoning is None:
        raise InvalidRequestError(
            f"{_NAME} needs a model that marks its reasoning, and this model's chat template has "
            "no known markers: leave it out, or set server.reasoning_parser.",
            param=_NAME,
            code="unsupported_parameter",
        )
    if _holds_at_once(constraint, reasoning):
        return None
    markers = _markers(reasoning, prompt, tokenizer, can_call=can_call)
    params.check_thinking_end(markers.end, params.bad_word_ids)
    return markers


def counting_markers(
    constraint: Constraint | None,
    reasoning: ReasoningFormat | None,
    prompt: str,
    tokenizer: Tokenizer,
) -> ThinkingMarkers | None:
    """Returns the markers for counting reasoning tokens; None if the answer has no reasoning, or if
    the vocabulary cannot write the marker that ends it."""
    if reasoning is None or _holds_at_once(constraint, reasoning):
        return None
    try:
        return _markers(reasoning, prompt, tokenizer, can_call=True)
    except InvalidRequestError:
        return None


def _markers(
    reasoning: ReasoningFormat, prompt: str, tokenizer: Tokenizer, *, can_call: bool
) -> ThinkingMarkers:
    ends = reasoning.ends(can_call=can_call)
    closings = [ids for text in ends.closings for ids in spellings(text, tokenizer)]
    return ThinkingMarkers(
        end=_written(ends.closings[0], tokenizer) + _written(ends.following, tokenizer),
        closings=tuple(closings),
        openings=spellings(ends.opening, tokenizer),
        blanks=blank_ids(tokenizer),
        is_open=reasoning.is_open_after(prompt),
        can_reopen=ends.can_reopen,
    )


def _written(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    found = spellings(text, tokenizer)
    if text and not found:
        raise InvalidRequestError(
            f"{_NAME} cannot be enforced: the vocabulary of this model has no tokens for {text!r}.",
            param=_NAME,
            code="unsupported_parameter",
        )
    return found[0] if text else ()


def _holds_at_once(constraint: Constraint | None, reasoning: ReasoningFormat) -> bool:
    """Returns whether a grammar holds from the first token on and contains no reasoning."""
    if constraint is None or constraint.lead:
        return False
    is_json = constraint.kind in ("json_object", "json_schema")
    return is_json or not reasoning.is_part_of(constraint.source)
