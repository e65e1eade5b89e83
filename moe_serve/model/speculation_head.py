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

from moe_kernels.interface.kernels import ExpertWeights, GatedActivation, Kernels, Linear
from moe_serve.errors import CheckpointError
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.feed_forward import DenseMLP
from moe_serve.regular_file import regular_file

HEAD_FILE = "head.safetensors"
_BLOCK = re.compile(r"blocks\.(\d+)\.(norm|gate|up|down)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Norm, SwiGLU and residual."""

    norm_D: Tensor
    mlp: DenseMLP


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
        output head."""
        like = embedding_VD
        placed = {name: t.to(like.device, like.dtype) for name, t in weights.items()}
        self._kernels, self._eps = kernels, spec.norm_eps
        self._embedding_VD, self._output = embedding_VD, output
        self._state_norm_D, self._token_norm_D = placed["state_norm"], placed["token_norm"]
        self._output_norm_D = placed["output_norm"]
        self._state_in = kernels.linear(placed["state_in"])
        self._token_in = kernels.linear(placed["token_in"])
        self._blocks = tuple(_block(placed, index, kernels) for index in range(_num_blocks(weights)))

    @classmethod
    def load(
        cls, folder: Path, spec: ModelSpec, kernels: Kernels, embedding_VD: Tensor, output: Linear
    ) -> SpeculationHead:
        """Read the head in a folder. Raises CheckpointError if it is missing or does not fit the
        model."""
        weights = read_head(folder, spec)
        return cls(weights, spec, kernels, embedding_VD, output)

    @torch.inference_mode()
    def draft(self, hidden_SD: Tensor, token_ids_S: Tensor, most: int) -> list[list[int]]:
        """Return `most` tokens for each sequence, each the likeliest behind the one before.

        `hidden_SD`: the residual stream behind the last layer, before the final norm, at the last
        computed position; `token_ids_S`: the token sampled there.
        """
        state_SD, drafted = hidden_SD, list[Tensor]()
        for _ in range(most):
            state_SD = self._step(state_SD, token_ids_S)
            normed_SD = self._kernels.rms_norm(state_SD, self._output_norm_D, self._eps)
            token_ids_S = self._output(normed_SD).argmax(dim=1)
            drafted.append(token_ids_S)
        drafts: list[list[int]] = torch.stack(drafted, dim=1).tolist()
        return drafts

    def _step(self, state_SD: Tensor, token_ids_S: Tensor) -> Tensor:
        norm, eps = self._kernels.rms_norm, self._eps
        token_SD = norm(self._embedding_VD[token_ids_S], self._token_norm_D, eps)
        state_SD = norm(state_SD, self._state_norm_D, eps)
        state_SD = self._state_in(state_SD, self._token_in(token_SD))
        for block in self._blocks:
            out_SD = block.mlp(norm(state_SD, block.norm_D, eps))
            state_SD = self._kernels.add(state_SD, out_SD, None)
        return state_SD


def read_head(folder: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Read a head's tensors. Raises CheckpointError if they are missing or do not fit the model."""
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
    """Return what is wrong with a head's tensors, or None."""
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


def _block(weights: Mapping[str, Tensor], index: int, kernels: Kernels) -> _Block:
    names = (f"blocks.{index}.{part}" for part in ("norm", "gate", "up", "down"))
    norm_D, gate, up, down = (weights[name] for name in names)
    bank = kernels.experts([ExpertWeights(gate, up, down)], GatedActivation())
    return _Block(norm_D=norm_D, mlp=DenseMLP(bank=bank))
