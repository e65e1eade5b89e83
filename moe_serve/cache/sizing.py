"""Computes the number of KV pages, and checks their size."""

from __future__ import annotations

from moe_kernels.interface.kernels import Kernels
from moe_serve.config.sections import CacheConfig
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
    page_size = config.page_size
    page_bytes = bytes_per_token * page_size
    if config.num_pages is not None:
        count = config.num_pages
    elif config.memory_bytes is not None:
        count = config.memory_bytes // page_bytes
    else:
        wanted = -(-max_num_seqs * max_model_len // (2 * page_size))
        affordable = int(available_bytes * _DEFAULT_SHARE) // page_bytes
        count = min(max(wanted, -(-max_model_len // page_size)), affordable)
    if count * page_size < max_model_len:
        raise ConfigError(
            f"the KV cache has {count} pages of {page_size} tokens ({count * page_size} tokens, "
            f"{page_bytes} bytes each page), which is too small for one request of max_model_len "
            f"({max_model_len}) tokens: lower max_model_len or give the cache more."
        )
    return count


def check_page_size(page_size: int, kernels: Kernels) -> None:
    """Raise ConfigError if the kernels cannot read pages of this many tokens."""
    if page_size < kernels.least_page_size:
        raise ConfigError(
            f"cache.page_size is {page_size}, but the kernels ({kernels.name}) read pages of at "
            f"least {kernels.least_page_size} tokens: set it to {kernels.least_page_size} or more, "
            "or set model.kernels to 'torch'."
        )
