"""Parses JSON of files and requests, with a limit on the digits of integers.

Python itself reads up to 4 300 digits and refuses more with a message about itself; the product of
two such numbers cannot be printed. The longest integer in practice is a `model_max_length` of 31
digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

MOST_DIGITS = 100

_TOO_MANY_DIGITS = f"[0-9]{{{MOST_DIGITS + 1}}}"
_IN_TEXT, _IN_BYTES = re.compile(_TOO_MANY_DIGITS), re.compile(_TOO_MANY_DIGITS.encode())

PairsHook = Callable[[list[tuple[str, Any]]], Any]


def parse_json(text: str | bytes, pairs_hook: PairsHook | None = None) -> Any:
    """Parses like `json.loads`. Raises ValueError (also for an integer with too many digits),
    RecursionError.

    `pairs_hook` builds the objects.
    """
    is_long = _IN_TEXT.search(text) if isinstance(text, str) else _IN_BYTES.search(text)
    return json.loads(
        text,
        parse_int=_integer if is_long else None,  # a call for each integer takes most of the time
        object_pairs_hook=pairs_hook,
    )


def _integer(text: str) -> int:
    num_digits = len(text.lstrip("-"))
    if num_digits > MOST_DIGITS:
        raise ValueError(
            f"it has a number of {num_digits} digits, at most {MOST_DIGITS} are allowed"
        )
    return int(text)
