"""Reads the matrices of a LoRA in PEFT's format.

N outputs, K inputs, R rank, E experts, F width of an expert, D model width.

PEFT stores the experts of a layer, if they are one module with two tensors, as
A [E R, in], expert slowest, and B [out, E R], expert fastest. Which of the tensor's dimensions is
`in` changed between its versions; it is known from the shapes, unless the dimensions are equal.
Of two tensors that are adapted in one module, one is stored under `<module>.base_layer`.

SGLang and Megatron-Bridge stack the experts: A [E, R, in], B [E, out, R], with 1 in place of E for
a matrix that all experts share (shared-outer), under the name of the projection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_serve.adapters.adapter_files import AdapterFiles
from moe_serve.adapters.peft_config import PeftConfig
from moe_serve.adapters.targets import AdaptedMatrix, AdapterTargets, FusedExperts
from moe_serve.errors import CheckpointError

_STACKED = {f"{part}_proj": part for part in ("gate", "up", "gate_up", "down")}
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankMatrices:
    """The addition scale * B A to a matrix."""

    a_RK: Tensor
    b_NR: Tensor
    scale: float

    def delta(self) -> Tensor:
        """Returns the addition [N, K] in fp32."""
        return self.scale * (self.b_NR.float() @ self.a_RK.float())


Wants = Callable[[AdaptedMatrix], bool]  # whether this process holds the change to a matrix
Addition = tuple[AdaptedMatrix, LowRankMatrices | None]  # None: it is not held here


def read_lora(
    files: AdapterFiles, config: PeftConfig, targets: AdapterTargets, wants: Wants
) -> Iterator[Addition]:
    """Yields all additions, and reads those that are wanted. Raises CheckpointError with the file
    and the tensor."""
    pairs: dict[str, dict[str, str]] = {}
    for name, where in files.headers():
        found = _NAME.fullmatch(name)
        if found is None:
            raise CheckpointError(
                f"{where} is not named base_model.model.<module>.lora_A.weight or lora_B.weight: "
                "only LoRA matrices of PEFT are read."
            )
        pairs.setdefault(found["module"], {})[found["side"]] = name
    if not pairs:
        raise CheckpointError(f"{files.folder} has no LoRA matrices.")
    for module, sides in pairs.items():
        if len(sides) != 2:
            (only,) = sides.values()
            raise CheckpointError(f"{files.folder}: tensor {only} has no counterpart A or B.")
        fused = targets.fused(module.removesuffix(".base_layer"))
        parent, _, last = module.rpartition(".")
        stacked = targets.fused(parent) if last in _STACKED else None
        if stacked is not None:
            reader = _FusedReader(files, config, targets, stacked)
            yield from reader.read_stacked(module, _STACKED[last], sides, wants)
        elif fused is None:
            yield _plain(files, config, targets, wants, module, sides)
        else:
            yield from _FusedReader(files, config, targets, fused).read(module, sides, wants)


def _plain(
    files: AdapterFiles,
    config: PeftConfig,
    targets: AdapterTargets,
    wants: Wants,
    module: str,
    sides: Mapping[str, str],
) -> Addition:
    target = targets.target(module, f"{files.folder}: tensor {sides['A']}")
    rank, (num_outputs, num_inputs) = config.rank_of(module), target.shape
    _check_shape(files, sides["A"], (rank, num_inputs))
    _check_shape(files, sides["B"], (num_outputs, rank))
    if not wants(target):
        return target, None
    a_RK, b_NR = (_finite(files, sides[side]) for side in "AB")
    return target, LowRankMatrices(a_RK=a_RK, b_NR=b_NR, scale=config.scale_of(module))


def _check_shape(files: AdapterFiles, name: str, wanted: tuple[int, ...]) -> None:
    shape = files.shape(name)
    if shape != wanted:
        raise CheckpointError(
            f"{files.folder}: tensor {name} has the shape {list(shape)}, but the rank and the base "
            f"model need {list(wanted)}."
        )


def _finite(files: AdapterFiles, name: str) -> Tensor:
    tensor = files.read(name)
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{files.folder}: tensor {name} has values that are not finite.")
    return tensor


class _FusedReader:
    """Reads the additions to the experts of one layer."""

    def __init__(
        self, files: AdapterFiles, config: PeftConfig, targets: AdapterTargets, fused: FusedExperts
    ) -> None:
        self._files, self._config, self._fused = files, config, fused
        spec = targets.spec
        self._num_experts = spec.router.num_experts
        width, hidden = spec.width, spec.expert_width
        self._sizes = {"gate_up": (2 * hidden, width), "down": (width, hidden)}

    def read(self, module: str, sides: Mapping[str, str], wants: Wants) -> Iterator[Addition]:
        """Yields the additions to one of the two tensors, expert by expert."""
        where = f"{self._files.folder}: tensor {sides['A']}"
        shapes = self._files.shape(sides["A"]), self._files.shape(sides["B"])
        if any(len(shape) != 2 for shape in shapes):
            raise CheckpointError(f"{where} and its B must be matrices.")
        (num_rows, num_inputs), (num_outputs, num_columns) = shapes
        part, is_turned = self._orientation(where, num_outputs, num_inputs)
        parameter = f"{module.removesuffix('.base_layer')}.{part}_proj"
        rank, scale = self._config.rank_of(parameter), self._config.scale_of(parameter)
        if num_rows == rank != self._num_experts * rank or num_columns == rank:
            raise CheckpointError(
                f"{where} has one matrix for all experts (shared-outer), but two dimensions: save "
                "it with three, [1, r, in], under the name of the projection."
            )
        if num_rows != num_columns or num_rows != self._num_experts * rank:
            raise CheckpointError(
                f"{where} has {num_rows} rows and its B has {num_columns} columns, but rank {rank} "
                f"and {self._num_experts} experts need {self._num_experts * rank} of both."
            )
        targets = [self._targets(part, expert) for expert in range(self._num_experts)]
        if not any(wants(target) for each in targets for target in each):
            yield from ((target, None) for each in targets for target in each)
            return
        a_ERK = _finite(self._files, sides["A"]).view(self._num_experts, rank, num_inputs)
        b_NRE = _finite(self._files, sides["B"]).view(num_outputs, rank, self._num_experts)
        for expert, each in enumerate(targets):
            a_RK, b_NR = a_ERK[expert], b_NRE[:, :, expert]
            if is_turned:
                a_RK, b_NR = b_NR.T, a_RK.T
            yield from self._additions(part, each, a_RK, b_NR, scale, wants)

    def read_stacked(
        self, module: str, part: str, sides: Mapping[str, str], wants: Wants
    ) -> Iterator[Addition]:
        """Yields the additions of stacked matrices, expert by expert."""
        rank, scale = self._config.rank_of(module), self._config.scale_of(module)
        width, hidden = self._sizes["down"]
        sizes = self._sizes | {"gate": (hidden, width), "up": (hidden, width)}
        num_outputs, num_inputs = sizes[part]
        counts = [
            self._count(sides["A"], (rank, num_inputs)),
            self._count(sides["B"], (num_outputs, rank)),
        ]
        targets = [self._targets(part, expert) for expert in range(self._num_experts)]
        if not any(wants(target) for each in targets for target in each):
            yield from ((target, None) for each in targets for target in each)
            return
        a_ERK, b_ENR = (_finite(self._files, sides[side]) for side in "AB")
        for expert, each in enumerate(targets):
            a_RK, b_NR = a_ERK[expert % counts[0]], b_ENR[expert % counts[1]]
            yield from self._additions(part, each, a_RK, b_NR, scale, wants)

    def _count(self, name: str, wanted: tuple[int, int]) -> int:
        """Returns how many matrices are stacked: one for each expert, or one for all."""
        shape = self._files.shape(name)
        if len(shape) != 3 or shape[0] not in (1, self._num_experts) or shape[1:] != wanted:
            needed = [self._num_experts, *wanted]
            raise CheckpointError(
                f"{self._files.folder}: tensor {name} has the shape {list(shape)}, but the rank "
                f"and the base model need {needed}, or 1 in place of {self._num_experts}."
            )
        return shape[0]

    def _additions(
        self,
        part: str,
        targets: Sequence[AdaptedMatrix],
        a_RK: Tensor,
        b_NR: Tensor,
        scale: float,
        wants: Wants,
    ) -> Iterator[Addition]:
        for target, rows_NR in zip(targets, self._rows(part, b_NR), strict=True):
            addition = LowRankMatrices(a_RK=a_RK, b_NR=rows_NR, scale=scale)
            yield target, addition if wants(target) else None

    def _orientation(self, where: str, num_outputs: int, num_inputs: int) -> tuple[str, bool]:
        """Returns the tensor that A and B belong to, and whether they are those of its
        transpose."""
        fits = [
            (part, is_turned)
            for part, size in self._sizes.items()
            for is_turned in (False, True)
            if (num_outputs, num_inputs) == (size[::-1] if is_turned else size)
        ]
        if len(fits) == 1:
            return fits[0]
        sizes = ", ".join(f"{part} {list(size)}" for part, size in self._sizes.items())
        why = "fits more than one of" if fits else "fits none of"
        raise CheckpointError(
            f"{where} with B is an addition of {num_outputs} outputs and {num_inputs} inputs, "
            f"which {why} the experts' matrices ({sizes}) in one orientation: save the adapter "
            "with one module for each expert."
        )

    def _targets(self, part: str, expert: int) -> list[AdaptedMatrix]:
        """Returns the matrices of an expert that one of the two tensors contains."""
        width, hidden = self._sizes["down"]
        names = ("gate", "up") if part == "gate_up" else (part,)
        shapes = {each: (width, hidden) if each == "down" else (hidden, width) for each in names}
        layer = self._fused.layer
        return [
            AdaptedMatrix(layer=layer, kind="expert", part=name, shape=shape, expert=expert)
            for name, shape in shapes.items()
        ]

    def _rows(self, part: str, b_NR: Tensor) -> tuple[Tensor, ...]:
        """Returns the rows of B that belong to each of these matrices."""
        if part != "gate_up":
            return (b_NR,)
        if self._fused.is_interleaved:
            return b_NR[0::2], b_NR[1::2]
        half = len(b_NR) // 2
        return b_NR[:half], b_NR[half:]
