"""compressed-tensors: int4 and int8, packed or one to a byte, and fp8.

    `x.weight_packed`      I32 [N, ceil(K * bits / 32)], or
    `x.weight`             I8 or F8_E4M3 [N, K]
    `x.weight_scale`       [1] for a matrix, [N, 1] for rows, [N, K / group_size] for groups,
                           [ceil(N / 128), ceil(K / 128)] for blocks
    `x.weight_zero_point`  where it is not symmetric: I8 in the scale's shape, or with
                           `weight_packed` I32 [ceil(N * bits / 32), G]
    `x.weight_g_idx`       I32 [K]: the group of each column, -1 for "in order"
    `x.weight_shape`       [N, K] of a packed weight

    weight[n, k] = (value[n, k] - zero[n, g]) * scale[n, g]

Packed values are offset by half their range: 0 stands for -8 or -128. The first value is in the
lowest bits of a word, along the columns; zeros are packed along the rows. The product is rounded to
the scale's dtype. Source: `unpack_from_int32` and `dequantize` of compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_kernels.interface.quantised_matrix import (
    INT8,
    OFFSET4,
    OFFSET8,
    MatrixForm,
    QuantisedMatrix,
    transposed_bytes,
)
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.checkpoint import FLOAT_DTYPES, Checkpoint, Shape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.formats.fp8 import fp8_matrix
from moe_serve.model.formats.weight_format import matrix_shape, present, scale_format, stem_of

_LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One config group: the storage of its targets' weights."""

    targets: tuple[str, ...]
    bits: int
    is_float: bool
    is_symmetric: bool
    strategy: str  # one of _STRATEGIES: the weights that share a scale
    group_size: int  # for strategy "group"
    block: tuple[int, int]  # rows and columns, for strategy "block"

    @property
    def name(self) -> str:
        sharing = {
            "tensor": "matrices",
            "channel": "rows",
            "group": f"groups of {self.group_size}",
            "block": f"blocks of {self.block[0]}x{self.block[1]}",
        }
        return f"{'fp' if self.is_float else 'int'}{self.bits} {sharing[self.strategy]}"


def scheme_of(schemes: Sequence[Scheme], module: str) -> Scheme | None:
    """Returns the scheme that names the module, else one whose pattern matches, else that of all
    `Linear`s.

    Patterns start with `re:` and must match from the start of the module's name.
    """
    for scheme in schemes:
        if module in scheme.targets:
            return scheme
    for scheme in schemes:
        patterns = (t.removeprefix("re:") for t in scheme.targets if t.startswith("re:"))
        if any(re.match(pattern, module) for pattern in patterns):
            return scheme
    return next((scheme for scheme in schemes if "Linear" in scheme.targets), None)


def schemes_from(config: HFConfig) -> tuple[Scheme, ...]:
    """Reads and checks all groups; CheckpointError for a layout or a strategy that is not
    supported.
    """
    for key in ("transform_config", "sparsity_config"):
        other = config.get(key) or {}
        if not isinstance(other, dict) or (other and other.get("format") != "dense"):
            raise config.error(key, "is not served; only weights may be quantised")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise config.error("config_groups", f"must be an object of objects, is {groups!r}")
    schemes = []
    for name, group in groups.items():
        section = HFConfig(group, f"{config.source}: {name}")
        layout = section.get("format") or config.get("format")
        if layout not in _LAYOUTS:
            raise section.error("format", f"is {layout!r}; supported are {', '.join(_LAYOUTS)}")
        if section.get("weights") is not None:
            schemes.append(_scheme(section, str(layout)))
    return tuple(schemes)


def _scheme(section: HFConfig, layout: str) -> Scheme:
    weights = section.get("weights")
    if not isinstance(weights, dict):
        raise section.error("weights", f"must be an object, is {weights!r}")
    config = HFConfig(weights, f"{section.source}: weights")
    bits, kind = config.positive_int("num_bits", default=8), config.get("type", "int")
    if kind == "float":
        config.require("num_bits", 8, default=8)
    elif kind != "int" or bits not in (4, 8):
        raise config.error("num_bits", f"is {bits!r} of {kind!r}; supported are 4 and 8 of 'int'")
    if kind == "float" and layout in ("pack-quantized", "int-quantized"):
        raise config.error("type", f"is 'float', which {layout} does not support")
    size = config.get("group_size")
    strategy = config.get("strategy") or _implied_strategy(size)
    if strategy not in _STRATEGIES:
        raise config.error("strategy", f"is {strategy!r}; supported are {', '.join(_STRATEGIES)}")
    return Scheme(
        targets=_targets(section),
        bits=bits,
        is_float=kind == "float",
        is_symmetric=bool(config.get("symmetric", True)),
        strategy=strategy,
        group_size=config.positive_int("group_size") if strategy == "group" else 0,
        block=_block(config) if strategy == "block" else (0, 0),
    )


