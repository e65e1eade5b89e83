"""The engine's inputs and outputs as frozen objects with token ids only.

The engine does not handle text: stop strings and detokenization belong to `text/`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from moe_serve.adapters.adapter import Adapter
from moe_serve.cache.events.change_record import PageOrigin
from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.service_terms import NO_SERVICE, Service
from moe_serve.engine.request.thinking_markers import ThinkingMarkers

MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1


class FinishReason(str, enum.Enum):
    """The reason why a request ended, in OpenAI's terms where OpenAI has one."""

    STOP = "stop"  # end of text, a stop token id, or (decided by text/) a stop string
    LENGTH = "length"  # max_tokens or the context's end
    ABORT = "abort"  # the client went away, or text/ saw a stop string
    ERROR = "error"  # failed inside the engine; `TokenDelta.error` says why


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingRules:
    """The rules that the engine follows for one sequence.

    `SamplingParams` say what the user asked for. The front end resolves a part of them for the
    model and the prompt: it has the tokenizer, the chat template and the grammar check.
    """

    max_tokens: int | None = None  # fits the context; None: up to the context's end
    prompt_logprobs: int | None = None  # of choice 0 only
    constraint: Constraint | None = None  # checked, and with the text that may come first
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    thinking_markers: ThinkingMarkers | None = None  # None: the reasoning has no limit

    @property
    def is_plain(self) -> bool:
        """True if no constraint limits the tokens, and no log probabilities of the prompt are
        wanted."""
        is_bound = self.constraint or self.bad_word_ids or self.thinking_markers
        return self.prompt_logprobs is None and not is_bound

    @classmethod
    def of(cls, params: SamplingParams) -> DecodingRules:
        """The rules of parameters in which nothing needs the model."""
        return cls(
            max_tokens=params.max_tokens,
            prompt_logprobs=params.prompt_logprobs,
            constraint=params.constraint,
            bad_word_ids=params.bad_word_ids,
            thinking_markers=params.limited_thinking,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate. A client's n > 1 becomes n requests with `choice` 0 .. n-1.

    `request_id` is made by the server, never by a client, and is unique. `resolved` are the rules
    that the front end found for `params`; None if nothing in them needs the model.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    resolved: DecodingRules | None = None
    choice: int = 0
    arrival_time: float = 0.0  # seconds on the engine's clock
    priority: int = 0  # lower is more urgent
    cache_salt: str = ""
    wants_routed_experts: bool = False  # each token then comes with a `TokenExperts`
    may_draft: bool = True  # whether the client allows drafted tokens, see `drafts`
    prediction: tuple[int, ...] = ()  # the tokens of the answer that the client expects
    service: Service = NO_SERVICE  # tier, tenant and targets
    adapter: Adapter | None = None  # its weights stay in memory as long as the request; None: base

    @property
    def adapter_digest(self) -> bytes:
        """The content of the adapter; empty: the base model."""
        return b"" if self.adapter is None else self.adapter.version.digest

    @property
    def adapter_label(self) -> str:
        """The adapter's name and version, for recordings; empty: the base model."""
        return "" if self.adapter is None else self.adapter.version.label

    @property
    def page_origin(self) -> PageOrigin:
        """The facts beside the tokens that its pages depend on."""
        return PageOrigin(None if self.adapter is None else self.adapter.name, self.cache_salt)

    @property
    def drafts(self) -> bool:
        """True if drafted tokens may be verified. A `kv_window` forbids it: its rows see
        different pages."""
        return self.may_draft and self.params.kv_window is None

    @property
    def rules(self) -> DecodingRules:
        """The rules for this sequence."""
        return self.resolved or DecodingRules.of(self.params)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural log probability of the chosen token and of others.

    The others are the likeliest tokens, best first, or the chosen token followed by those of
    `SamplingParams.logprob_token_ids`.
    """

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    top: tuple[tuple[int, float], ...]  # (token id, logprob)


@dataclass(frozen=True, slots=True)
class TokenExperts:
    """The experts that led to a token: the routers' choices for the row before it.

    `ids` are K expert ids for each of L layers with routed experts, in the host's byte order.
    `drafter` is the source of the draft that had the token; empty if no accepted draft had it.
    """

    ids: bytes
    num_layers: int
    top_k: int
    is_wide: bool = False  # int16 ids, not uint8
    drafter: str = ""

    @property
    def num_ids(self) -> int:
        return self.num_layers * self.top_k

    def lists(self) -> list[list[int]]:
        """Returns the ids as [L][K]; empty if they are unknown."""
        if not self.ids:
            return []
        ids: list[list[int]] = (
            memoryview(self.ids).cast("h" if self.is_wide else "B", [self.num_layers, self.top_k])
        ).tolist()  # type: ignore[assignment]
        return ids


NO_EXPERTS = TokenExperts(b"", 0, 0)


class DraftResult(msgspec.Struct, frozen=True, gc=False):
    """A draft that a step verified: the first `num_accepted` tokens of its delta were drafted."""

    source: str  # a value of DraftSource
    num_drafted: int
    num_accepted: int


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The result of one step for one request. `finish_reason` is set on the last delta only.

    A msgspec struct, as one is made per token and a frozen dataclass takes five times as long to
    make.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token, if asked for
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # on the first delta, if asked
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the id that ended the request, last in `token_ids`
    num_cached_tokens: int = 0
    num_tier_tokens: int = 0  # those of them that were loaded from a KV tier
    num_dropped_tokens: int = 0  # so far, with `kv_window`
    num_preemptions: int = 0  # so far
    started_at: float | None = None  # when it first joined a step, on the engine's clock
    error: str | None = None
    routed_experts: tuple[TokenExperts, ...] | None = None  # one per token, if asked for
    is_of_request: bool = False  # the request caused the error, so the client is told why
    error_code: str | None = None  # deadline_exceeded; None: the error has no code of its own
    drafted: DraftResult | None = None  # the draft that this step verified
