"""The request bodies of chats and completions. Types are checked here, ranges in SamplingParams.

Null means the same as leaving a field out. `schema/parameters.py` checks fields that are not
declared here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from moe_serve.errors import InvalidRequestError
from moe_serve.http.generation.chat_fields import sampling_params
from moe_serve.http.generation.chat_request import AnswerOptions, Chat, Truncation, TruncationSide
from moe_serve.http.schema.chat_messages import ChatMessage, ReasoningEffort, TemplateOptions
from moe_serve.http.schema.field_types import (
    AllowedTokenIds,
    CacheSalt,
    Content,
    Int,
    LogitBias,
    LogprobTokenIds,
    MessageList,
    NumChatLogprobs,
    NumLogprobs,
    Priority,
    RequestId,
    StopList,
    StopTokenIds,
    StrictSchema,
    WordList,
)
from moe_serve.http.schema.kv_window_fields import KVWindowFields
from moe_serve.http.schema.parameters import check_extra_fields, check_fields
from moe_serve.http.schema.service_fields import Label, ServiceTierName, ServiceWish, SloFields
from moe_serve.http.schema.structured import StructuredFields
from moe_serve.http.schema.tool_fields import ToolChoice, ToolList, allowed_tools, check_tools
from moe_serve.text.chat_template import join_text_parts

DEFAULT_COMPLETION_TOKENS = 16


class StreamOptions(StrictSchema):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted, but the stream is never padded
    continuous_usage_stats: bool | None = None


class Prediction(StrictSchema):
    """The answer that the client expects (OpenAI's Predicted Outputs)."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """Raises InvalidRequestError for a part that is not text."""
        if isinstance(self.content, str):
            return self.content
        return join_text_parts(self.content, "prediction.content")


class GenerationBody(StructuredFields):
    """The fields that chats and completions share."""

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
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: WordList | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    n: Int | None = None
    best_of: Int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: CacheSalt | None = None
    kv_window: KVWindowFields | None = None
    return_routed_experts: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: NumLogprobs | None = None
    logprob_token_ids: LogprobTokenIds | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Int | None = Field(default=None, ge=-1)
    truncation_side: TruncationSide | None = None
    request_id: RequestId | None = None
    priority: Priority | None = None
    speculation: bool | None = None
    service_tier: ServiceTierName | None = None
    slo: SloFields | None = None
    workflow: Label | None = None
    stage: Label | None = None

    @property
    def truncation(self) -> Truncation | None:
        if self.truncate_prompt_tokens is None:
            return None
        return Truncation(limit=self.truncate_prompt_tokens, side=self.truncation_side)

    @property
    def has_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_usage_in_chunks(self) -> bool:
        options = self.stream_options
        return self.has_usage_chunk and bool(options and options.continuous_usage_stats)

    def stream_usage(self, *, is_forced: bool) -> tuple[bool, bool]:
        """Returns whether the end of a stream, and whether each of its chunks, has the usage."""
        return is_forced or self.has_usage_chunk, is_forced or self.has_usage_in_chunks

    def check(self, *, is_strict: bool) -> list[str]:
        """Checks combinations of fields; returns the names of the fields that have no effect."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError(
                f"best_of ({self.best_of}) must equal n ({self.n or 1}) or be left out.",
                param="best_of",
                code="unsupported_parameter",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs is not allowed with stream: true.", param="prompt_logprobs"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens must be -1 or at least 1, got 0.",
                param="truncate_prompt_tokens",
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is only allowed with stream: true.", param="stream_options"
            )
        ignored = check_extra_fields(self.model_extra or {}, is_strict=is_strict)
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            ignored.append("truncation_side")
        if self.stream_options is not None:
            extras = self.stream_options.model_extra or {}
            named = {f"stream_options.{name}": value for name, value in extras.items()}
            ignored += check_extra_fields(named, is_strict=is_strict)
        return ignored + check_extra_fields(self.unknown_parts(), is_strict=is_strict)

    def _options(self, **params: Any) -> AnswerOptions:
        """Returns the options that chats and completions share. `params` are further sampling
        fields."""
        constraint, field = self.constraint()
        return AnswerOptions(
            params=sampling_params(self, constraint=constraint, **params),
            constraint_field=field,
            cache_salt=self.cache_salt or "",
            priority=self.priority,
            is_streamed=bool(self.stream),
            wants_routed_experts=bool(self.return_routed_experts),
            may_draft=self.speculation is not False,
            wish=ServiceWish.of(self, user=(self.model_extra or {}).get("user")),
        )


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: MessageList[ChatMessage]
    max_tokens: Int | None = Field(default=None, ge=1)
    max_completion_tokens: Int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: NumChatLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    thinking_token_budget: Int | None = None
    prediction: Prediction | None = None

    def check(self, *, is_strict: bool) -> list[str]:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs is only allowed with logprobs: true.", param="top_logprobs"
            )
        if self.logprob_token_ids and not self.logprobs:
            raise _needs("logprob_token_ids", "logprobs: true")
        check_tools(self.tools or [], self.tool_choice)
        self._check_last_message()
        ignored = super().check(is_strict=is_strict)
        for i, message in enumerate(self.messages):
            ignored += message.check(i, is_strict=is_strict)
        if self.prediction is not None:
            extras = self.prediction.model_extra or {}
            ignored += check_fields(extras, frozenset(), {}, "prediction.", is_strict)
        return ignored

    def _check_last_message(self) -> None:
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt cannot both be true.",
                param="continue_final_message",
            )
        last = self.messages[-1]
        if last.role != "assistant" or not last.content:
            raise InvalidRequestError(
                "continue_final_message requires that the last message has the role assistant "
                "and content.",
                param="continue_final_message",
            )
        if last.tool_calls:
            raise InvalidRequestError(
                "continue_final_message cannot continue a message with tool_calls: send the "
                "results of the calls.",
                param="continue_final_message",
            )

    def chat(self) -> Chat:
        tools, tool_choice = allowed_tools(self.tools or (), self.tool_choice)
        return Chat(
            messages=tuple(self.messages),
            tools=tools,
            tool_choice=tool_choice,
            is_parallel=self.parallel_tool_calls is not False,
            template_kwargs=self.chat_template_kwargs or {},
            reasoning_effort=self.reasoning_effort,
            separates_reasoning=self.separate_reasoning is not False,
            shows_reasoning=self.include_reasoning is not False,
            continues=bool(self.continue_final_message),
            adds_generation_prompt=self.add_generation_prompt is not False,
            echoes=bool(self.echo),
            truncation=self.truncation,
        )

    def options(self) -> AnswerOptions:
        """Raises InvalidRequestError for a value out of range. Of the two names of max_tokens the
        newer one wins."""
        newer = self.max_completion_tokens
        options = self._options(
            max_tokens=self.max_tokens if newer is None else newer,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
            thinking_token_budget=self.thinking_token_budget,
        )
        field = "max_tokens" if newer is None else "max_completion_tokens"
        expected = None if self.prediction is None else self.prediction.text
        return replace(options, max_tokens_field=field, prediction=expected)


class CompletionBody(GenerationBody):
    """POST /v1/completions. `prompts.py` distinguishes the four forms of the prompt."""

    prompt: Any
    max_tokens: Int | None = Field(default=None, ge=0)
    logprobs: Int | None = None
    echo: bool | None = None

    @property
    def is_prompt_only(self) -> bool:
        """True for echo with max_tokens 0: the answer is the prompt and its logprobs."""
        return bool(self.echo) and self.max_tokens == 0

    def check(self, *, is_strict: bool) -> list[str]:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError(
                "max_tokens must be at least 1, got 0 (0 is only allowed with echo: true).",
                param="max_tokens",
            )
        if self.is_prompt_only and self.min_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens (0).",
                param="min_tokens",
            )
        if self.logprob_token_ids and self.logprobs is None:
            raise _needs("logprob_token_ids", "logprobs (0 is enough)")
        if self.logprob_token_ids and self.is_prompt_only:
            raise _needs(
                "logprob_token_ids",
                "max_tokens of at least 1, because it applies to generated tokens",
            )
        if self.logprobs is not None and self.echo and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs cannot be combined with echo and logprobs.",
                param="prompt_logprobs",
            )
        return super().check(is_strict=is_strict)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The number of prompt logprobs, requested by their own field or by echo with logprobs."""
        return self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs

    @property
    def prompt_logprobs_field(self) -> str:
        """The field that requested the prompt logprobs."""
        return "prompt_logprobs" if self.prompt_logprobs is not None else "echo with logprobs"

    def options(self) -> AnswerOptions:
        """Raises InvalidRequestError for a value out of range. A prompt-only request generates one
        token, dropped later."""
        options = self._options(
            max_tokens=1 if self.is_prompt_only else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
        )
        return replace(
            options,
            prompt_logprobs_field=self.prompt_logprobs_field,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        )


def is_chat(content: Mapping[str, Any]) -> bool:
    """Returns True if the body has `messages`. A body with both `messages` and `prompt` is an
    error."""
    has_messages = content.get("messages") is not None
    if has_messages and content.get("prompt") is not None:
        raise InvalidRequestError("Send either prompt or messages, not both.", param="prompt")
    if not has_messages and content.get("prompt") is None:
        raise InvalidRequestError(
            "prompt or messages is missing.", param="prompt", code="missing_required_parameter"
        )
    return has_messages


def _needs(name: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} requires {what}.", param=name)
