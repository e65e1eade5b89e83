"""The items of a stored request, a page at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from moe_serve.errors import InvalidRequestError

_MAX_PAGE, _DEFAULT_PAGE = 100, 20


def item_page(items: bytes, query: Mapping[str, str]) -> dict[str, Any]:
    """`limit` items in `order` (desc: the last first) behind the item `after`."""
    everything: list[dict[str, Any]] = msgspec.json.decode(b"[" + items + b"]")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order must be asc or desc.", param="order")
    limit = query.get("limit", str(_DEFAULT_PAGE))
    is_number = limit.isascii() and limit.isdecimal() and len(limit) <= 3
    if not (is_number and 1 <= int(limit) <= _MAX_PAGE):
        raise InvalidRequestError(f"limit must be 1 to {_MAX_PAGE}.", param="limit")
    if order == "desc":
        everything.reverse()
    after = query.get("after")
    if after is not None:
        ids = [item["id"] for item in everything]
        if after not in ids:
            raise InvalidRequestError(
                f"after: there is no item {after[:80]!r} in this request.", param="after"
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
