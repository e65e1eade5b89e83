"""Parameters of sampling and stopping. Names and defaults follow vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.kv_window import KVWindow
from moe_serve.engine.request.thinking_markers import ThinkingMarkers
from moe_serve.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_SEED = 2**63 - 1
_MAX_SHOWN = 10  # wrong values named in an error

_TUPLES = ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "bad_words", "bad_word_ids")
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. Raises InvalidRequestError naming the field and its limit.

    `top_k` 0 or -1 means all tokens. `max_tokens` None means up to the context's end. `logprobs`
    None returns no log probabilities; k returns those of the chosen token and the k likeliest
    tokens. `logprob_token_ids` returns these tokens in place of the likeliest ones.
    `allowed_token_ids` empty allows all. `thinking_token_budget` None or -1 sets no limit on the
    reasoning. `bad_word_ids` and `thinking_markers` are for callers without a tokenizer; else they
    are found for `bad_words` and the budget (`DecodingRules`). `seed` None uses a fresh seed; else
    the draw at position p depends on (seed, choice, p) only.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    constraint: Constraint | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    thinking_token_budget: int | None = None
    thinking_markers: ThinkingMarkers | None = None
    kv_window: KVWindow | None = None  # None: every row sees all keys before it

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _as_tuple("stop", stop))
        for name in _TUPLES:
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError(
                f"logit_bias must map token ids to numbers, got {self.logit_bias!r}.",
                param="logit_bias",
            )
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).",
                param="min_tokens",
            )
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, is_low_open=True)
        _check_range("top_k", self.top_k, -1, 2**31 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, is_low_open=True)
        _check_range("n", self.n, 1, MAX_CHOICES)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _check_num_logprobs(name, value)
        if self.seed is not None:
            _check_range("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if not isinstance(self.kv_window, KVWindow | None):
            raise InvalidRequestError(
                f"kv_window must be a KVWindow or None, got {self.kv_window!r:.100}.",
                param="kv_window",
            )
        self._check_lists()

    def _check_lists(self) -> None:
        _check_range("the number of stop strings", len(self.stop), 0, MAX_STOP_STRINGS, "stop")
        for text in self.stop:
            length = len(text) if isinstance(text, str) else 0
            _check_range("the length of a stop string", length, 1, MAX_STOP_STRING_CHARS, "stop")
        count = len(self.stop_token_ids)
        _check_range("the number of stop_token_ids", count, 0, 128, "stop_token_ids")
        count = len(self.logit_bias)
        _check_range("the number of logit_bias entries", count, 0, MAX_LOGIT_BIAS, "logit_bias")
        count, most = len(self.logprob_token_ids), MAX_LOGPROB_TOKEN_IDS
        _check_range("the number of logprob_token_ids", count, 0, most, "logprob_token_ids")
        if count and self.logprobs is None:
            raise InvalidRequestError(
                "logprob_token_ids needs logprobs: set it too, to 0 or more.",
                param="logprob_token_ids",
            )
        self._check_masks()
        self._check_ids(2**31)
        _check_each("a logit_bias value", self.logit_bias.values(), -100.0, 100.0, "logit_bias")

    def _check_masks(self) -> None:
        if not isinstance(self.constraint, Constraint | None):
            raise InvalidRequestError(
                f"constraint must be a Constraint or None, got {self.constraint!r:.100}.",
                param="constraint",
            )
        name, most = "allowed_token_ids", MAX_ALLOWED_TOKEN_IDS
        _check_range(f"the number of {name}", len(self.allowed_token_ids), 0, most, name)
        _check_range("the number of bad_words", len(self.bad_words), 0, MAX_BAD_WORDS, "bad_words")
        for word in self.bad_words:
            length = len(word.strip()) and len(word) if isinstance(word, str) else 0
            _check_range(
                "the length of a word of bad_words", length, 1, MAX_BAD_WORD_CHARS, "bad_words"
            )
        self._check_thinking()

    def _check_thinking(self) -> None:
        name = "thinking_token_budget"
        if self.thinking_token_budget is not None:
            _check_range(name, self.thinking_token_budget, -1, 2**31 - 1)
        if not isinstance(self.thinking_markers, ThinkingMarkers | None):
            raise InvalidRequestError(
                f"thinking_markers must be ThinkingMarkers or None, got "
                f"{self.thinking_markers!r:.100}.",
                param="thinking_markers",
            )
        if self.limited_thinking:
            self.check_thinking_end(self.limited_thinking.end, self.bad_word_ids)

    def check_thinking_end(
        self, end: tuple[int, ...], bad_word_ids: Sequence[tuple[int, ...]] = ()
    ) -> None:
        """Raises InvalidRequestError if a token of the end of reasoning may not be chosen."""
        name = "thinking_token_budget"
        missing = set(end).difference(self.allowed_token_ids or end)
        if missing:
            raise InvalidRequestError(
                f"{name} ends the reasoning with the tokens {list(end)}, and allowed_token_ids "
                f"lacks {sorted(missing)}: allow them, or leave one of the two out.",
                param=name,
            )
        for word in bad_word_ids:
            if any(end[i : i + len(word)] == word for i in range(len(end))):
                raise InvalidRequestError(
                    f"{name} ends the reasoning with the tokens {list(end)}, and bad_words bans "
                    f"{list(word)} of them: leave one of the two out.",
                    param=name,
                )

    @property
    def limited_thinking(self) -> ThinkingMarkers | None:
        """The thinking markers if a thinking budget is set, else None."""
        return None if self.thinking_token_budget in (None, -1) else self.thinking_markers

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5  # dividing by smaller ones would overflow

    @property
    def is_plain(self) -> bool:
        """True if each token is that with the largest unchanged logit, and only the token is
        wanted, without log probabilities."""
        is_changed = self.logit_bias or self.has_penalties or self.min_tokens
        is_bound = self.allowed_token_ids or self.thinking_token_budget is not None
        return self.is_greedy and self.logprobs is None and not (is_changed or is_bound)

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def check_vocabulary(self, vocab_size: int, thinking: ThinkingMarkers | None = None) -> None:
        """Raises InvalidRequestError if a token id lies outside the model's vocabulary.

        `thinking` are the markers found for the budget, if these parameters have none.
        """
        self._check_ids(vocab_size)
        markers = thinking or self.limited_thinking
        for token in markers.end if markers else ():
            name = "a token id of the end of reasoning"
            _check_range(name, token, 0, vocab_size - 1, "thinking_token_budget")

    def _check_ids(self, end: int) -> None:
        """Checks that every token id of the request is below `end`."""
        for name, ids, param in (
            ("a stop token id", self.stop_token_ids, "stop_token_ids"),
            ("a logit_bias token id", self.logit_bias, "logit_bias"),
            ("an id of logprob_token_ids", self.logprob_token_ids, "logprob_token_ids"),
            ("an id of allowed_token_ids", self.allowed_token_ids, "allowed_token_ids"),
        ):
            _check_each(name, ids, 0, end - 1, param)


def all_logprobs_reason(*, has_ids: bool) -> str:
    """Returns why -1 is refused for log probabilities, and the alternative.

    Other servers return the whole vocabulary for -1. `has_ids` is True if the request may name
    tokens instead.
    """
    what_to_do = "; name tokens in logprob_token_ids" if has_ids else ""
    return f"must be 0 to {MAX_LOGPROBS} (the whole vocabulary, -1, is not served{what_to_do})"


def _check_num_logprobs(name: str, value: int) -> None:
    if value == -1:
        reason = all_logprobs_reason(has_ids=name == "logprobs")
        raise InvalidRequestError(f"{name} {reason}, got -1.", param=name)
    _check_range(name, value, 0, MAX_LOGPROBS)


def shown_values(values: Sequence[object]) -> str:
    """Returns the first of several values as text, and the number of the others."""
    more = len(values) - _MAX_SHOWN
    shown = ", ".join(f"{value!r}" for value in values[:_MAX_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidRequestError(f"{name} must be a list, got {value!r}.", param=name)
    return tuple(value)


def _check_each(name: str, values: Iterable[float], low: float, high: float, param: str) -> None:
    """Checks each value like `_check_range`. The error names all wrong values."""
    wrong = []
    for value in values:
        try:
            _check_range(name, value, low, high, param)
        except InvalidRequestError:
            wrong.append(value)
    if len(wrong) == 1:
        _check_range(name, wrong[0], low, high, param)
    elif wrong:
        kind = "an integer" if isinstance(low, int) else "a number"
        raise InvalidRequestError(
            f"{name} must be {kind} in [{low}, {high}], got {shown_values(wrong)}.", param=param
        )


def _check_range(
    name: str,
    value: float,
    low: float,
    high: float,
    param: str | None = None,
    *,
    is_low_open: bool = False,
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    needs_int = isinstance(low, int)
    if not is_number or (needs_int and not isinstance(value, int)) or math.isnan(value):
        kind = "an integer" if needs_int else "a number"
        raise InvalidRequestError(f"{name} must be {kind}, got {value!r}.", param=param or name)
    if value > high or value < low or (is_low_open and value == low):
        interval = f"{'(' if is_low_open else '['}{low}, {high}]"
        raise InvalidRequestError(
            f"{name} must be in {interval}, got {value}.", param=param or name
        )
