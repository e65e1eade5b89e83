"""The fields of a chat for routes of other APIs, which translate their requests into them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, Field

from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.errors import ContextLengthError, InvalidRequestError
from moe_serve.http.generation.chat_request import AnswerOptions, Chat
from moe_serve.http.schema.chat_messages import ChatMessage, ReasoningEffort, TemplateOptions
from moe_serve.http.schema.field_types import (
    CacheSalt,
    Int,
    LogitBias,
    MessageList,
    NumChatLogprobs,
    StopList,
    StopTokenIds,
    StrictSchema,
)
from moe_serve.http.schema.kv_window_fields import KVWindowFields
from moe_serve.http.schema.service_fields import Label, ServiceTierName, ServiceWish, SloFields
from moe_serve.http.schema.structured import ResponseFormat, wished_constraint
from moe_serve.http.schema.tool_fields import ToolChoice, ToolList, allowed_tools, check_tools

# Fields of a chat that other vendors' APIs do not have. Clients may send them to these APIs too.
EXTENSIONS = (
    "cache_salt",
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "kv_window",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "service_tier",
    "slo",
    "speculation",
    "stage",
    "stop",
    "stop_token_ids",
    "thinking_token_budget",
    "top_k",
    "workflow",
)


class ChatFields(StrictSchema):
    """The fields of a translated request whose types are still unchecked.

    If several are wrong, the first one in the order of this class is reported.
    """

    response_format: ResponseFormat | None = None
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
    cache_salt: CacheSalt | None = None
    kv_window: KVWindowFields | None = None
    speculation: bool | None = None
    messages: MessageList[ChatMessage]
    max_tokens: Int | None = Field(default=None, ge=1)
    top_logprobs: NumChatLogprobs | None = None
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: TemplateOptions | None = None
    thinking_token_budget: Int | None = None
    service_tier: ServiceTierName | None = None
    slo: SloFields | None = None
    workflow: Label | None = None
    stage: Label | None = None

    def chat(self, *, is_parallel: bool | None, continues: bool = False) -> Chat:
        """Raises InvalidRequestError if the tools do not fit each other or the choice."""
        check_tools(self.tools or [], self.tool_choice)
        tools, tool_choice = allowed_tools(self.tools or (), self.tool_choice)
        return Chat(
            messages=tuple(self.messages),
            tools=tools,
            tool_choice=tool_choice,
            is_parallel=is_parallel is not False,
            template_kwargs=self.chat_template_kwargs or {},
            reasoning_effort=self.reasoning_effort,
            continues=continues,
            adds_generation_prompt=not continues,
        )

    def options(
        self, *, max_tokens_field: str, is_streamed: bool | None, user: object = None
    ) -> AnswerOptions:
        """Raises InvalidRequestError for a value out of range."""
        format_ = self.response_format
        constraint, field = wished_constraint(() if format_ is None else format_.wishes())
        return AnswerOptions(
            params=sampling_params(
                self,
                max_tokens=self.max_tokens,
                logprobs=self.top_logprobs,
                constraint=constraint,
            ),
            constraint_field=field,
            max_tokens_field=max_tokens_field,
            cache_salt=self.cache_salt or "",
            is_streamed=bool(is_streamed),
            may_draft=self.speculation is not False,
            wish=ServiceWish.of(self, user=user),
        )


def sampling_params(body: BaseModel, **others: Any) -> SamplingParams:
    """Returns the sampling parameters that have a value in the field of the same name, and
    `others`."""
    names = [own.name for own in dataclasses.fields(SamplingParams) if own.name not in others]
    given = {name: getattr(body, name) for name in names if name in type(body).model_fields}
    if given.get("kv_window") is not None:
        given["kv_window"] = given["kv_window"].wish()
    return SamplingParams(**{k: v for k, v in given.items() if v is not None}, **others)


def extensions(extras: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the extensions among the undeclared fields of a body, as the client sent them."""
    found = {name: (extras or {}).get(name) for name in EXTENSIONS}
    return {name: value for name, value in found.items() if value is not None}


def own_ignored(ignored: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Translates the ignored fields of a chat to the names of a route.

    The route's messages differ from the chat's, so the index of a message is removed.
    """
    own = _renaming(names)
    return [own(re.sub(r"^messages\.\d+\.", "messages.", name)) for name in ignored]


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Translates the field names in a chat's errors to those of a route, e.g. {"messages":
    "input"}."""
    own = _renaming(names)
    try:
        yield
    except InvalidRequestError as error:
        param = error.param and own(error.param)
        if isinstance(error, ContextLengthError):
            raise error.reworded(own(str(error)), param) from error
        raise InvalidRequestError(own(str(error)), param=param, code=error.code) from error


def _renaming(names: Mapping[str, str]) -> Callable[[str], str]:
    longest_first = sorted(names, key=len, reverse=True)
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, longest_first))})\b")
    return lambda text: pattern.sub(lambda found: names[found[0]], text)