def _implied_strategy(group_size: Any) -> str:
    return "tensor" if group_size is None else "channel" if group_size == -1 else "group"


def _targets(section: HFConfig) -> tuple[str, ...]:
    targets = section.get("targets")
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise section.error("targets", f"must be a list of names, is {targets!r}")
    for target in targets:
        try:
            re.compile(target.removeprefix("re:"))
        except (re.error, OverflowError, RecursionError) as error:
            raise section.error(
                "targets", f"has {target!r}, which is not a valid pattern: {error}"
            ) from None
    return tuple(targets)


def _block(config: HFConfig) -> tuple[int, int]:
    block = config.get("block_structure")
    if isinstance(block, str):  # "128x128", an older notation
        block = [int(n) if n.isdecimal() else 0 for n in block.split("x")]
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(isinstance(n, int) and n > 0 for n in block):
        raise config.error("block_structure", f"must be two positive integers, is {block!r}")
    return block[0], block[1]


def unknown_module(source: str, stored: str) -> CheckpointError:
    return CheckpointError(
        f"{source}: no config_groups entry has targets that fit tensor {stored}."
    )


_PARTS = ("packed", "scale", "zero_point", "g_idx", "shape")
_PACKED_TABLES = {4: OFFSET4, 8: OFFSET8}


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """compressed-tensors weights. `source` is the location in the config, for messages."""

    schemes: tuple[Scheme, ...]
    source: str

    @property
    def name(self) -> str:
        kinds = dict.fromkeys(scheme.name for scheme in self.schemes)
        return "compressed-tensors " + " and ".join(kinds)

    def parts(self, checkpoint: Checkpoint, name: str) -> tuple[str, ...]:
        stem = stem_of(name)
        if stem is None or not present(checkpoint, (name, name + "_packed")):
            return ()
        return present(checkpoint, (name, *(f"{name}_{part}" for part in _PARTS)))

    def expect(self, checkpoint: Checkpoint, name: str, shape: Shape) -> None:
        packed = name + "_packed"
        stored = packed if packed in checkpoint else name
        scheme = self._scheme(name, stored)
        num_rows, num_columns = matrix_shape(checkpoint, stored, shape, 1)
        implied_by = f"{scheme.name} of a weight {list(shape)}"
        if stored == packed:
            if scheme.is_float:
                raise unknown_module(self.source, stored)
            words = (num_rows, _words(num_columns, scheme.bits))
            checkpoint.expect(packed, [words], ["I32"], implied_by)
            checkpoint.expect(name + "_shape", [(2,)], ["I32", "I64"], implied_by)
        else:
            dtype = "F8_E4M3" if scheme.is_float else "I8"
            checkpoint.expect(name, [shape], [dtype], implied_by)
        scales = _scale_shapes(scheme, num_rows, num_columns)
        found = checkpoint.expect(name + "_scale", scales, FLOAT_DTYPES, implied_by)
        if not scheme.is_symmetric:
            zeros = found.shape
            if stored == packed and checkpoint.header(name + "_zero_point").dtype == "I32":
                zeros = (_words(num_rows, scheme.bits), scales[-1][-1])
            dtypes = ("I8", "I32") if stored == packed else ("I8",)
            checkpoint.expect(name + "_zero_point", [zeros], dtypes, implied_by)
        if scheme.strategy == "group" and name + "_g_idx" in checkpoint:
            checkpoint.expect(name + "_g_idx", [(num_columns,)], ["I32", "I64"], implied_by)

    def matrix(
        self, checkpoint: Checkpoint, name: str, shape: Shape, expert: int | None
    ) -> QuantisedMatrix:
        is_packed = name + "_packed" in checkpoint
        scheme = self._scheme(name, name)
        form, group_of_K = self._form(checkpoint, name, shape[1])
        scale = checkpoint.view(name + "_scale")
        if scheme.is_float:
            return fp8_matrix(checkpoint.view(name), scale, form, scale.dtype)
        if is_packed:
            _check_shape(checkpoint, name, shape)
        stored = checkpoint.view(name + "_packed" if is_packed else name)
        if scheme.strategy == "block":
            scale = scale.repeat_interleave(scheme.block[0], dim=0)[: shape[0]]
        return QuantisedMatrix(
            form=form,
            bytes_NB=stored.view(torch.uint8),
            table=_PACKED_TABLES[scheme.bits] if is_packed else INT8,
            num_columns=shape[1],
            scales_NG=scale if scale.dim() == 2 else scale.reshape(1, 1),
            zeros_NG=None if scheme.is_symmetric else _zeros(checkpoint, name, scheme, shape[0]),
            group_of_K=group_of_K,
            product_dtype=scale.dtype,
        )

    def form(
        self, checkpoint: Checkpoint, name: str, shape: Shape, expert: int | None
    ) -> MatrixForm:
        return self._form(checkpoint, name, shape[1])[0]

    def _form(
        self, checkpoint: Checkpoint, name: str, num_columns: int
    ) -> tuple[MatrixForm, Tensor | None]:
        """Returns the form, and the group of each column if groups are not made of neighbours."""
        scheme = self._scheme(name, name)
        group_of_K = _shuffled_groups(checkpoint, name, scheme, num_columns)
        rows, columns = {
            "tensor": (0, 0),
            "channel": (1, 0),
            "group": (1, scheme.group_size),
            "block": scheme.block,
        }[scheme.strategy]
        form = MatrixForm(
            values="e4m3" if scheme.is_float else "int4" if scheme.bits == 4 else "int8",
            group=columns,
            block_rows=rows,
            has_zeros=not scheme.is_symmetric,
            is_shuffled=group_of_K is not None,
            scales=scale_format(checkpoint, name + "_scale"),
        )
        return form, group_of_K

    def _scheme(self, name: str, stored: str) -> Scheme:
        scheme = scheme_of(self.schemes, name.removesuffix(".weight"))
        if scheme is None:
            raise unknown_module(self.source, stored)
        return scheme


