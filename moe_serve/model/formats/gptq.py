"""GPTQ: whole numbers of 4 or 8 bits, packed along the inputs, with groups that may be shuffled.

    `x.qweight`  I32 [K * bits / 32, N]   the first input in the lowest bits of a word
    `x.qzeros`   I32 [G, N * bits / 32]   the first output in the lowest bits
    `x.scales`   [G, N]
    `x.g_idx`    I32 [K], the group of each input; without it, or if it is all zeros (written by
                 older tools), `group_size` neighbours each

    weight[n, k] = (value[k, n] - zero[g, n]) * scale[g, n],  g = g_idx[k]

The first file format (`checkpoint_format: gptq`) stores each zero minus one, modulo 2^bits;
`gptq_v2` stores it unchanged. The product is rounded to the scales' dtype. Sources: `pack` and
`dequantize_weight` of AutoGPTQ and GPTQModel. `dynamic` sets bits and group sizes of modules that
match regular expressions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_kernels.interface.quantised_matrix import (
    UINT4,
    UINT8,
    MatrixForm,
    QuantisedMatrix,
    transposed_bytes,
)
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.checkpoint import FLOAT_DTYPES, Checkpoint, Shape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.formats.weight_format import matrix_shape, present, scale_format, stem_of

_TABLES = {4: UINT4, 8: UINT8}
_GROUP_SIZE = 128  # if the config does not state one


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq:
    """GPTQ weights. `group_size` -1 means one group for all inputs."""

    bits: int
    group_size: int
    has_shifted_zeros: bool  # stored minus one
    dynamic: Mapping[str, Any]

    @property
    def name(self) -> str:
        groups = "rows" if self.group_size == -1 else f"groups of {self.group_size}"
        return f"gptq int{self.bits} {groups}"

    def parts(self, checkpoint: Checkpoint, name: str) -> tuple[str, ...]:
        stem = stem_of(name)
        if stem is None or stem + "qweight" not in checkpoint:
            return ()
        return present(checkpoint, (stem + p for p in ("qweight", "qzeros", "scales", "g_idx")))

    def expect(self, checkpoint: Checkpoint, name: str, shape: Shape) -> None:
        stem = name.removesuffix("weight")
        bits, group_size = self._of_module(stem)
        num_rows, num_columns = matrix_shape(checkpoint, stem + "qweight", shape, 32 // bits)
        num_groups = 1 if group_size == -1 else -(-num_columns // group_size)
        implied_by = f"gptq int{bits} of a weight {list(shape)}"

        def expect(part: str, shape: Shape, dtypes: tuple[str, ...]) -> None:
            checkpoint.expect(stem + part, [shape], dtypes, implied_by)

        expect("qweight", (-(-num_columns * bits // 32), num_rows), ("I32",))
        expect("qzeros", (num_groups, num_rows * bits // 32), ("I32",))
        expect("scales", (num_groups, num_rows), FLOAT_DTYPES)
        if stem + "g_idx" in checkpoint:
            expect("g_idx", (num_columns,), ("I32", "I64"))

    def matrix(
        self, checkpoint: Checkpoint, name: str, shape: Shape, expert: int | None
    ) -> QuantisedMatrix:
        stem = name.removesuffix("weight")
        bits, _ = self._of_module(stem)
        table = _TABLES[bits]
        scales_GN = checkpoint.view(stem + "scales")
        form, group_of_K = self._form(checkpoint, stem, shape[1])
        zeros_GN = table.decode(checkpoint.view(stem + "qzeros").view(torch.uint8))
        if self.has_shifted_zeros:
            zeros_GN = (zeros_GN + 1) % 2**bits
        return QuantisedMatrix(
            form=form,
            bytes_NB=transposed_bytes(checkpoint.view(stem + "qweight")),
            table=table,
            num_columns=shape[1],
            scales_NG=scales_GN.t().contiguous(),
            zeros_NG=zeros_GN.t().contiguous().to(torch.uint8),
            group_of_K=group_of_K,
            product_dtype=scales_GN.dtype,
        )

    def form(
        self, checkpoint: Checkpoint, name: str, shape: Shape, expert: int | None
    ) -> MatrixForm:
        return self._form(checkpoint, name.removesuffix("weight"), shape[1])[0]

    def _form(
        self, checkpoint: Checkpoint, stem: str, num_columns: int
    ) -> tuple[MatrixForm, Tensor | None]:
        """Returns the form, and the group of each column if groups are not made of neighbours."""
        bits, group_size = self._of_module(stem)
        group_of_K = self._groups(checkpoint, stem, num_columns, group_size)
        form = MatrixForm(
            values="int4" if bits == 4 else "int8",
            group=max(group_size, 0),
            has_zeros=True,
            is_shuffled=group_of_K is not None,
            scales=scale_format(checkpoint, stem + "scales"),
        )
        return form, group_of_K

    def _groups(
        self, checkpoint: Checkpoint, stem: str, num_columns: int, group_size: int
    ) -> Tensor | None:
        """Returns the group of each column; None if neighbours form groups."""
        if stem + "g_idx" not in checkpoint or not checkpoint.view(stem + "g_idx").any():
            return None
        size = num_columns if group_size == -1 else group_size
        group_of_K = checkpoint.view(stem + "g_idx").long()
        num_groups = checkpoint.header(stem + "scales").shape[0]
        if group_of_K.min() < 0 or group_of_K.max() >= num_groups:
            raise CheckpointError(
                f"{checkpoint.path(stem + 'g_idx')}: tensor {stem}g_idx names groups outside "
                f"the {num_groups} that exist."
            )
        is_in_order = torch.equal(group_of_K, torch.arange(num_columns) // size)
        return None if is_in_order else group_of_K

    def _of_module(self, stem: str) -> tuple[int, int]:
        """Returns bits and group size of a module: the first pattern of `dynamic` that matches, if
        any.
        """
        for pattern, own in self.dynamic.items():
            if re.match(pattern.removeprefix("+:"), stem.removesuffix(".")):
                bits, group_size = own.get("bits"), own.get("group_size")
                return (
                    self.bits if bits is None else bits,
                    self.group_size if group_size is None else group_size,
                )
        return self.bits, self.group_size


def gptq_from(config: HFConfig) -> Gptq:
    file_format = config.get("checkpoint_format") or config.get("format") or "gptq"
    config.require("is_marlin_format", False, default=False)
    if file_format not in ("gptq", "gptq_v2"):
        raise config.error(
            "checkpoint_format", f"is {file_format!r}; supported are 'gptq', 'gptq_v2'"
        )
    config.require("pack_dtype", "int32", default="int32")
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise config.error("dynamic", "must be an object")
    # "-:" marks modules that are not quantised; their stored form shows that as well.
    own = {pattern: keys for pattern, keys in dynamic.items() if not pattern.startswith("-:")}
    for pattern, keys in own.items():
        try:
            re.compile(pattern.removeprefix("+:"))
        except (re.error, OverflowError, RecursionError) as error:
            raise config.error(
                "dynamic", f"has {pattern!r}, which is not a valid pattern: {error}"
            ) from None
        if not isinstance(keys, Mapping):
            raise config.error("dynamic", f"must give an object for {pattern!r}")
        _check_sizes(HFConfig(keys, f"{config.source}: dynamic"), needs_bits=False)
    _check_sizes(config, needs_bits=True)
    group_size = config.get("group_size")
    return Gptq(
        bits=config.get("bits"),
        group_size=_GROUP_SIZE if group_size is None else group_size,
        has_shifted_zeros=file_format == "gptq",
        dynamic=own,
    )


def _check_sizes(config: HFConfig, *, needs_bits: bool) -> None:
    bits = config.positive_int("bits", default=None if needs_bits else 4)
    if bits not in _TABLES:
        raise config.error("bits", f"is {bits}; supported are 4, 8")
    if config.get("group_size") != -1:
        config.positive_int("group_size", default=_GROUP_SIZE)
