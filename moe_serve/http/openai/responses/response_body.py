"""The request body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from moe_serve.errors import InvalidRequestError
from moe_serve.http.generation.chat_fields import EXTENSIONS
from moe_serve.http.schema.field_types import Int, NumLogprobs, StrictSchema, at_most
from moe_serve.http.schema.parameters import check_fields

MAX_ITEMS = 4096
MAX_TOOLS = 256
_MAX_METADATA, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512
_IGNORED = frozenset(
    {
        "max_tool_calls",  # limits tools that a server runs itself, which this server does not have
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "user",
    }
)
_UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "context_management": ([],),
    "conversation": (),
    "min_p": (0,),
    "moderation": (),
    "priority": (0,),
    "prompt": (),
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
}
_IGNORED_REASONING = frozenset({"mode"})
_UNSERVED_REASONING: Mapping[str, tuple[Any, ...]] = {"context": ("auto", "all_turns")}
# The fields that are read, for each type.
FORMAT_FIELDS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"type"}),
    "json_object": frozenset({"type"}),
    "json_schema": frozenset({"type", "name", "description", "schema", "strict"}),
}
_CHOICE_FIELDS: Mapping[str, frozenset[str]] = {
    "function": frozenset({"type", "name"}),
    "allowed_tools": frozenset({"type", "mode", "tools"}),
}
_INCLUDES = ("message.output_text.logprobs",)
# Accepted without effect: answers have no data of server-side tools and no encrypted reasoning.
_EMPTY_INCLUDES = (
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)


class Reasoning(StrictSchema):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextConfig(StrictSchema):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseStreamOptions(StrictSchema):
    include_obfuscation: bool | None = None  # accepted, but the stream is never padded


class ResponsesBody(StrictSchema):
    """The body of a request. `input_items.py` reads `input`, `response_chat.py` reads the tools."""

    input: Any
    model: str | None = None
    instructions: str | None = None
    tools: Annotated[list[Any], at_most("tools", MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: NumLogprobs | None = None
    include: Annotated[list[str], at_most("names", 32)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def has_logprobs(self) -> bool:
        return _INCLUDES[0] in (self.include or ())

    def check(self, *, is_strict: bool) -> list[str]:
        """Checks combinations of fields; returns the names of the fields that have no effect."""
        self._check_combinations()
        _check_metadata(self.metadata or {})
        extras = dict(self.model_extra or {})
        ignored: list[str] = []
        for name in EXTENSIONS:
            extras.pop(name, None)
        ignored += check_fields(extras, _IGNORED, _UNSERVED, "", is_strict)
        for prefix, part in (
            ("reasoning.", self.reasoning),
            ("text.", self.text),
            ("stream_options.", self.stream_options),
        ):
            if part is not None:
                fields = part.model_extra or {}
                of_reasoning = part is self.reasoning
                known = _IGNORED_REASONING if of_reasoning else frozenset()
                unserved = _UNSERVED_REASONING if of_reasoning else {}
                ignored += check_fields(fields, known, unserved, prefix, is_strict)
        return ignored + self._unread_parts(is_strict) + self._without_effect()

    def _check_combinations(self) -> None:
        if self.background and self.stream:
            raise _unsupported(
                "background", "background: true cannot be combined with stream: true"
            )
        if self.background and not self.is_stored:
            raise InvalidRequestError("background: true requires store: true.", param="background")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is only allowed with stream: true.", param="stream_options"
            )
        if self.truncation == "auto":
            raise _unsupported(
                "truncation", "truncation 'auto' is not supported; send fewer input items instead"
            )
        for i, name in enumerate(self.include or ()):
            if name not in (*_INCLUDES, *_EMPTY_INCLUDES):
                raise InvalidRequestError(
                    f"include.{i} must be one of "
                    f"{', '.join((*_INCLUDES, *_EMPTY_INCLUDES))}; got {name[:60]!r}.",
                    param=f"include.{i}",
                )
        if self.top_logprobs and not self.has_logprobs:
            raise InvalidRequestError(
                f"top_logprobs is only allowed with include: [{_INCLUDES[0]!r}].",
                param="top_logprobs",
            )

    def _unread_parts(self, is_strict: bool) -> list[str]:
        """Unread fields of the objects that `response_chat.py` reads and whose types it checks."""
        ignored: list[str] = []
        for prefix, value, known in (
            ("text.format.", self.text and self.text.format, FORMAT_FIELDS),
            ("tool_choice.", self.tool_choice, _CHOICE_FIELDS),
        ):
            kind = value.get("type") if isinstance(value, dict) else None
            if isinstance(value, dict) and isinstance(kind, str) and kind in known:
                extras = {name: value[name] for name in value if name not in known[kind]}
                ignored += check_fields(extras, frozenset(), {}, prefix, is_strict)
        return ignored

    def _without_effect(self) -> list[str]:
        names = [f"include.{name}" for name in self.include or () if name in _EMPTY_INCLUDES]
        if self.text is not None and self.text.verbosity is not None:
            names.append("text.verbosity")
        for name in ("summary", "generate_summary"):
            if self.reasoning is not None and getattr(self.reasoning, name) is not None:
                names.append(f"reasoning.{name}")
        return names


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _MAX_METADATA:
        raise InvalidRequestError(
            f"metadata must have at most {_MAX_METADATA} entries, got {len(metadata)}.",
            param="metadata",
        )
    for key, value in metadata.items():
        if len(key) > _MAX_KEY_CHARS or len(value) > _MAX_VALUE_CHARS:
            raise InvalidRequestError(
                f"metadata: a key may have at most {_MAX_KEY_CHARS} characters and a value "
                f"{_MAX_VALUE_CHARS}; {key[:20]!r} has {len(key)} and its value {len(value)}.",
                param="metadata",
            )


def _unsupported(param: str, sentence: str) -> InvalidRequestError:
    return InvalidRequestError(f"{sentence}.", param=param, code="unsupported_parameter")
