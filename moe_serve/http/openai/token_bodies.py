"""The request bodies of /tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from moe_serve.errors import InvalidRequestError
from moe_serve.http.schema.field_types import Int, at_most
from moe_serve.http.schema.parameters import check_fields
from moe_serve.http.schema.schemas import ChatBody
from moe_serve.http.schema.strict_schema import StrictSchema, parse_body

MAX_DETOKENIZED = 262_144  # ids of one request
_OWN = frozenset({"add_special_tokens", "return_token_strs"})


class TokenizeBody(StrictSchema):
    """A text to tokenize. A chat is read by `chat_part` instead, so that it accepts a chat's
    fields."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self, *, is_strict: bool) -> list[str]:
        return check_fields(self.model_extra or {}, frozenset(), {}, "", is_strict)


class TokenizeChatBody(StrictSchema):
    """The fields of a chat for /tokenize beyond those of a chat."""

    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if self.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens must be false with messages: the chat template writes the "
                "special tokens itself.",
                param="add_special_tokens",
                code="unsupported_parameter",
            )


class DetokenizeBody(StrictSchema):
    tokens: Annotated[
        list[Int],
        Field(fail_fast=True, json_schema_extra={"maxItems": MAX_DETOKENIZED}),
        at_most("ids", MAX_DETOKENIZED),
    ]
    model: str | None = None
    skip_special_tokens: bool | None = None

    def check(self, vocab_size: int, *, is_strict: bool) -> list[str]:
        ignored = check_fields(self.model_extra or {}, frozenset(), {}, "", is_strict)
        if self.tokens and not 0 <= min(self.tokens) <= max(self.tokens) < vocab_size:
            wrong = min(self.tokens) if min(self.tokens) < 0 else max(self.tokens)
            raise InvalidRequestError(
                f"tokens: token ids must be in [0, {vocab_size - 1}], got {wrong}.", param="tokens"
            )
        return ignored


def is_chat(content: Mapping[str, Any]) -> bool:
    """True if the body has `messages`. A body with both `messages` and `prompt` is an error."""
    has_messages = content.get("messages") is not None
    if has_messages and content.get("prompt") is not None:
        raise InvalidRequestError("Send either prompt or messages, not both.", param="prompt")
    if not has_messages and content.get("prompt") is None:
        raise InvalidRequestError(
            "prompt or messages is missing.", param="prompt", code="missing_required_parameter"
        )
    return has_messages


def chat_part(content: Mapping[str, Any]) -> ChatBody:
    """The body without the fields that only /tokenize has."""
    own = {*_OWN, "prompt"}
    return parse_body(ChatBody, {name: v for name, v in content.items() if name not in own})
