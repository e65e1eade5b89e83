"""Attention of the native kernels: the plan of a step, and the two calls.

T tokens, H query heads, Hkv key/value heads, D head width, S sequences, L latent and R rope width.
"""

from __future__ import annotations

import copy
import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.cpu.cpu_library import Float, Int, NativeLibrary, Pointer, address
from moe_kernels.interface.attention_shape import (
    AttentionShape,
    LatentShape,
    QKNormWeights,
    StepRows,
)
from moe_kernels.interface.kernels import AttentionCall
from moe_kernels.interface.kv_form import SCALE_DTYPE, KVPages

_NORMS = {"none": 0, "head": 1, "row": 2}
_NORM_AFTER_ROTATION = 3
_MAX_HEAD_DIM = 1024  # kMaxHeadDim in cpu/source/attention/kv_rows.h


class PlanStruct(ctypes.Structure):
    """`AttentionPlan` in cpu/source/attention/attention_plan.h."""

    _fields_ = (
        ("sequences", Pointer),
        ("tables", Pointer),
        ("places", Pointer),
        *((name, Int) for name in (
            "num_tokens", "max_pages", "page_size", "num_heads", "num_kv_heads", "head_dim",
            "value_dim", "rotary_dim", "norm", "window", "chunk", "threads",
        )),
        ("scale", Float),
        ("eps", Float),
        ("clip", Float),
        ("own", Pointer),  # of each token, which fine-tunes set
    )  # fmt: skip


class PagesStruct(ctypes.Structure):
    """`KVPages` in cpu/source/attention/kv_rows.h."""

    _fields_ = (
        *((name, Pointer) for name in ("keys", "values", "key_scales", "value_scales")),
        *((name, Int) for name in ("bits", "scales_per_row", "rotation")),
    )


def pages_struct(pages: KVPages) -> PagesStruct:
    """Returns where pages lie; the tensors must outlive it."""
    scales, form = pages.key_scales, pages.form
    if scales is None:
        return PagesStruct(pages.keys.data_ptr(), pages.values.data_ptr(), None, None, 0, 0, 0)
    assert scales.is_contiguous() and scales.dtype == SCALE_DTYPE, f"scales are {scales.dtype}"
    width = pages.keys.shape[-1] * (2 if form.bits == 4 else 1)
    return PagesStruct(
        pages.keys.data_ptr(), pages.values.data_ptr(), scales.data_ptr(),
        address(pages.value_scales), form.bits or 0, scales.shape[-1], form.rotation(width),
    )  # fmt: skip


def plan_struct(shape: AttentionShape, page_size: int, threads: int) -> PlanStruct:
    """Returns the shape, without a step's tokens and tables."""
    assert shape.head_dim <= _MAX_HEAD_DIM, f"heads of {shape.head_dim} values are too wide"
    norm = _NORMS[shape.qk_norm]
    if norm and shape.is_norm_after_rotation:
        norm = _NORM_AFTER_ROTATION
    return PlanStruct(
        None, None, None, 0, 0, page_size, shape.num_heads, shape.num_kv_heads, shape.head_dim,
        shape.value_width, shape.num_rotated, norm, shape.sliding_window or 0, shape.chunk or 0,
        threads, shape.scale, shape.norm_eps, shape.clip or 0.0,
    )  # fmt: skip


class NativePlan:
    """The sequence of each token [T], the page tables [S, most pages], and the shape."""

    __slots__ = ("_own", "_places", "_sequences", "_struct", "_tables", "pointer")

    def __init__(self, step: StepRows, shape: AttentionShape, threads: int) -> None:
        most = max(len(table) for table in step.page_tables)
        self._tables = np.zeros((len(step.page_tables), most), dtype=np.int64)
        for row, table in zip(self._tables, step.page_tables, strict=True):
            row[: len(table)] = table
        self._sequences = np.repeat(np.arange(len(self._tables)), step.query_lens)
        self._struct = plan_struct(shape, step.page_size, threads)
        self._struct.sequences = self._sequences.ctypes.data
        self._struct.tables = self._tables.ctypes.data
        if step.drops_keys:
            self._places = step.places
            self._struct.places = self._places.ctypes.data
        self._struct.num_tokens, self._struct.max_pages = len(self._sequences), most
        self._own: NDArray[np.uintp] | None = None
        self.pointer = ctypes.addressof(self._struct)

    def with_own(self, own_T3: NDArray[np.uintp]) -> NativePlan:
        """Returns the same plan with addresses of each row's own norms and sinks."""
        made = copy.copy(self)
        made._struct, made._own = PlanStruct.from_buffer_copy(self._struct), own_T3
        made._struct.own, made.pointer = own_T3.ctypes.data, ctypes.addressof(made._struct)
        return made

    def for_latents(self, shape: LatentShape) -> None:
        """Sets the sizes that a plan made from `shape.absorbed()` lacks."""
        self._struct.rotary_dim, self._struct.eps = shape.rope_dim, shape.norm_eps


def attend(
    native: NativeLibrary,
    qkv: Tensor,
    norm: QKNormWeights | None,
    sinks_H: Tensor | None,
    call: AttentionCall[NativePlan],
    shape: AttentionShape,
) -> Tensor:
    """Kernels.attend."""
    out = qkv.new_empty(qkv.shape[0], shape.num_heads * shape.value_width)
    pages = pages_struct(call.pages)
    native.function("moe_attend")(
        call.plan.pointer,
        qkv.data_ptr(),
        None if norm is None else norm.q.data_ptr(),
        None if norm is None else norm.k.data_ptr(),
        address(sinks_H),
        call.rotary.cos.data_ptr(),
        call.rotary.signed_sin.data_ptr(),
        address(call.rotary.query_scale),
        call.positions.data_ptr(),
        call.kv_rows.data_ptr(),
        ctypes.addressof(pages),
        out.data_ptr(),
    )
    return out


def attend_latent(
    native: NativeLibrary,
    q_latent_THL: Tensor,
    q_rope_THR: Tensor,
    latent_TC: Tensor,
    norm_weight_L: Tensor,
    call: AttentionCall[NativePlan],
    shape: LatentShape,
) -> Tensor:
    """Kernels.attend_latent."""
    for x in (q_latent_THL, q_rope_THR, latent_TC):
        assert x.stride(-1) == 1, f"rows of the input must be contiguous, not {x.stride()}"
    call.plan.for_latents(shape)
    pages = pages_struct(call.pages)
    out_THL = torch.empty_like(q_latent_THL, memory_format=torch.contiguous_format)
    native.function("moe_attend_latent")(
        call.plan.pointer,
        q_latent_THL.data_ptr(),
        *q_latent_THL.stride()[:2],
        q_rope_THR.data_ptr(),
        *q_rope_THR.stride()[:2],
        latent_TC.data_ptr(),
        latent_TC.stride(0),
        norm_weight_L.data_ptr(),
        call.rotary.cos.data_ptr(),
        call.rotary.signed_sin.data_ptr(),
        call.positions.data_ptr(),
        call.kv_rows.data_ptr(),
        ctypes.addressof(pages),
        out_THL.data_ptr(),
    )
    return out_THL
