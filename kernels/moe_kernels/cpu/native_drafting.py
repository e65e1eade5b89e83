"""A drafting head in the native kernels: one call for all tokens of all sequences.

S sequences, D model width, V vocabulary.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from moe_kernels.cpu.cpu_library import Int, NativeLibrary, Pointer
from moe_kernels.cpu.native_experts import ExpertTable
from moe_kernels.cpu.native_linear import NativeLinear
from moe_kernels.interface.head_drafting import DraftingParts, Guesses


class _BlockStruct(ctypes.Structure):
    """`DraftBlock` in cpu/source/calls/drafting.cpp."""

    _fields_ = (("norm", Pointer), ("mlp", Pointer))


class _DraftingStruct(ctypes.Structure):
    """`HeadDrafting` in cpu/source/calls/drafting.cpp."""

    _fields_ = (
        *((name, Pointer) for name in (
            "embedding", "state_norm", "token_norm", "output_norm", "state_in", "token_in",
            "output", "blocks",
        )),
        *((name, Int) for name in ("num_blocks", "width", "vocab_size", "threads")),
        ("eps", ctypes.c_double),
    )  # fmt: skip


class NativeDrafting:
    """Implements HeadDrafting."""

    __slots__ = ("_blocks", "_function", "_parts", "_pointer", "_struct", "_width")

    def __init__(self, native: NativeLibrary, parts: DraftingParts) -> None:
        linears = [_native(linear) for linear in (parts.state_in, parts.token_in, parts.output)]
        vocab_size, self._width = parts.embedding_VD.shape
        assert linears[-1].num_outputs == vocab_size, "the output head has another vocabulary"
        norms = (parts.state_norm_D, parts.token_norm_D, parts.output_norm_D)
        for tensor in (parts.embedding_VD, *norms, *(block.norm_D for block in parts.blocks)):
            assert tensor.is_contiguous() and tensor.dtype == native.dtype, "weights in one piece"
        self._function, self._parts = native.function("moe_draft"), parts
        self._blocks = (_BlockStruct * len(parts.blocks))()
        for struct, block in zip(self._blocks, parts.blocks, strict=True):
            assert isinstance(block.mlp, ExpertTable), "a native MLP"
            struct.norm, struct.mlp = block.norm_D.data_ptr(), block.mlp.pointer
        self._struct = _DraftingStruct(
            parts.embedding_VD.data_ptr(),
            *(norm.data_ptr() for norm in norms),
            *(linear.pointer for linear in linears),
            ctypes.addressof(self._blocks),
            len(self._blocks),
            self._width,
            vocab_size,
            native.threads,
            parts.norm_eps,
        )
        self._pointer = ctypes.addressof(self._struct)

    def __call__(
        self, state_SD: Tensor, token_ids_S: Tensor, most: int, least: float = 0.0
    ) -> Guesses:
        num_rows, width = state_SD.shape
        assert width == self._width and state_SD.is_contiguous(), f"states lie at {state_SD.shape}"
        assert token_ids_S.shape == (num_rows,) and token_ids_S.is_contiguous(), "a token for each"
        tokens_SM = torch.full((num_rows, most), -1, dtype=torch.int64)
        confidences_SM = torch.zeros(num_rows, most)
        self._function(
            self._pointer,
            state_SD.data_ptr(),
            token_ids_S.data_ptr(),
            tokens_SM.data_ptr(),
            confidences_SM.data_ptr(),
            num_rows,
            most,
            least,
        )
        return Guesses(tokens_SM, confidences_SM)


def _native(linear: object) -> NativeLinear:
    assert isinstance(linear, NativeLinear), f"a native layer, not {type(linear).__name__}"
    return linear
