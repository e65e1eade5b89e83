"""Builds the experts and MLPs of a BitDelta adapter: signs beside the base model's matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from experts.virtual_experts import AdapterExperts
from moe_kernels.interface.kernels import ExpertBank
from moe_kernels.interface.sign_matrix import SignedExpert, SignMatrix
from moe_kernels.interface.signed_kernels import SignedBank, SignedKernels
from moe_serve.adapters.bitdelta.tensors import BitDeltaTensors
from moe_serve.adapters.load_rests import LoadRests
from moe_serve.adapters.targets import AdaptedMatrix
from moe_serve.model.checkpoint.manifest import Table, expert_table, feed_forward_table
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.gather import GatheredMLP

_PARTS = ("gate", "up", "down")


class SignedExperts:
    """Makes the additions to experts. The base model's experts may be in any place: they are not
    read."""

    def __init__(self, loader: ModelLoader, kernels: SignedKernels, rests: LoadRests) -> None:
        self._loader, self._kernels, self._rests = loader, kernels, rests
        self._whole_mlps: dict[int, ExpertBank] = {}  # of shards, for all adapters

    def routed(
        self, layer: int, tensors: BitDeltaTensors, held: Collection[int] | None
    ) -> tuple[AdapterExperts | None, int]:
        """Returns the experts of a layer, and the bytes of those that are held here; None: all are
        the base model's. `held`: those that a process holds; None: all."""
        spec = self._loader.spec
        biases = _expert_biases(self._loader, layer, tensors)
        changed = {t.expert for t in tensors.signs if t.layer == layer and t.kind == "expert"}
        if biases:
            changed = set(range(spec.router.num_experts))
        if not changed:
            return None, 0
        own = sorted(changed if held is None else changed & set(held))
        is_own_E = torch.zeros(spec.router.num_experts + 1, dtype=torch.bool)
        is_own_E[torch.tensor(sorted(changed))] = True
        added = {expert: self._expert(layer, expert, tensors, biases) for expert in own}
        signs = self._kernels.expert_signs(added, is_own_E[:-1], self._rests) if own else None
        experts = AdapterExperts(
            bank=None, is_own_E=is_own_E.to(self._loader.device), additions=signs
        )
        return experts, 0 if signs is None else signs.num_bytes

    def mlp(
        self, layer: int, base: ExpertBank | GatheredMLP, tensors: BitDeltaTensors
    ) -> tuple[ExpertBank | GatheredMLP, int]:
        """Returns the MLP that all rows of a layer pass, and the bytes of its signs."""
        table = _mlp_table(self._loader, layer)
        matrices = {
            t.part: tensors.matrix(t) for t in tensors.signs if t.layer == layer and t.kind == "mlp"
        }
        deltas = _bias_deltas(self._loader, table, tensors)
        if not matrices and not deltas:
            return base, 0
        fused = matrices.pop("gate_up", None)
        if fused is not None:
            half = fused.num_rows // 2
            matrices |= {"gate": fused.rows(slice(half)), "up": fused.rows(slice(half, None))}
        if "gate_up" in deltas:
            deltas["gate"], deltas["up"] = deltas.pop("gate_up").chunk(2)
        shapes = self._mlp_shapes(table)
        added = self._here(
            {p: with_bias(matrices.get(p), deltas.get(p), shapes[p]) for p in _PARTS}
        )
        if isinstance(base, GatheredMLP):
            base = self._whole_mlp(layer, table)
        signs = self._kernels.expert_signs({0: added}, torch.ones(1, dtype=torch.bool))
        return SignedBank(base, signs), signs.num_bytes

    def _whole_mlp(self, layer: int, table: Table) -> ExpertBank:
        """Returns the whole MLP of the base model on a shard, which holds a part only. A value has
        the same bits in both."""
        if layer not in self._whole_mlps:
            weights = self._loader.live_experts().dense(table)
            bank = self._loader.kernels.experts([weights], self._loader.spec.activation)
            self._whole_mlps[layer] = bank
        return self._whole_mlps[layer]

    def _mlp_shapes(self, table: Table) -> Mapping[str, tuple[int, ...]]:
        if "gate_up" in table:
            rows, width = table["gate_up"].shape
            return {
                "gate": (rows // 2, width),
                "up": (rows // 2, width),
                "down": table["down"].shape,
            }
        return {part: table[part].shape for part in _PARTS}

    def _expert(
        self, layer: int, expert: int, tensors: BitDeltaTensors, biases: Mapping[str, Tensor]
    ) -> SignedExpert:
        self._rests()
        spec = self._loader.spec
        parts: dict[str, SignMatrix | None] = {}
        for part in _PARTS:
            shape = (spec.expert_width, spec.width)
            shape = shape[::-1] if part == "down" else shape
            target = AdaptedMatrix(
                layer=layer, kind="expert", part=part, shape=shape, expert=expert
            )
            bias = biases[part][expert] if part in biases else None
            parts[part] = with_bias(tensors.matrix(target), bias, shape)
        return self._here(parts)

    def _here(self, parts: Mapping[str, SignMatrix | None]) -> SignedExpert:
        """Returns the additions to an expert, on the device of the base model."""
        device = self._loader.device
        moved = {part: None if each is None else each.to(device) for part, each in parts.items()}
        return SignedExpert(**moved)


def with_bias(
    matrix: SignMatrix | None, bias_N: Tensor | None, shape: tuple[int, ...]
) -> SignMatrix | None:
    """Returns signs with an addition to the bias, also if there are no signs."""
    if bias_N is None:
        return matrix
    return replace(matrix or no_signs(shape), bias_N=bias_N.contiguous())


def no_signs(shape: tuple[int, ...]) -> SignMatrix:
    """Returns signs that add nothing."""
    bits = torch.zeros(shape[0], -(-shape[1] // 8), dtype=torch.uint8)
    return SignMatrix(bits_NB=bits, num_columns=shape[1], scales_N=torch.zeros(1))


def _expert_biases(
    loader: ModelLoader, layer: int, tensors: BitDeltaTensors
) -> Mapping[str, Tensor]:
    """Returns the changes to the biases of all experts, [E, N] by part; empty: there are none."""
    names, spec = loader.names, loader.spec
    if not spec.has_expert_bias or not spec.layers[layer].is_sparse:
        return {}
    layout = next(layout for layout in names.experts if not layout.gate)
    table, found = expert_table(layout, spec, layer, 0), {}
    for key in ("gate_up", "down"):
        own = tensors.tensor(table[f"{key}_bias"], torch.float32)
        if own is not None:
            found[key] = own - loader.tensor(table[f"{key}_bias"]).float()
    if "gate_up" in found:
        both = found.pop("gate_up")
        half = both.shape[1] // 2
        halves = (slice(half), slice(half, None))
        if layout.is_interleaved:
            halves = (slice(0, None, 2), slice(1, None, 2))
        found["gate"], found["up"] = (both[:, own] for own in halves)
    return found


def _mlp_table(loader: ModelLoader, layer: int) -> Table:
    table = feed_forward_table(loader.names, loader.spec, layer)
    owner = "shared." if "router" in table else "dense."
    return {k.removeprefix(owner): v for k, v in table.items() if k.startswith(owner)}


def _bias_deltas(loader: ModelLoader, table: Table, tensors: BitDeltaTensors) -> dict[str, Tensor]:
    """Returns the changes to biases, by the matrix that they belong to."""
    found = {}
    for key, stored in table.items():
        own = tensors.tensor(stored, torch.float32) if key.endswith("_bias") else None
        if own is not None:
            found[key.removesuffix("_bias")] = own - loader.tensor(stored).float()
    return found
