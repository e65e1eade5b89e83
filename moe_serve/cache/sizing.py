"""Computes the number of KV pages."""

from __future__ import annotations

from moe_serve.config.sections import PAGE_SIZE, CacheConfig
from moe_serve.errors import ConfigError

_DEFAULT_SHARE = 0.3  # maximum share of the available memory


def num_pages(
    config: CacheConfig,
    *,
    bytes_per_token: int,
    max_model_len: int,
    max_num_seqs: int,
    available_bytes: int,
) -> int:
    """Return the configured pages, or enough for `max_num_seqs` half-long requests within 30% of
    memory.

    Raises ConfigError if one request of `max_model_len` tokens does not fit.
    """
    page_bytes = bytes_per_token * PAGE_SIZE
    if config.num_pages is not None:
        count = config.num_pages
    elif config.memory_bytes is not None:
        count = config.memory_bytes // page_bytes
    else:
        wanted = -(-max_num_seqs * max_model_len // (2 * PAGE_SIZE))
        affordable = int(available_bytes * _DEFAULT_SHARE) // page_bytes
        count = min(max(wanted, -(-max_model_len // PAGE_SIZE)), affordable)
    if count * PAGE_SIZE < max_model_len:
        raise ConfigError(
            f"the KV cache has {count} pages of {PAGE_SIZE} tokens ({count * PAGE_SIZE} tokens, "
            f"{page_bytes} bytes each page), which is too small for one request of max_model_len "
            f"({max_model_len}) tokens: lower max_model_len or give the cache more."
        )
    return count
