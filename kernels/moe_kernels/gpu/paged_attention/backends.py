"""Whether FlashAttention, through torch.nn.attention.varlen, may serve instead of our kernels.

It may where it is installed, takes the shape, and nobody asked for row invariance: with
`num_splits=1` its rows do not depend on the batch, but it does not promise the bits of a decode row
for the same row of a prefill chunk, which is what prefix reuse and preemption rest on here.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention import varlen

from moe_kernels.interface.attention_shape import AttentionShape, StepTokens

BackendName = Literal["triton", "FA3", "FA4"]

_log = logging.getLogger(__name__)
# What torch's own adapters import, and the chips (major capability) whose pages they take.
_MODULES: dict[BackendName, str] = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}
_CHIPS: dict[BackendName, int] = {"FA3": 9, "FA4": 10}
# FA4 copies a page at a time into a tile of this many keys.
_PAGE_SIZES: dict[BackendName, int] = {"FA4": 128}
_MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Which backend, and why it and not the other."""

    name: BackendName
    reason: str


def installed_backends() -> frozenset[BackendName]:
    """The FlashAttention packages that this torch could register and call with pages."""
    found: set[BackendName] = set()
    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        return frozenset()  # torch 2.11
    for name, module in _MODULES.items():
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) and importlib.util.find_spec(module):
            found.add(name)
    return frozenset(found)


def choose_backend(
    shape: AttentionShape,
    dtype: torch.dtype,
    page_size: int,
    capability: tuple[int, int],
    installed: frozenset[BackendName],
    is_row_invariant: bool = True,
) -> BackendChoice:
    """Decide for pages of this shape on a chip of this compute capability, and log it."""
    choice = _decide(shape, dtype, page_size, capability, installed, is_row_invariant)
    _log.info("paged attention: %s, %s", choice.name, choice.reason)
    return choice


def _decide(
    shape: AttentionShape,
    dtype: torch.dtype,
    page_size: int,
    capability: tuple[int, int],
    installed: frozenset[BackendName],
    is_row_invariant: bool,
) -> BackendChoice:
    refusal = _shape_refusal(shape, dtype)
    if is_row_invariant:
        refusal = "a decode row must have the bits of the same row in a prefill chunk"
    if refusal is not None:
        return BackendChoice("triton", refusal)
    major, minor = capability
    fitting = [name for name, chip in _CHIPS.items() if chip == major]
    if not fitting:
        return BackendChoice("triton", f"no FlashAttention takes pages on sm_{major}{minor}")
    (name,) = fitting
    if name not in installed:
        return BackendChoice("triton", f"{name} ({_MODULES[name]}) is not installed")
    if page_size % _PAGE_SIZES.get(name, 1):
        needed = _PAGE_SIZES[name]
        return BackendChoice("triton", f"{name} wants pages of {needed} tokens, not {page_size}")
    return BackendChoice(name, "it is installed and takes the shape")


def _shape_refusal(shape: AttentionShape, dtype: torch.dtype) -> str | None:
    """What FlashAttention's paged path, as torch calls it, does not compute."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention does not take {str(dtype).removeprefix('torch.')}"
    if shape.has_sinks:
        return "FlashAttention's varlen call has no sinks"
    if shape.chunk is not None:
        return "FlashAttention's varlen call has no chunks"
    if shape.value_width != shape.head_dim:
        return f"values of {shape.value_width} beside keys of {shape.head_dim}"
    if shape.head_dim > _MAX_HEAD_DIM or shape.head_dim % 8:
        return f"FlashAttention does not take heads of {shape.head_dim}"
    return None


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """A step as varlen_attn wants it; all int32, on the device. S sequences, W pages."""

    query_ends_S1: Tensor  # [S + 1], from 0
    num_keys_S: Tensor
    tables_SW: Tensor
    max_queries: int
    max_keys: int


def plan_varlen(step: StepTokens, device: torch.device) -> VarlenPlan:
    """Plan a step, without waiting for the device."""
    num_keys = step.query_starts + step.query_lens
    width = max(len(table) for table in step.page_tables)
    tables = np.zeros((len(step.page_tables), width), dtype=np.int32)
    for row, pages in zip(tables, step.page_tables, strict=True):
        row[: len(pages)] = pages
    ends = np.concatenate(([0], np.cumsum(step.query_lens)))
    return VarlenPlan(
        query_ends_S1=_to(ends, device),
        num_keys_S=_to(num_keys, device),
        tables_SW=_to(tables, device),
        max_queries=int(step.query_lens.max()),
        max_keys=int(num_keys.max()),
    )


def activate(name: BackendName) -> None:
    """Register the FlashAttention package with torch, once per process."""
    assert name != "triton", "our own kernels need no registration"
    torch_attention.activate_flash_attention_impl(name)


def varlen_attention(
    q_THD: Tensor, keys: Tensor, values: Tensor, plan: VarlenPlan, shape: AttentionShape
) -> Tensor:
    """As api.attention: keys and values [pages, Hkv, page size, D] -> [T, H, D]."""
    window = (-1, 0) if shape.sliding_window is None else (shape.sliding_window - 1, 0)
    out = varlen.varlen_attn(
        q_THD.to(keys.dtype),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        plan.query_ends_S1,
        None,
        plan.max_queries,
        plan.max_keys,
        scale=shape.scale,
        window_size=window,
        enable_gqa=shape.group > 1,
        seqused_k=plan.num_keys_S,
        block_table=plan.tables_SW,
        num_splits=1,
    )
    assert isinstance(out, Tensor), "a tuple comes only with an auxiliary request"
    return out


def _to(array: np.ndarray[tuple[int, ...], np.dtype[np.integer]], device: torch.device) -> Tensor:
    host = torch.from_numpy(array.astype(np.int32))
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
