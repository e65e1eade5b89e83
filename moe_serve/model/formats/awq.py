"""AWQ in the `gemm` layout: 4 bits, packed along the outputs in an interleaved order.

    `x.qweight`  I32 [K, N / 8]   bits 4 i .. 4 i + 3 of a word hold output ORDER[i] of its eight
    `x.qzeros`   I32 [G, N / 8]   likewise
    `x.scales`   [G, N]

    weight[n, k] = (value[k, n] - zero[g, n]) * scale[g, n],  g = k // group_size

The product is rounded to the scales' dtype. Source: `WQLinear_GEMM.from_linear` and
`dequantize_gemm` of AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.interface.quantised_matrix import UINT4, MatrixForm, QuantisedMatrix
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.checkpoint import FLOAT_DTYPES, Checkpoint, Shape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.formats.weight_format import matrix_shape, present, scale_format, stem_of

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Awq:
    """AWQ weights. `group_size` -1 means one group for all inputs."""

    group_size: int

    @property
    def name(self) -> str:
        groups = "rows" if self.group_size == -1 else f"groups of {self.group_size}"
        return f"awq int4 {groups}"

    def parts(self, checkpoint: Checkpoint, name: str) -> tuple[str, ...]:
        stem = stem_of(name)
        if stem is None or stem + "qweight" not in checkpoint:
            return ()
        return present(checkpoint, (stem + part for part in ("qweight", "qzeros", "scales")))

    def expect(self, checkpoint: Checkpoint, name: str, shape: Shape) -> None:
        stem = name.removesuffix("weight")
        num_rows, num_columns = matrix_shape(checkpoint, stem + "qweight", shape, 8)
        size = num_columns if self.group_size == -1 else self.group_size
        if num_columns % size:
            raise CheckpointError(
                f"{checkpoint.path(stem + 'qweight')}: tensor {stem}qweight has {num_columns} "
                f"inputs, which groups of {size} do not divide."
            )
        num_groups, implied_by = num_columns // size, f"{self.name} of a weight {list(shape)}"
        for part, part_shape, dtypes in (
            ("qweight", (num_columns, num_rows // 8), ("I32",)),
            ("qzeros", (num_groups, num_rows // 8), ("I32",)),
            ("scales", (num_groups, num_rows), FLOAT_DTYPES),
        ):
            checkpoint.expect(stem + part, [part_shape], dtypes, implied_by)

    def matrix(
        self, checkpoint: Checkpoint, name: str, shape: Shape, expert: int | None
    ) -> QuantisedMatrix:
        stem = name.removesuffix("weight")
        scales_GN = checkpoint.view(stem + "scales")
        return QuantisedMatrix(
            form=self.form(checkpoint, name, shape, expert),
            bytes_NB=_repacked(checkpoint.view(stem + "qweight")),
            table=UINT4,
            num_columns=shape[1],
            scales_NG=scales_GN.t().contiguous(),
            zeros_NG=_unpacked(checkpoint.view(stem + "qzeros")),
            product_dtype=scales_GN.dtype,
        )

    def form(
        self, checkpoint: Checkpoint, name: str, shape: Shape, expert: int | None
    ) -> MatrixForm:
        return MatrixForm(
            values="int4",
            group=max(self.group_size, 0),
            has_zeros=True,
            scales=scale_format(checkpoint, name.removesuffix("weight") + "scales"),
        )


def _unpacked(words_KW: Tensor) -> Tensor:
    """Unpacks [K, N / 8] int32 -> [N, K] uint8, writing whole rows, so that nothing is scattered.

    The word 0x75316420 holds the outputs 0, 1, 2 ... 7 with those values.
    """
    words_WK = words_KW.t().contiguous()
    return _rows_of(words_WK, lambda place: (words_WK >> 4 * place) & 15)


def _repacked(words_KW: Tensor) -> Tensor:
    """Repacks [K, N / 8] int32 -> [N, ceil(K / 2)] uint8, two inputs per byte, the first one
    low.
    """
    words_WK = F.pad(words_KW.t(), (0, len(words_KW) % 2))
    low_WB, high_WB = words_WK[:, ::2].contiguous(), words_WK[:, 1::2].contiguous()

    def both(place: int) -> Tensor:
        return (low_WB >> 4 * place) & 15 | ((high_WB >> 4 * place) & 15) << 4

    return _rows_of(low_WB, both)


def _rows_of(words_WB: Tensor, bytes_at: Callable[[int], Tensor]) -> Tensor:
    """Returns [8 W, B] uint8; `bytes_at` gives the bytes at each place of a word, whose output is
    ORDER[place].
    """
    bytes_W8B = torch.empty(len(words_WB), 8, words_WB.shape[1], dtype=torch.uint8)
    for place, output in enumerate(_ORDER):
        bytes_W8B[:, output] = bytes_at(place)
    return bytes_W8B.flatten(0, 1)


def awq_from(config: HFConfig) -> Awq:
    layout = str(config.get("version") or config.get("format") or "gemm").lower()
    if layout != "gemm":
        raise config.error("version", f"is {layout!r}; only 'gemm' is supported")
    bits = config.get("bits", config.get("w_bit", 4))
    if bits != 4:
        raise config.error("bits", f"is {bits!r}; only 4 is supported")
    if -1 in (config.get("group_size"), config.get("q_group_size")):
        return Awq(-1)
    return Awq(config.positive_int("group_size", "q_group_size", default=128))
