"""JSON of files and requests, with a bound on the digits of its whole numbers.

Python reads 4 300 digits and refuses more in words about itself; the product of two such numbers
cannot be printed. The longest number that people write is a `model_max_length` of 31 digits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MOST_DIGITS = 100

PairsHook = Callable[[list[tuple[str, Any]]], Any]


def parse_json(text: str | bytes, pairs_hook: PairsHook | None = None) -> Any:
    """As `json.loads`. Raises ValueError (also for a number with too many digits), RecursionError.

    `pairs_hook` makes the objects.
    """
    return json.loads(text, parse_int=_integer, object_pairs_hook=pairs_hook)


def _integer(text: str) -> int:
    num_digits = len(text.lstrip("-"))
    if num_digits > MOST_DIGITS:
        raise ValueError(f"it has a number of {num_digits} digits, and {MOST_DIGITS} are the most")
    return int(text)
