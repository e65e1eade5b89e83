"""The tensors behind the KV pages of one attention rank, and the number of pages.

P pages (plus the empty page 0 and a scratch page) of S tokens, Hkv key/value heads, D head width. A
model with latent attention has one "head", the latent with the shared key, and no
separate values. Pages in few bits have scales beside their keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.interface.kernels import Kernels
from moe_kernels.interface.kv_form import (
    FLOATS,
    SCALE_DTYPE,
    KVForm,
    KVPages,
    kv_form,
    kv_form_refusal,
)
from moe_serve.config.sections import CacheConfig
from moe_serve.errors import ConfigError
from moe_serve.model.spec import ModelSpec

_PAGES_AT_ONCE = 256  # pages of a layer that `finite` copies at a time


class KVCache:
    """Keys [P + 2, Hkv, S, D] and values [P + 2, Hkv, S, Dv] by layer, initialised to zero.

    The last page is scratch: padded rows of a recorded step write to it, and no sequence reads it.
    Zeros matter: a page's tail is multiplied by probability 0, and 0 * NaN would be NaN. For the
    same reason `clear` zeroes pages that a failed request leaves.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        form: KVForm = FLOATS,
    ) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.dtype, self.form = dtype, form
        self.num_kv_heads = spec.attention.num_kv_heads
        self.layers = tuple(
            _zeroed_pages(spec, (num_pages + 2, page_size), dtype, device, form)
            for _ in range(spec.num_layers)
        )
        is_latent = spec.latent is not None  # the values are then a part of the keys
        self.parts: tuple[Tensor, ...] = tuple(
            part for layer in self.layers for part in _parts(layer, is_latent)
        )

    def beside(self, spec: ModelSpec, num_more: int) -> KVCache:
        """Makes a cache of further layers for the same pages, and `num_more` pages that only it
        has.

        Clearing, copying and checking pages here does the same there. Its own pages have the
        numbers behind the last page here.
        """
        num_pages = self.num_pages + num_more
        other = KVCache(spec, num_pages, self.page_size, self.dtype, self.device, self.form)
        self.parts += other.parts
        return other

    @property
    def device(self) -> torch.device:
        return self.layers[0].keys.device

    @property
    def scratch_page(self) -> int:
        return self.num_pages + 1

    def rows(
        self, tables: Sequence[Sequence[int]], starts: Sequence[int], counts: Sequence[int]
    ) -> NDArray[np.int64]:
        """Returns the rows for new tokens' keys, with the cache seen as [(P + 2) * Hkv * S, D].

        Sequence i writes positions [starts[i], starts[i] + counts[i]) -> [T * Hkv], token-major.
        """
        pages, offsets = [], []
        for table, start, count in zip(tables, starts, counts, strict=True):
            positions = np.arange(start, start + count)
            pages.append(np.asarray(table, dtype=np.int64)[positions // self.page_size])
            offsets.append(positions % self.page_size)
        return self.rows_at(np.concatenate(pages), np.concatenate(offsets))

    def rows_at(self, pages: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rows of tokens given by page and offset in the page, [T] each -> [T *
        Hkv]."""
        slots = pages * (self.num_kv_heads * self.page_size) + offsets
        heads = np.arange(self.num_kv_heads) * self.page_size
        rows: NDArray[np.int64] = (slots[:, None] + heads[None]).reshape(-1)
        return rows

    def clear(self, pages: Sequence[int]) -> None:
        """Zeroes some pages in every layer."""
        index = torch.tensor(pages, dtype=torch.int64, device=self.device)
        for part in self.parts:
            part.index_fill_(0, index, 0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole pages, given as (from, to). All are read before any is written."""
        sources, targets = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
        for part in self.parts:
            part.index_copy_(0, targets, part.index_select(0, sources))

    def finite(self, pages: Sequence[int]) -> list[bool]:
        """Returns for each page whether all its keys and values are finite numbers.

        NaN and infinity survive a sum, so one sum per page is enough. (Finite values near the end
        of fp32 could overflow it: the page is then reported as not finite, and is only not shared.)
        Integers are always finite, so for pages in few bits only the scales are checked.
        """
        checked = [part for part in self.parts if part.is_floating_point()]
        verdicts: list[bool] = []
        for start in range(0, len(pages), _PAGES_AT_ONCE):
            index = torch.tensor(pages[start : start + _PAGES_AT_ONCE], device=self.device)
            sums = [
                part.index_select(0, index).flatten(1).sum(1, dtype=torch.float32)
                for part in checked
            ]
            verdicts += torch.stack(sums).isfinite().all(0).tolist()
        return verdicts


def _zeroed_pages(
    spec: ModelSpec,
    size: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    form: KVForm,
) -> KVPages:
    """Makes pages; `size` is their number and the tokens of each."""
    a, (num_pages, page_size) = spec.attention, size

    def zeros(width: int, dtype: torch.dtype) -> Tensor:
        shape = (num_pages, a.num_kv_heads, page_size, width)
        return torch.zeros(shape, dtype=dtype, device=device)

    keys = zeros(form.row_width(a.head_dim), form.dtype or dtype)
    is_latent = spec.latent is not None
    key_scales = value_scales = None
    if form.bits is not None:
        key_scales = value_scales = zeros(form.num_scales(1 + is_latent), SCALE_DTYPE)
        if not is_latent:
            value_scales = torch.zeros_like(key_scales)
    if is_latent:
        return KVPages(keys, keys[..., : a.value_width], key_scales, value_scales, form)
    values = zeros(form.row_width(a.value_width), form.dtype or dtype)
    return KVPages(keys, values, key_scales, value_scales, form)


def _parts(layer: KVPages, is_latent: bool) -> list[Tensor]:
    """Returns the tensors of a layer that have memory of their own."""
    parts = (layer.keys, layer.key_scales, layer.values, layer.value_scales)
    return [part for part in parts[: 2 if is_latent else 4] if part is not None]


_DEFAULT_SHARE = 0.3  # maximum share of the available memory


def num_pages(
    config: CacheConfig,
    *,
    bytes_per_token: int,
    max_model_len: int,
    max_num_seqs: int,
    available_bytes: int,
) -> int:
    """Returns the configured pages, or enough for `max_num_seqs` half-long requests within 30% of
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


def checked_kv_form(config: CacheConfig, spec: ModelSpec) -> KVForm:
    """Returns the configured form of KV pages. Raises ConfigError if the model cannot have it."""
    form, a = kv_form(config.kv_dtype), spec.attention
    refusal = kv_form_refusal(
        form, head_dim=a.head_dim, value_dim=a.value_width, is_latent=spec.latent is not None
    )
    if refusal is not None:
        raise ConfigError(
            f"cache.kv_dtype is {config.kv_dtype!r}, but {refusal}: set it to 'int8' or 'auto'."
        )
    return form


def check_page_size(page_size: int, kernels: Kernels) -> None:
    """Raises ConfigError if the kernels cannot read pages of this many tokens."""
    if page_size < kernels.least_page_size:
        raise ConfigError(
            f"cache.page_size is {page_size}, but the kernels ({kernels.name}) read pages of at "
            f"least {kernels.least_page_size} tokens: set it to {kernels.least_page_size} or more, "
            "or set model.kernels to 'torch'."
        )
