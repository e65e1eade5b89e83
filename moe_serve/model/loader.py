"""From a checkpoint folder to the two stages. Each stage reads only the tensors it needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from experts.expert_stage import ExpertStage
from moe_kernels.attention_shape import QKNormWeights
from moe_kernels.choice import KernelsName, choose_kernels
from moe_kernels.kernels import ExpertBank, ExpertWeights, Kernels
from moe_serve.errors import CheckpointError
from moe_serve.model.attention_stage import AttentionLayer, AttentionStage
from moe_serve.model.checkpoint import Checkpoint
from moe_serve.model.families import Family, family_of
from moe_serve.model.hf_config import HFConfig
from moe_serve.model.spec import ModelSpec
from moe_serve.model.tensor_names import bias_of

LoadProgress = Callable[[int, int], None]  # (tensors read, tensors in all)


class ModelLoader:
    """Reads one checkpoint. Construction reads the config and checks every tensor's header."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        kernels: KernelsName = "auto",
        progress: LoadProgress | None = None,
    ) -> None:
        config = HFConfig.read(folder)
        self._family: Family = family_of(config)
        self.spec: ModelSpec = self._family.read_spec(config)
        _check_sizes(self.spec, config)
        self.dtype: torch.dtype = dtype or getattr(torch, self.spec.dtype)
        self.device = device or torch.device("cpu")
        self.kernels: Kernels = choose_kernels(self.device, self.dtype, kernels)
        self._checkpoint = Checkpoint(folder)
        shapes = dict(_attention_shapes(self._family, self.spec))
        shapes |= dict(_expert_shapes(self._family, self.spec))
        self._checkpoint.check(shapes)
        self._lock = threading.Lock()
        self._total, self._done, self._progress = len(shapes), 0, progress

    def attention_stage(self, max_positions: int) -> AttentionStage:
        """Everything but the routed experts."""
        names, spec = self._family.names, self.spec
        embedding = self._read(names.embedding)
        head = embedding if spec.is_head_tied else self._read(names.head)
        return AttentionStage(
            spec,
            self.kernels,
            embedding=embedding,
            layers=[self._attention_layer(layer) for layer in range(spec.num_layers)],
            final_norm=self._read(names.final_norm),
            head=self.kernels.linear(head),
            max_positions=max_positions,
        )

    def expert_stage(self) -> ExpertStage:
        """All routed experts of all layers."""
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # copying is what takes time
            return ExpertStage(list(pool.map(self._bank, range(self.spec.num_layers))))

    def _attention_layer(self, layer: int) -> AttentionLayer:
        n = self._family.names

        def read(name: str) -> Tensor:
            return self._read(name.format(layer=layer))

        def bias(*names: str) -> Tensor:
            return torch.cat([read(bias_of(name)) for name in names])

        linear, spec = self.kernels.linear, self.spec
        qkv_bias = bias(n.q, n.k, n.v) if spec.has_attention_bias else None
        output_bias = bias(n.o) if spec.has_output_bias else None
        has_norm = spec.attention.qk_norm != "none"
        return AttentionLayer(
            attention_norm=read(n.attention_norm),
            qkv=linear(torch.cat([read(n.q), read(n.k), read(n.v)]), qkv_bias),
            qk_norm=QKNormWeights(read(n.q_norm), read(n.k_norm)) if has_norm else None,
            output=linear(read(n.o), output_bias),
            moe_norm=read(n.moe_norm),
            router=linear(read(n.router)),
        )

    def _bank(self, layer: int) -> ExpertBank:
        n = self._family.names
        return self.kernels.experts(
            [
                ExpertWeights(
                    *(
                        self._read(name.format(layer=layer, expert=expert))
                        for name in (n.expert_gate, n.expert_up, n.expert_down)
                    )
                )
                for expert in range(self.spec.router.num_experts)
            ]
        )

    def _read(self, name: str) -> Tensor:
        tensor = self._checkpoint.tensor(name, self.dtype).to(self.device)
        with self._lock:
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, self._total)
        return tensor


def _attention_shapes(family: Family, spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    n, a, d = family.names, spec.attention, spec.width
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    yield n.embedding, (spec.vocab_size, d)
    yield n.final_norm, (d,)
    if not spec.is_head_tied:
        yield n.head, (spec.vocab_size, d)
    shapes: dict[str, tuple[int, ...]] = {n.q: (q, d), n.k: (kv, d), n.v: (kv, d), n.o: (d, q)}
    if spec.has_attention_bias:
        shapes |= {bias_of(n.q): (q,), bias_of(n.k): (kv,), bias_of(n.v): (kv,)}
    if spec.has_output_bias:
        shapes[bias_of(n.o)] = (d,)
    if a.qk_norm != "none":
        is_row = a.qk_norm == "row"
        shapes |= {
            n.q_norm: (q if is_row else a.head_dim,),
            n.k_norm: (kv if is_row else a.head_dim,),
        }
    shapes |= {n.attention_norm: (d,), n.moe_norm: (d,), n.router: (spec.router.num_experts, d)}
    for layer in range(spec.num_layers):
        for name, shape in shapes.items():
            yield name.format(layer=layer), shape


def _expert_shapes(family: Family, spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    n, d, f = family.names, spec.width, spec.expert_width
    for layer in range(spec.num_layers):
        for expert in range(spec.router.num_experts):
            for name, shape in (
                (n.expert_gate, (f, d)),
                (n.expert_up, (f, d)),
                (n.expert_down, (d, f)),
            ):
                yield name.format(layer=layer, expert=expert), shape


def _check_sizes(spec: ModelSpec, config: HFConfig) -> None:
    a, r = spec.attention, spec.router
    if a.num_heads % a.num_kv_heads:
        raise CheckpointError(
            f"{config.source}: num_attention_heads ({a.num_heads}) must be a multiple of "
            f"num_key_value_heads ({a.num_kv_heads})."
        )
    if r.top_k > r.num_experts:
        raise CheckpointError(
            f"{config.source}: num_experts_per_tok ({r.top_k}) exceeds num_experts "
            f"({r.num_experts})."
        )
    wrong = [i for i in spec.eos_token_ids if i >= spec.vocab_size]
    if wrong:
        raise CheckpointError(
            f"{config.source}: eos_token_id {wrong[0]} is outside the vocabulary of "
            f"{spec.vocab_size} tokens."
        )
    if a.head_dim % 2:
        raise CheckpointError(f"{config.source}: head_dim ({a.head_dim}) must be even.")
