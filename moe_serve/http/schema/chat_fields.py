"""Fields that the routes built on the chat share, and the translation of chat field names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from moe_serve.errors import ContextLengthError, InvalidRequestError

# Fields of a chat that other vendors' APIs lack. The schema of the chat checks them.
CHAT_FIELDS = (
    "cache_salt",
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "thinking_token_budget",
    "top_k",
)


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
