"""What the generation routes accept. Types are checked here, ranges in SamplingParams.

Strict: "1" is no integer and neither is true. Null is the same as leaving a field out. Fields that
are not declared here are judged in `parameters.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moe_serve.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from moe_serve.errors import InvalidRequestError
from moe_serve.http.field_types import (
    CacheSalt,
    Content,
    Int,
    LogitBias,
    MessageList,
    StopList,
    StopTokenIds,
    check_num_fields,
    misfit,
)
from moe_serve.http.parameters import check_extra_fields, check_extra_message_fields

DEFAULT_COMPLETION_TOKENS = 16
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "n",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


class _Schema(BaseModel):
    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _check_num_fields(cls, value: Any) -> Any:
        return check_num_fields(value)


class StreamOptions(_Schema):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted: nothing is padded


class ChatMessage(_Schema):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class GenerationBody(_Schema):
    """The fields that both routes share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: Int | None = None
    stop: StopList | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    n: Int | None = None
    best_of: Int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: CacheSalt | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def has_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self, *, is_strict: bool) -> list[str]:
        """Checks across fields; returns the names of the fields that have no effect."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError(
                f"best_of ({self.best_of}) must equal n ({self.n or 1}) or be left out.",
                param="best_of",
                code="unsupported_parameter",
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is only allowed with stream: true.", param="stream_options"
            )
        ignored = check_extra_fields(self.model_extra or {}, is_strict=is_strict)
        if self.stream_options is not None:
            extras = self.stream_options.model_extra or {}
            named = {f"stream_options.{name}": value for name, value in extras.items()}
            ignored += check_extra_fields(named, is_strict=is_strict)
        return ignored

    def _sampling_params(self, **others: Any) -> SamplingParams:
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**given, **others)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: MessageList[ChatMessage]
    max_tokens: Int | None = Field(default=None, ge=1)
    max_completion_tokens: Int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None

    @property
    def max_tokens_field(self) -> str:
        """The newer name wins if a client sends both."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def check(self, *, is_strict: bool) -> list[str]:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs is only allowed with logprobs: true.", param="top_logprobs"
            )
        ignored = super().check(is_strict=is_strict)
        for i, message in enumerate(self.messages):
            extras = message.model_extra or {}
            ignored += check_extra_message_fields(extras, i, is_strict=is_strict)
        return ignored

    def sampling_params(self) -> SamplingParams:
        return self._sampling_params(
            max_tokens=getattr(self, self.max_tokens_field),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def plain_messages(self) -> list[dict[str, Any]]:
        """For the chat template; OpenAI's "developer" is what templates call "system"."""
        return [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": message.content,
            }
            for message in self.messages
        ]


class CompletionBody(GenerationBody):
    """POST /v1/completions. The prompt's four forms are told apart in `prompts.py`."""

    prompt: Any
    max_tokens: Int | None = Field(default=None, ge=0)
    logprobs: Int | None = None
    echo: bool | None = None

    @property
    def is_prompt_only(self) -> bool:
        """echo with max_tokens 0: the prompt and its logprobs, nothing generated."""
        return bool(self.echo) and self.max_tokens == 0

    def check(self, *, is_strict: bool) -> list[str]:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError(
                "max_tokens must be at least 1 (0 is only allowed with echo: true).",
                param="max_tokens",
            )
        if self.is_prompt_only and self.min_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens (0).",
                param="min_tokens",
            )
        return super().check(is_strict=is_strict)

    def sampling_params(self) -> SamplingParams:
        """For a prompt-only request the engine makes one token, which is dropped later."""
        return self._sampling_params(
            max_tokens=1 if self.is_prompt_only else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


Body = TypeVar("Body", ChatBody, CompletionBody)


def parse_body(schema: type[Body], content: Mapping[str, Any]) -> Body:
    """The checked request, or InvalidRequestError that names the first wrong field."""
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise misfit(error.errors(include_url=False, include_context=False)[0]) from None
