"""The response object, as it is returned, stored and sent in events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moe_serve.http.generation.usage import Usage
from moe_serve.http.openai.responses.body import ResponsesBody
from moe_serve.http.openai.responses.input_items import Item
from moe_serve.http.schema.errors import ApiError

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRecord:
    """The data of a response that does not change between its start and its end."""

    id: str
    created_at: int
    model: str
    body: ResponsesBody

    def as_json(
        self,
        status: Status,
        output: Sequence[Item],
        usage: dict[str, Any] | None = None,
        error: ApiError | None = None,
    ) -> dict[str, Any]:
        body = self.body
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "background": bool(body.background),
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else _error(error),
            "incomplete_details": reason,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": self.model,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": body.is_stored,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": [_with_defaults(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": None,
            "metadata": body.metadata or {},
        }


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error(error: ApiError) -> dict[str, Any]:
    """The error object. OpenAI's codes are a closed set that does not contain our own."""
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    return {"code": code, "message": error.message}


def _with_defaults(tool: dict[str, Any]) -> dict[str, Any]:
    return {"strict": None, "description": None, "parameters": None, **tool}
