"""The structs of an adapter's changes, as the native kernels read them."""

from __future__ import annotations

import ctypes

from moe_kernels.cpu.cpu_library import Int, Pointer

LOW_RANK_PARTS = ("up_a", "gate_b", "up_b", "down_a", "down_b")
# The numbers of `Matrix`, `RowNorm` and `HeadMatrix` in cpu/source/adapters.h.
MATRICES = {"qkv": 0, "query": 0, "output": 1, "query_down": 2, "latent": 3}
NORMS = {"attention": 0, "moe": 1, "query": 2}
HEADS = {"key_up": 0, "value_up": 1}


class ChangesStruct(ctypes.Structure):
    """`ExpertChanges` in cpu/source/adapters.h. All but `own` are arrays by expert."""

    _fields_ = (
        *((name, Pointer) for name in ("is_changed", "own", *LOW_RANK_PARTS)),
        *((name, Int) for name in (
            "up_width", "up_first", "gate_rank", "up_rank", "down_width", "down_rank",
        )),
        ("signs", Pointer),
    )  # fmt: skip


class LayerChangesStruct(ctypes.Structure):
    """`LayerChanges` in cpu/source/adapters.h."""

    _fields_ = (
        ("linears", Pointer * len(set(MATRICES.values()))),
        *((name, Pointer) for name in ("experts", "mlp", "tune")),
    )


class LayerTuneStruct(ctypes.Structure):
    """`LayerTune` in cpu/source/adapters.h."""

    _fields_ = (
        ("signs", Pointer * len(set(MATRICES.values()))),
        ("norms", Pointer * len(NORMS)),
        ("attended", Pointer * 3),
        ("heads", Pointer * len(HEADS)),
        ("router", Pointer),
        ("selection_bias", Pointer),
    )


class ModelTuneStruct(ctypes.Structure):
    """`ModelTune` in cpu/source/adapters.h."""

    _fields_ = tuple((name, Pointer) for name in ("embedding", "final_norm", "head"))
