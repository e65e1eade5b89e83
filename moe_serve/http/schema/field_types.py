"""The base of all request schemas: strict types, checks beyond pydantic's own, error messages.

Sizes are checked before anything else: a body of 4 MiB can hold a million items or names. Checking
each of them, or collecting a million errors, would block the event loop for seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from moe_serve.engine.request.request import MAX_PRIORITY, MIN_PRIORITY
from moe_serve.engine.request.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    all_logprobs_reason,
    shown_values,
)
from moe_serve.engine.sampling.grammar.limits import MAX_CHOICES
from moe_serve.errors import InvalidRequestError

MAX_STOP_TOKEN_IDS = 128
MAX_MESSAGES = 4096
MAX_FIELDS = 256  # of one object
MAX_SALT_CHARS = 256

_REASONS = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "list_type": "must be a list",
    "model_type": "must be an object",
    "string_type": "must be a string",
}


def check_num_fields(value: Any) -> Any:
    """Limits the number of fields of an object, before its fields are read."""
    return _check_size(value, Mapping, "fields", 0, MAX_FIELDS)


def at_most(noun: str, limit: int, at_least: int = 0) -> BeforeValidator:
    """Returns a validator for the length of a list. It runs before any item is read."""

    def check(value: Any) -> Any:
        return _check_size(value, list, noun, at_least, limit)

    return BeforeValidator(check)


def _check_size(value: Any, kind: type, noun: str, low: int, high: int) -> Any:
    """Checks the size and returns `value`. Other types pass; pydantic rejects them later."""
    if isinstance(value, kind) and not low <= len(value) <= high:  # type: ignore[arg-type]
        raise PydanticCustomError(
            "size",
            "must hold {low} to {high} {noun}, got {count}",
            {"low": low, "high": high, "noun": noun, "count": len(value)},  # type: ignore[arg-type]
        )
    return value


def _stop_to_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError("stop_type", "must be a string or a list of strings")
    return value


def _check_content_type(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("content_type", "must be a string or a list of parts")
    return value


def _string_keys_to_ids(value: Any) -> Any:
    """Converts token ids given as JSON strings: {"50256": -100} means token 50256."""
    if not isinstance(value, Mapping):
        return value
    _check_size(value, Mapping, "entries", 0, MAX_LOGIT_BIAS)
    if wrong := [str(key)[:40] for key in value if not _is_token_id(key)]:
        shown = {"keys": shown_values(wrong)}
        raise PydanticCustomError("token_id", "must have token ids as keys, got {keys}", shown)
    wrong = [key for key, bias in value.items() if type(bias) not in (int, float)]
    if len(wrong) > 1:  # pydantic reports a single wrong value later
        shown = {"keys": shown_values(wrong)}
        reason = "must have numbers as values, but the values of {keys} are not numbers"
        raise PydanticCustomError("biases", reason, shown)
    return {int(key): bias for key, bias in value.items()}


def _is_token_id(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10


def _not_all(*, has_ids: bool) -> BeforeValidator:
    """Refuses -1, with which vLLM returns the log probabilities of the whole vocabulary."""

    def check(value: Any) -> Any:
        if value == -1:
            reason = {"reason": all_logprobs_reason(has_ids=has_ids)}
            raise PydanticCustomError("all_logprobs", "{reason}", reason)
        return value

    return BeforeValidator(check)


Message = TypeVar("Message")
Int = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Priority = Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
# The last of several BeforeValidators runs first.
StopList = Annotated[
    list[str],
    Field(fail_fast=True),
    at_most("strings", MAX_STOP_STRINGS),
    BeforeValidator(_stop_to_list),
]
StopTokenIds = Annotated[
    list[Int],
    Field(fail_fast=True, json_schema_extra={"maxItems": MAX_STOP_TOKEN_IDS}),
    at_most("ids", MAX_STOP_TOKEN_IDS),
]
AllowedTokenIds = Annotated[
    list[Int],
    Field(fail_fast=True, json_schema_extra={"maxItems": MAX_ALLOWED_TOKEN_IDS}),
    at_most("ids", MAX_ALLOWED_TOKEN_IDS),
]
WordList = Annotated[
    list[str],
    Field(fail_fast=True, json_schema_extra={"maxItems": MAX_BAD_WORDS}),
    at_most("strings", MAX_BAD_WORDS),
]
ChoiceList = Annotated[
    list[str],
    Field(fail_fast=True, json_schema_extra={"minItems": 1, "maxItems": MAX_CHOICES}),
    at_most("choices", MAX_CHOICES, at_least=1),
]
NumLogprobs = Annotated[Int, Field(ge=0, le=MAX_LOGPROBS), _not_all(has_ids=False)]
NumChatLogprobs = Annotated[Int, Field(ge=0, le=MAX_LOGPROBS), _not_all(has_ids=True)]
LogprobTokenIds = Annotated[
    list[Int],
    Field(fail_fast=True, json_schema_extra={"maxItems": MAX_LOGPROB_TOKEN_IDS}),
    at_most("ids", MAX_LOGPROB_TOKEN_IDS),
]
LogitBias = Annotated[dict[int, float], BeforeValidator(_string_keys_to_ids)]
MessageList = Annotated[
    list[Message],
    Field(fail_fast=True, json_schema_extra={"minItems": 1, "maxItems": MAX_MESSAGES}),
    at_most("messages", MAX_MESSAGES, at_least=1),
]
CacheSalt = Annotated[
    str,
    Field(json_schema_extra={"minLength": 1, "maxLength": MAX_SALT_CHARS}),
    BeforeValidator(lambda value: _check_size(value, str, "characters", 1, MAX_SALT_CHARS)),
]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")]
Content = Annotated[str | list[Any], BeforeValidator(_check_content_type)]


def misfit(details: ErrorDetails) -> InvalidRequestError:
    """Rewrites the first pydantic error: it names the field, the limit and the value given."""
    names = [part for part in details["loc"] if part not in ("str", "list[any]")]
    param = ".".join(str(name)[:100] for name in names)
    kind = details["type"]
    if kind == "missing":
        return InvalidRequestError(
            f"{param} is missing.", param=param, code="missing_required_parameter"
        )
    reason = _REASONS.get(kind)
    if reason is None:
        reason = re.sub(r"^\w+ should ", "must ", details["msg"][:300])
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    subject = param or "the body"
    return InvalidRequestError(
        f"{subject} {reason}{_shown(details['input'])}.", param=param or None, code=code
    )


def _shown(value: Any) -> str:
    """Returns the value as JSON, or nothing if it is too long to help."""
    if isinstance(value, str):
        value = value[:60]
    elif isinstance(value, int):
        if value.bit_length() > 63:
            return ""
    elif not (value is None or isinstance(value, float)):
        return ""
    return f", got {msgspec.json.encode(value).decode()}"


class StrictSchema(BaseModel):
    """A schema with strict types: `"1"` and true are not integers.

    Undeclared fields are kept in `model_extra`.
    """

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _check_num_fields(cls, value: Any) -> Any:
        return check_num_fields(value)


Body = TypeVar("Body", bound=BaseModel)


def parse_body(schema: type[Body], content: Mapping[str, Any]) -> Body:
    """Returns the validated request, or raises InvalidRequestError for the first invalid field."""
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise misfit(error.errors(include_url=False, include_context=False)[0]) from None
