"""Runs a drafting head: a small network that guesses the tokens behind the next one.

A head has no keys and values. Its state is one row: first the model's residual stream behind the
last layer, then the head's own. From the state and the token that follows it a step makes the next
state, and the model's own output head turns that into logits. S sequences, D model width, V
vocabulary, F hidden width of a block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from moe_kernels.interface.head_drafting import ABSENT, DraftBlock, DraftingParts, HeadDrafting
from moe_kernels.interface.kernels import ExpertWeights, GatedActivation, Kernels, Linear
from moe_kernels.interface.quantised_matrix import (
    INT8,
    ROW_GROUP,
    MatrixForm,
    QuantisedMatrix,
    Weight,
)
from moe_kernels.reference.torch_drafting import StepwiseDrafting
from moe_serve.errors import CheckpointError
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.regular_file import regular_file

HEAD_FILE = "head.safetensors"
_MOST_INT8, _LEAST_SCALE = 127, 1e-30
_BLOCK = re.compile(r"blocks\.(\d+)\.(norm|gate|up|down)")


@dataclass(frozen=True, slots=True)
class Guess:
    """The tokens guessed for a sequence, and the head's probability of each, in per cent."""

    token_ids: tuple[int, ...]
    confidences: tuple[int, ...]


class SpeculationHead:
    """Drafts tokens for any number of sequences at once."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        spec: ModelSpec,
        kernels: Kernels,
        embedding_VD: Tensor,
        output: Linear,
    ) -> None:
        """`weights` are a head's tensors, whose shapes must fit `spec`; `output` is the model's
        output head. If the kernels have faster products for int8, the head is held in int8,
        with a copy of the output head if it is tied to the embedding."""
        like, faster = embedding_VD, kernels.for_drafts()
        placed = {name: t.to(like.device, like.dtype) for name, t in weights.items()}
        matrices: dict[str, Weight] = {name: t for name, t in placed.items() if t.dim() == 2}
        if faster is not None:
            kernels = faster
            matrices = {name: _in_int8(placed[name]) for name in matrices}
            if spec.is_head_tied:
                output = kernels.linear(_in_int8(embedding_VD))
        parts = DraftingParts(
            embedding_VD=embedding_VD,
            state_norm_D=placed["state_norm"],
            token_norm_D=placed["token_norm"],
            output_norm_D=placed["output_norm"],
            state_in=kernels.linear(matrices["state_in"]),
            token_in=kernels.linear(matrices["token_in"]),
            blocks=tuple(
                _block(placed[f"blocks.{i}.norm"], matrices, i, kernels)
                for i in range(_num_blocks(weights))
            ),
            output=output,
            norm_eps=spec.norm_eps,
        )
        self._drafting: HeadDrafting = kernels.drafting(parts) or StepwiseDrafting(kernels, parts)

    @classmethod
    def load(
        cls, folder: Path, spec: ModelSpec, kernels: Kernels, embedding_VD: Tensor, output: Linear
    ) -> SpeculationHead:
        """Reads the head in a folder. Raises CheckpointError if it is missing or does not fit the
        model."""
        weights = read_head(folder, spec)
        return cls(weights, spec, kernels, embedding_VD, output)

    @classmethod
    def load_for(cls, stage: AttentionStage, folder: Path) -> SpeculationHead:
        """Reads the head in a folder for a loaded model, whose embedding and output head it shares.
        Raises CheckpointError like `load`."""
        return cls.load(folder, stage.spec, stage.kernels, stage.embedding, stage.head)

    @torch.inference_mode()
    def draft(
        self, hidden_SD: Tensor, token_ids_S: Tensor, most: int, least: float = 0.0
    ) -> list[Guess]:
        """Returns at most `most` tokens for each sequence, each the likeliest behind the one
        before. A row's tokens do not depend on its neighbours.

        `hidden_SD`: the residual stream behind the last layer, before the final norm, at the last
        computed position; `token_ids_S`: the token sampled there; `least`: see `HeadDrafting`.
        """
        if most < 1 or not len(token_ids_S):
            return [Guess((), ())] * len(token_ids_S)
        drafts = self._drafting(hidden_SD, token_ids_S, most, least).tolist()
        return [_guess(*draft) for draft in drafts]


def _guess(tokens: list[int], percent: list[int]) -> Guess:
    count = tokens.index(ABSENT) if tokens[-1] == ABSENT else len(tokens)
    return Guess(tuple(tokens[:count]), tuple(percent[:count]))


def read_head(folder: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Reads a head's tensors. Raises CheckpointError if they are missing or do not fit the
    model."""
    path = folder / HEAD_FILE
    try:
        regular_file(path)
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"speculation.head is {str(folder)!r}, but {path} cannot be read ({error}): give a "
            "folder that scripts/export_speculation_head.py has written."
        ) from None
    problem = _misfit(weights, spec)
    if problem is not None:
        raise CheckpointError(
            f"speculation.head is {str(folder)!r}, but its {problem}: give a head that was trained "
            "for this model, or set speculation.method to 'auto' or 'off'."
        )
    return weights


def _misfit(weights: Mapping[str, Tensor], spec: ModelSpec) -> str | None:
    """Returns the fault of a head's tensors, or None."""
    d, num_blocks = spec.width, _num_blocks(weights)
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("state_norm", "token_norm", "output_norm"), (d,)),
        **dict.fromkeys(("state_in", "token_in"), (d, d)),
    }
    for index in range(num_blocks):
        gate = weights.get(f"blocks.{index}.gate")
        f = 0 if gate is None else gate.shape[0]
        shapes |= {f"blocks.{index}.norm": (d,), f"blocks.{index}.down": (d, f)}
        shapes |= dict.fromkeys((f"blocks.{index}.gate", f"blocks.{index}.up"), (f, d))
    for name, shape in shapes.items():
        if name not in weights:
            return f"tensor {name} is missing"
        found = tuple(weights[name].shape)
        if found != shape:
            return f"tensor {name} has the shape {found}, and the model needs {shape}"
    unknown = sorted(weights.keys() - shapes.keys())
    return f"tensor {unknown[0]} is unknown" if unknown else None


def _num_blocks(weights: Mapping[str, Tensor]) -> int:
    found = (_BLOCK.fullmatch(name) for name in weights)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _block(
    norm_D: Tensor, matrices: Mapping[str, Weight], index: int, kernels: Kernels
) -> DraftBlock:
    gate, up, down = (matrices[f"blocks.{index}.{part}"] for part in ("gate", "up", "down"))
    mlp = kernels.experts([ExpertWeights(gate, up, down)], GatedActivation())
    return DraftBlock(norm_D=norm_D, mlp=mlp)


def _in_int8(weight_NK: Tensor) -> Weight:
    """Rounds a matrix to int8 with a scale for each group of a row. A matrix whose width is not a
    multiple of the group size stays as it is."""
    group = next((size for size in (4 * ROW_GROUP, ROW_GROUP) if weight_NK.shape[1] % size == 0), 0)
    if not group:
        return weight_NK
    values_NGC = weight_NK.float().unflatten(1, (-1, group))
    scales_NG = (values_NGC.abs().amax(-1) / _MOST_INT8).clamp_min(_LEAST_SCALE)
    rounded_NK = (values_NGC / scales_NG[:, :, None]).round_().to(torch.int8).flatten(1)
    return QuantisedMatrix(
        form=MatrixForm(values="int8", scales="float32", group=group),
        table=INT8,
        bytes_NB=rounded_NK.view(torch.uint8),
        num_columns=weight_NK.shape[1],
        scales_NG=scales_NG,
    )
