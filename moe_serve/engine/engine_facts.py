"""Describes a built engine: its model, device, memory and ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from moe_serve.config.sections import ClusterConfig, ModelConfig
from moe_serve.engine.opened_model import LoadReport, ServedCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The facts of a loaded engine, for the ready line, `doctor` and the metrics."""

    folder: Path
    family: str
    num_layers: int
    num_experts: int
    top_k: int
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    kernels: str
    cuda_graphs: str | None = None  # the captured sizes, or why there are none; None: no GPU
    weight_format: str  # in the checkpoint
    expert_weights: str  # how a quantised checkpoint's weights are held
    num_threads: int
    num_pages: int
    page_size: int
    kv_bytes: int
    micro_batches: int
    load_seconds: float
    attention_ranks: int = 0  # 0 and 0: everything in one process
    expert_ranks: int = 0
    attention_tp: int = 1  # processes of an attention rank
    kv_dtype: str = "auto"  # of the pages; auto: `dtype`
    expert_memory: str | None = None  # describes the limit; None: all experts are in memory
    cells: tuple[str, ...] = ()  # the shape of each, if there are several; ranks are summed

    @classmethod
    def of(
        cls,
        model: ServedCheckpoint,
        report: LoadReport,
        *,
        page_size: int,
        micro_batches: int,
        load_seconds: float,
        cuda_graphs: str | None = None,
        expert_memory: str | None = None,
        cluster: ClusterConfig | None = None,
    ) -> EngineFacts:
        """Collects the facts. `report` is that of the process or of an attention rank; `cluster` is
        None without ranks.
        """
        spec, num_ranks = model.spec, 0 if cluster is None else cluster.attention_ranks
        return cls(
            folder=model.folder,
            family=spec.family,
            num_layers=spec.num_layers,
            num_experts=spec.router.num_experts,
            top_k=spec.router.top_k,
            vocab_size=spec.vocab_size,
            max_model_len=model.max_model_len,
            dtype=report.dtype,
            device=report.device,
            kernels=report.kernels,
            cuda_graphs=cuda_graphs,
            weight_format=report.weight_format,
            expert_weights=report.expert_weights,
            num_threads=report.num_threads,
            num_pages=report.num_pages * max(1, num_ranks),
            page_size=page_size,
            kv_bytes=report.kv_bytes * max(1, num_ranks),
            kv_dtype=report.kv_dtype,
            micro_batches=micro_batches,
            load_seconds=load_seconds,
            attention_ranks=num_ranks,
            expert_ranks=0 if cluster is None else cluster.expert_ranks,
            attention_tp=1 if cluster is None else cluster.attention_tp,
            expert_memory=expert_memory,
        )

    @property
    def _shards(self) -> str:
        return f" of {self.attention_tp} shards" if self.attention_tp > 1 else ""

    @property
    def _where(self) -> str:
        if self.cells:
            groups = [(shape, len(list(equal))) for shape, equal in itertools.groupby(self.cells)]
            return "cells " + " ".join(f"{count}x{shape}" for shape, count in groups)
        attention = f"{_ranks(self.attention_ranks, 'attention')}{self._shards}"
        return f"{attention} and {_ranks(self.expert_ranks, 'expert')}"

    @property
    def stages(self) -> str:
        """Describes in one line where each stage runs."""
        if self.attention_ranks:
            return (
                f"{self.num_layers} layers: {self._where} on {self.device} "
                f"({self.num_experts} experts, top-{self.top_k}), "
                "frames by shared memory or a process group"
            )
        return (
            f"{self.num_layers} layers: attention stage on {self.device}, expert stage on "
            f"{self.device} ({self.num_experts} experts, top-{self.top_k}), local transport"
        )


def memory_line(model: ModelConfig) -> str | None:
    """Describes the limit `model.expert_memory_bytes`; None without a limit."""
    if model.expert_memory_bytes is None:
        return None
    return (
        f"at most {model.expert_memory_bytes / 2**20:.1f} MiB of routed experts in a process, "
        f"others read when they are needed ({model.expert_memory_policy})"
    )


def _ranks(count: int, role: str) -> str:
    return f"{count} {role} rank" + ("" if count == 1 else "s")
