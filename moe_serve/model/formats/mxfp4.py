"""MXFP4, GPT-OSS's experts: 32 values of 4 bits (E2M1) share an exponent of 8 bits (E8M0).

    `x_blocks`  U8 [E, N, K / 32, 16], two values in a byte, the low four bits first
    `x_scales`  U8 [E, N, K / 32]

    weight[e, k, n] = E2M1 value * 2^(scale - 127)      the plain weight is [E, K, N]

Source: OCP Microscaling Formats (MX) v1.0, sections 5.2 to 5.4; the order of the bytes from the
published gpt-oss code. Every product is exact in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_kernels.interface.quantised_matrix import E2M1, MatrixForm, QuantisedMatrix
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.checkpoint import Checkpoint, Shape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.formats.weight_format import present

_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """MXFP4 weights: fused experts only."""

    @property
    def name(self) -> str:
        return "mxfp4"

    def parts(self, checkpoint: Checkpoint, name: str) -> tuple[str, ...]:
        if name + "_blocks" not in checkpoint:
            return ()
        return present(checkpoint, (name + "_blocks", name + "_scales"))

    def expect(self, checkpoint: Checkpoint, name: str, shape: Shape) -> None:
        blocks = name + "_blocks"
        if len(shape) != 3 or shape[1] % _BLOCK:
            raise CheckpointError(
                f"{checkpoint.path(blocks)}: tensor {blocks} has blocks of {_BLOCK} inputs, but "
                f"config.json implies a weight of shape {list(shape)}."
            )
        num_experts, num_inputs, num_outputs = shape
        grid = (num_experts, num_outputs, num_inputs // _BLOCK)
        implied_by = f"mxfp4 of a weight {list(shape)}"
        checkpoint.expect(blocks, [(*grid, _BLOCK // 2)], ["U8"], implied_by)
        checkpoint.expect(name + "_scales", [grid], ["U8"], implied_by)

    def matrix(
        self, checkpoint: Checkpoint, name: str, shape: Shape, expert: int | None
    ) -> QuantisedMatrix:
        return QuantisedMatrix(
            form=self.form(checkpoint, name, shape, expert),
            bytes_NB=checkpoint.view(name + "_blocks", expert).flatten(1),
            table=E2M1,
            num_columns=shape[0],
            scales_NG=checkpoint.view(name + "_scales", expert),
        )

    def form(
        self, checkpoint: Checkpoint, name: str, shape: Shape, expert: int | None
    ) -> MatrixForm:
        return MatrixForm(values="e2m1", scales="e8m0", group=_BLOCK, is_transposed=True)


def mxfp4_from(config: HFConfig) -> Mxfp4:
    return Mxfp4()
