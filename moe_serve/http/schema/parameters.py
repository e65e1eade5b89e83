"""Request fields that the schemas do not declare: ignored, not supported yet, or unknown.

Nothing is dropped silently. A field without effect is listed in the X-Ignored-Parameters header. A
field that would change the answer but is not supported yet is answered with a 400. An unknown field
is a 400 in strict mode and listed in the header in lenient mode.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from moe_serve.errors import InvalidRequestError

# Accepted, but without effect on the answer.
IGNORED_FIELDS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "store",
        "user",
        "verbosity",
    }
)
IGNORED_MESSAGE_FIELDS = frozenset(
    {"annotations", "cache_control", "id", "provider_specific_fields"}
)

# Known, but not supported by this version: only values that have no effect are accepted.
UNSERVED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "custom_logit_processor": (),
    "data_parallel_rank": (),
    "documents": ([],),
    "extra_key": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "id_slot": (-1,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "no_stop_trim": (False,),
    "prediction": (),  # chats support it
    "return_hidden_states": (False,),
    "routed_experts_prompt_start": (),
    "session_id": (),
    "session_params": (),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "thinking_token_budget": (-1,),  # chats support it
    "use_beam_search": (False,),
    "web_search_options": (),
}
UNSERVED_MESSAGE_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
}

_HEADER_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_MAX_HEADER_NAMES = 32


def check_fields(
    extras: Mapping[str, Any],
    ignored: frozenset[str],
    unserved: Mapping[str, tuple[Any, ...]],
    prefix: str,
    is_strict: bool,
) -> list[str]:
    """Returns the names in `extras` that have no effect; raises an error for the first that is not
    allowed.

    `unserved` maps each known but unsupported name to the values that have no effect.
    """
    names: list[str] = []
    for name, value in extras.items():
        param = prefix + name[:100]
        if name in unserved:
            if value is not None and value not in unserved[name]:
                raise _unserved(param, unserved[name])
        elif name in ignored:
            if value is not None:
                names.append(param)
        elif is_strict:
            raise InvalidRequestError(
                f"Unknown parameter {param!r}.", param=param, code="unknown_parameter"
            )
        else:
            names.append(param)
    return names


def check_extra_fields(extras: Mapping[str, Any], *, is_strict: bool) -> list[str]:
    """Checks undeclared fields of a request. See `check_fields`."""
    return check_fields(extras, IGNORED_FIELDS, UNSERVED_FIELDS, "", is_strict)


def check_extra_message_fields(
    extras: Mapping[str, Any], index: int, *, is_strict: bool
) -> list[str]:
    """Checks undeclared fields of `messages[index]`. See `check_fields`."""
    prefix = f"messages.{index}."
    return check_fields(extras, IGNORED_MESSAGE_FIELDS, UNSERVED_MESSAGE_FIELDS, prefix, is_strict)


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Returns the header with the ignored names. A name that is not valid in a header becomes
    "?"."""
    shown = sorted({name if _HEADER_NAME.fullmatch(name) else "?" for name in names})
    if not shown:
        return {}
    return {"X-Ignored-Parameters": ", ".join(shown[:_MAX_HEADER_NAMES])}


def _unserved(param: str, accepted: tuple[Any, ...]) -> InvalidRequestError:
    shown = " or ".join(msgspec.json.encode(value).decode() for value in accepted)
    rest = f" with a value other than {shown}" if accepted else ""
    return InvalidRequestError(
        f"{param} is not supported{rest} by this version.",
        param=param,
        code="unsupported_parameter",
    )
