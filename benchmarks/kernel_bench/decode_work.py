"""Attention of one decode step over pages in random order, by our kernels and by torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_bench.shapes import DecodeShape
from moe_kernels.interface.attention_shape import RotaryTable, StepRows
from moe_kernels.interface.kernels import AttentionCall, Kernels
from moe_kernels.interface.kv_form import KVPages
from moe_kernels.reference.norm import rotary_table

PAGE_SIZE = 16
Decode = Callable[[], Tensor]
SDPA = "SDPA, no pages"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeScene:
    """The tensors of a step: qkv [S, (H + 2 Hkv) D]; pages from 1 on belong to sequences, page 0
    is empty.
    """

    qkv: Tensor
    pages: KVPages
    page_tables: list[list[int]]
    positions: Tensor  # [S]
    kv_rows: Tensor  # [S * Hkv]
    rotary: RotaryTable


def make_scene(shape: DecodeShape, dtype: torch.dtype, device: torch.device) -> DecodeScene:
    generator = torch.Generator().manual_seed(0)
    attention, num = shape.attention, shape.num_sequences
    num_pages = -(-(shape.context + 1) // PAGE_SIZE)
    order = 1 + torch.randperm(num * num_pages, generator=generator)
    tables = order.view(num, num_pages)
    kv_heads, dim = attention.num_kv_heads, attention.head_dim
    size = (1 + num * num_pages, kv_heads, PAGE_SIZE, dim)
    keys, values = (torch.randn(size, device=device).to(dtype) for _ in "kv")
    keys[0], values[0] = 0, 0
    page, offset = divmod(shape.context, PAGE_SIZE)
    heads = torch.arange(kv_heads)
    rows = (tables[:, page, None] * kv_heads + heads) * PAGE_SIZE + offset
    angles = torch.arange(shape.context + 1)[:, None] * torch.logspace(0, -4, dim // 2)
    table = rotary_table(angles)
    width = (attention.num_heads + 2 * kv_heads) * dim
    return DecodeScene(
        qkv=torch.randn(num, width, device=device).to(dtype),
        pages=KVPages(keys, values),
        page_tables=tables.tolist(),
        positions=torch.full((num,), shape.context, device=device),
        kv_rows=rows.flatten().to(device),
        rotary=RotaryTable(table.cos.to(device), table.signed_sin.to(device)),
    )


def own_decode(shape: DecodeShape, scene: DecodeScene, kernels: Kernels) -> Decode:
    """Runs rotation, writing the new key and value, and attention. The plan is made once per
    step.
    """
    num, device = shape.num_sequences, scene.qkv.device
    step = StepRows(
        np.ones(num, dtype=np.int64),
        np.full(num, shape.context, dtype=np.int64),
        scene.page_tables,
        PAGE_SIZE,
    )
    plan = kernels.plan_attention(step, shape.attention, device)
    call = AttentionCall(scene.rotary, scene.positions, scene.kv_rows, scene.pages, plan)
    # The queries, keys and values may be overwritten.
    return lambda: kernels.attend(scene.qkv.clone(), None, None, call, shape.attention)


def sdpa_decode(shape: DecodeShape, scene: DecodeScene) -> Decode:
    """Runs attention alone over a contiguous cache, which is an easier task than ours."""
    attention, num = shape.attention, shape.num_sequences
    tables = torch.tensor(scene.page_tables, device=scene.qkv.device)
    keys, values = (
        pages[tables].transpose(1, 2).flatten(2, 3)[:, :, : shape.context + 1].contiguous()
        for pages in (scene.pages.keys, scene.pages.values)
    )
    width = attention.num_heads * attention.head_dim
    q = scene.qkv[:, :width].reshape(num, attention.num_heads, 1, attention.head_dim)
    return lambda: F.scaled_dot_product_attention(
        q, keys, values, scale=attention.scale, enable_gqa=True
    )


def least_bytes(shape: DecodeShape, dtype: torch.dtype) -> float:
    """Returns the bytes of every key and value of every sequence, each read once."""
    attention = shape.attention
    num_values = 2 * attention.num_kv_heads * attention.head_dim
    return float(shape.num_sequences * (shape.context + 1) * num_values * dtype.itemsize)


def operations(shape: DecodeShape) -> float:
    """Returns the operations of scores and weighted sums, two for each product."""
    attention = shape.attention
    per_key = 4.0 * attention.num_heads * attention.head_dim
    return shape.num_sequences * (shape.context + 1) * per_key
