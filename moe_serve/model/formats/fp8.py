"""FP8 (E4M3) weights with float scales: DeepSeek-V3's blocks, and one scale per matrix or row.

    `x.weight`            F8_E4M3 [N, K], or fused [E, N, K]
    `x.weight_scale_inv`  [ceil(N / 128), ceil(K / 128)], one for each block of `weight_block_size`;
                          despite its name the weight is multiplied by it
    `x.weight_scale`      instead, without blocks: one for the matrix, or [N, 1]

    weight = float32(value) * float32(scale)

Source: `weight_dequant` in the inference code of DeepSeek-V3, whose blocks at the edges are ragged.
Scales of exponents alone (`scale_fmt: ue8m0`) are bytes. Scales of activations are not used: the
products are computed in the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.interface.quantised_matrix import E4M3, E8M0, MatrixForm, QuantisedMatrix
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.checkpoint import FLOAT_DTYPES, Checkpoint, Shape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.formats.weight_format import present, scale_format

_EXPONENT_DTYPES = ("F8_E8M0", "U8")


@dataclass(frozen=True, slots=True)
class Fp8:
    """FP8 weights. `block` is (rows, columns); None if a scale covers a matrix or a row."""

    block: tuple[int, int] | None

    @property
    def name(self) -> str:
        return f"fp8 blocks of {self.block[0]}x{self.block[1]}" if self.block else "fp8"

    def parts(self, checkpoint: Checkpoint, name: str) -> tuple[str, ...]:
        if name not in checkpoint:
            return ()
        return present(checkpoint, (name, self._scale_name(checkpoint, name)))

    def expect(self, checkpoint: Checkpoint, name: str, shape: Shape) -> None:
        checkpoint.expect(name, [shape], ["F8_E4M3"])
        if len(shape) not in (2, 3):
            raise CheckpointError(
                f"{checkpoint.path(name)}: tensor {name} is F8_E4M3, but a weight of shape "
                f"{list(shape)} is expected in {', '.join(FLOAT_DTYPES)}."
            )
        outer, (num_rows, num_columns) = shape[:-2], shape[-2:]
        shapes = [(*outer, *s) for s in ((), (1,), (1, 1), (num_rows, 1))]
        dtypes: tuple[str, ...] = FLOAT_DTYPES
        if self.block:
            grid = (-(-num_rows // self.block[0]), -(-num_columns // self.block[1]))
            shapes, dtypes = [(*outer, *grid)], FLOAT_DTYPES + _EXPONENT_DTYPES
        scale = self._scale_name(checkpoint, name)
        checkpoint.expect(scale, shapes, dtypes, f"{self.name} of a weight {list(shape)}")

    def matrix(
        self, checkpoint: Checkpoint, name: str, shape: Shape, expert: int | None
    ) -> QuantisedMatrix:
        form = self.form(checkpoint, name, shape, expert)
        scale = checkpoint.view(self._scale_name(checkpoint, name), expert)
        if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
            scale = E8M0.decode(scale.view(torch.uint8))
        return fp8_matrix(checkpoint.view(name, expert), scale, form)

    def form(
        self, checkpoint: Checkpoint, name: str, shape: Shape, expert: int | None
    ) -> MatrixForm:
        scale = self._scale_name(checkpoint, name)
        scale_shape = checkpoint.header(scale).shape[0 if expert is None else 1 :]
        rows, columns = self.block or (1 if scale_shape == (shape[0], 1) else 0, 0)
        return MatrixForm(
            values="e4m3",
            group=columns,
            block_rows=rows,
            scales=scale_format(checkpoint, scale),
        )

    def _scale_name(self, checkpoint: Checkpoint, name: str) -> str:
        """Returns the scale's name; some files without blocks use the name for blocks."""
        plain = name + "_scale"
        return plain if not self.block and plain in checkpoint else name + "_scale_inv"


def fp8_matrix(
    weight_NK: Tensor,
    scale: Tensor,
    form: MatrixForm,
    product_dtype: torch.dtype = torch.float32,
) -> QuantisedMatrix:
    """Returns a matrix of E4M3 with a scale for the matrix, for each row, or for each block."""
    num_rows, num_columns = weight_NK.shape
    if form.group:
        scale = scale.repeat_interleave(form.block_rows, dim=0)[:num_rows]
    return QuantisedMatrix(
        form=form,
        bytes_NB=weight_NK.view(torch.uint8),
        table=E4M3,
        num_columns=num_columns,
        scales_NG=scale.reshape(-1, scale.shape[-1] if form.group else 1),
        product_dtype=product_dtype,
    )


def fp8_from(config: HFConfig) -> Fp8:
    block = config.get("weight_block_size")
    if block is None:
        return Fp8(None)
    if not (isinstance(block, list) and len(block) == 2 and all(_is_size(n) for n in block)):
        raise config.error("weight_block_size", f"must be two positive integers, is {block!r}")
    return Fp8((block[0], block[1]))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