def _words(num_values: int, bits: int) -> int:
    """Returns the number of int32 words for the values: 32 // bits in each, the last one padded."""
    return -(-num_values // (32 // bits))


def _scale_shapes(scheme: Scheme, num_rows: int, num_columns: int) -> list[Shape]:
    if scheme.strategy == "tensor":
        return [(), (1,), (1, 1)]
    if scheme.strategy == "channel":
        return [(num_rows, 1)]
    if scheme.strategy == "group":
        return [(num_rows, -(-num_columns // scheme.group_size))]
    return [(-(-num_rows // scheme.block[0]), -(-num_columns // scheme.block[1]))]


def _shuffled_groups(
    checkpoint: Checkpoint, name: str, scheme: Scheme, num_columns: int
) -> Tensor | None:
    """Returns the group of each column; None if neighbours form groups."""
    if scheme.strategy != "group" or name + "_g_idx" not in checkpoint:
        return None
    in_order_K = torch.arange(num_columns) // scheme.group_size
    group_of_K = checkpoint.view(name + "_g_idx").long()
    if group_of_K.min() < 0 or torch.equal(group_of_K, in_order_K):
        return None
    if group_of_K.max() > in_order_K[-1]:
        raise CheckpointError(
            f"{checkpoint.path(name + '_g_idx')}: tensor {name}_g_idx names groups "
            f"outside the {int(in_order_K[-1]) + 1} that exist."
        )
    return group_of_K


def _zeros(checkpoint: Checkpoint, name: str, scheme: Scheme, num_rows: int) -> Tensor:
    zeros = checkpoint.view(name + "_zero_point")
    if zeros.dtype == torch.int8:
        most = 2 ** (scheme.bits - 1) - 1
        if zeros.numel() and (zeros.min() < -most - 1 or zeros.max() > most):
            raise CheckpointError(
                f"{checkpoint.path(name + '_zero_point')}: tensor {name}_zero_point has values "
                f"outside [{-most - 1}, {most}], the range of int{scheme.bits}: convert it again."
            )
        return zeros if zeros.dim() == 2 else zeros.reshape(1, 1)
    zeros_GN = _PACKED_TABLES[scheme.bits].decode(transposed_bytes(zeros))
    return zeros_GN[:, :num_rows].t().contiguous().to(torch.int8)


def _check_shape(checkpoint: Checkpoint, name: str, shape: Shape) -> None:
    """Checks the stored shape: the words alone do not tell where the padding starts."""
    stored = checkpoint.view(name + "_shape").tolist()
    if stored != list(shape):
        raise CheckpointError(
            f"{checkpoint.path(name + '_shape')}: tensor {name}_shape says {stored}, but "
            f"config.json implies {list(shape)}."
        )


def compressed_tensors_from(config: HFConfig) -> CompressedTensors:
    return CompressedTensors(schemes_from(config), config.source)
