"""What the coordinator wants done to pages before a step."""

from __future__ import annotations

from collections.abc import Sequence

from moe_serve.cache.kv_cache import KVCache
from moe_serve.cluster.control.messages import PageWork


def do_page_work(cache: KVCache, page_work: Sequence[PageWork]) -> None:
    """In their order: a page is cleared before something is copied to it."""
    for work in page_work:
        if work.clear:
            cache.clear(list(work.clear))
        if work.copy:
            cache.copy([(source, target) for source, target in work.copy])
