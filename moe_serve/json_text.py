"""Parses JSON of files and requests, with a limit on the digits of integers.

Python itself reads up to 4 300 digits and refuses more with a message about itself; the product of
two such numbers cannot be printed. The longest integer in practice is a `model_max_length` of 31
digits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MOST_DIGITS = 100

PairsHook = Callable[[list[tuple[str, Any]]], Any]


def parse_json(text: str | bytes, pairs_hook: PairsHook | None = None) -> Any:
    """Parses like `json.loads`. Raises ValueError (also for an integer with too many digits),
    RecursionError.

    `pairs_hook` builds the objects.
    """
    return json.loads(text, parse_int=_integer, object_pairs_hook=pairs_hook)


def _integer(text: str) -> int:
    num_digits = len(text.lstrip("-"))
    if num_digits > MOST_DIGITS:
        raise ValueError(
            f"it has a number of {num_digits} digits, at most {MOST_DIGITS} are allowed"
        )
    return int(text)
