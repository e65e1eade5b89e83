"""Returns the input items of a stored response in pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from moe_serve.errors import InvalidRequestError

_MAX_PAGE, _DEFAULT_PAGE = 100, 20


def item_page(items: bytes, query: Mapping[str, str]) -> dict[str, Any]:
    """A page of `limit` items in `order` (desc: the last first), beginning after the item
    `after`."""
    everything: list[dict[str, Any]] = msgspec.json.decode(b"[" + items + b"]")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order must be asc or desc, got {order[:20]!r}.", param="order")
    limit = query.get("limit", str(_DEFAULT_PAGE))
    is_number = limit.isascii() and limit.isdecimal() and len(limit) <= 3
    if not (is_number and 1 <= int(limit) <= _MAX_PAGE):
        raise InvalidRequestError(
            f"limit must be an integer from 1 to {_MAX_PAGE}, got {limit[:20]!r}.", param="limit"
        )
    if order == "desc":
        everything.reverse()
    after = query.get("after")
    if after is not None:
        ids = [item["id"] for item in everything]
        if after not in ids:
            raise InvalidRequestError(
                f"after: this request has no item {after[:80]!r}.", param="after"
            )
        everything = everything[ids.index(after) + 1 :]
    page = everything[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(everything) > len(page),
    }
