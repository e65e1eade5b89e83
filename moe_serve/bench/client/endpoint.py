"""The plan of a run against one server, and the form of its requests on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from moe_serve.bench.figures.summary import Slo
from moe_serve.bench.workload.prompt_maker import DataKind, Prompt
from moe_serve.bench.workload.workload import Workload
from moe_serve.errors import BenchError

EndpointName = Literal["completions", "chat"]

# Fields that the measurement itself sets.
_OWN_FIELDS = frozenset({"model", "prompt", "messages", "stream", "stream_options", "n", "best_of"})
NO_FIELDS: Mapping[str, object] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The fields shared by all requests of a run. `extra` is applied last; a null in it removes a
    field."""

    name: EndpointName
    model: str
    is_stream: bool = True
    ignore_eos: bool = True  # so that answers have the requested length
    counts_each_event: bool = False  # ask for usage in every event (not all servers know it)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if taken := _OWN_FIELDS & self.extra.keys():
            raise BenchError(f"--body may not set {', '.join(sorted(taken))}: bench sets it.")

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.name == "chat" else "/v1/completions"

    def body(self, prompt: Prompt, max_tokens: int, own: Mapping[str, object] = NO_FIELDS) -> bytes:
        """Returns a request. `own` are further fields of this request alone."""
        fields: dict[str, Any] = {"model": self.model, **self._prompt(prompt)}
        fields |= {"max_tokens": max_tokens, "temperature": 0}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.is_stream:
            options = {"include_usage": True}
            if self.counts_each_event:
                options["continuous_usage_stats"] = True
            fields |= {"stream": True, "stream_options": options}
        fields |= own
        fields |= self.extra
        try:
            return msgspec.json.encode({k: v for k, v in fields.items() if v is not None})
        except UnicodeEncodeError:
            raise BenchError(
                "a prompt, --model or --body contains half of a surrogate pair (such as "
                "\\ud83d), which is not valid text: remove it."
            ) from None

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        is_messages = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        if self.name == "completions":
            if is_messages:
                raise BenchError(
                    "the workload has messages, which only the chat route accepts: give "
                    "--endpoint chat."
                )
            return {"prompt": prompt}
        if is_messages:
            return {"messages": prompt}
        if not isinstance(prompt, str):
            raise BenchError(
                "the workload has token ids, which only the completions route accepts: give "
                "--endpoint completions."
            )
        return {"messages": [{"role": "user", "content": prompt}]}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The options of a run. `url` and other fields are as the user gave them, without anything the
    server reported."""

    url: str
    workload: Workload
    endpoint: Endpoint  # its model is taken from the server if it is ""
    api_key: str | None = None
    data: DataKind = "words"
    vocab_size: int = 1000
    timeout_s: float = 600.0
    num_warm_up: int | None = None
    max_in_flight: int | None = None  # only in an open loop
    slo: Slo | None = None
