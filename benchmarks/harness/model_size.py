"""Counts bytes and operations of a checkpoint from config.json and the safetensors headers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Counts of parameters, grouped by when they are read."""

    num_layers: int
    num_experts: int
    top_k: int
    expert: int  # parameters of one expert of one layer
    dense: int  # all others that a step reads: attention, routers, norms
    head: int  # LM head, tied or not
    embedding: int  # 0 if tied: then it is the head
    kv_width: int  # numbers in the KV cache per token and layer
    attention_width: int  # num_heads * head_dim
    dtype: str
    expert_bits: float | None = None  # of an expert's weight, where it is not in `dtype`

    @property
    def num_parameters(self) -> int:
        experts = self.num_layers * self.num_experts * self.expert
        return self.dense + self.head + self.embedding + experts

    @property
    def item_bytes(self) -> int:
        return _BYTES[self.dtype]

    @property
    def expert_bytes(self) -> float:
        """Returns the bytes of one expert of one layer."""
        return self.expert * (self.expert_bits or 8.0 * self.item_bytes) / 8.0

    @property
    def num_bytes(self) -> int:
        others = self.dense + self.head + self.embedding
        experts = self.num_layers * self.num_experts * self.expert_bytes
        return others * self.item_bytes + round(experts)

    def touched_experts(self, num_rows: int) -> float:
        """Returns the expected number of experts of a layer that `num_rows` rows choose, if all
        are equally likely.
        """
        share = self.top_k / self.num_experts
        return self.num_experts * (1 - (1 - share) ** num_rows)

    def step_bytes(self, num_rows: int, num_kv_tokens: int) -> float:
        """Returns the bytes that one step reads: dense weights, the touched experts, the KV
        cache.
        """
        experts = self.num_layers * self.touched_experts(num_rows) * self.expert_bytes
        kv = num_kv_tokens * self.num_layers * self.kv_width
        return self.item_bytes * (self.dense + self.head + kv) + experts

    def step_flop(self, num_rows: int, num_logit_rows: int, num_kv_tokens: float) -> float:
        """Returns multiplications and additions; `num_kv_tokens` is the sum of the context of
        all rows.
        """
        active = self.dense + self.num_layers * self.top_k * self.expert
        attention = 2 * num_kv_tokens * self.attention_width * self.num_layers
        return 2 * (num_rows * active + num_logit_rows * self.head + attention)


def read_model_size(folder: Path, dtype: str) -> ModelSize:
    """Reads the sizes of a checkpoint; the dtype "auto" is the checkpoint's own."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    counts = {"expert": 0, "dense": 0, "head": 0, "embedding": 0}
    for name, size in _tensor_sizes(folder).items():
        counts[_kind(name)] += size
    if counts["head"] == 0:
        counts["head"], counts["embedding"] = counts["embedding"], 0
    num_layers = int(config["num_hidden_layers"])
    num_experts = int(config.get("num_experts") or config["num_local_experts"])
    num_heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // num_heads)
    return ModelSize(
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=int(config["num_experts_per_tok"]),
        expert=counts["expert"] // (num_layers * num_experts),
        dense=counts["dense"],
        head=counts["head"],
        embedding=counts["embedding"],
        kv_width=2 * int(config.get("num_key_value_heads") or num_heads) * head_dim,
        attention_width=num_heads * head_dim,
        dtype=own if dtype == "auto" else dtype,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBytes:
    """Bytes of a checkpoint as it is stored, in few bits or not, grouped as in `ModelSize`."""

    num_experts: int
    top_k: int
    experts: int
    dense: int
    head: int
    embedding: int  # 0 if tied

    @property
    def total(self) -> int:
        return self.experts + self.dense + self.head + self.embedding

    def of_step(self, num_rows: int) -> float:
        """Returns the bytes of weights that a step reads, if all experts are equally likely."""
        share = 1 - (1 - self.top_k / self.num_experts) ** num_rows
        return self.experts * share + self.dense + self.head


def read_stored_bytes(folder: Path) -> StoredBytes:
    """Reads the headers of a checkpoint's files."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    counts = {"expert": 0, "dense": 0, "head": 0, "embedding": 0}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                counts[_kind(name)] += end - begin
    if counts["head"] == 0:
        counts["head"], counts["embedding"] = counts["embedding"], 0
    return StoredBytes(
        num_experts=int(config.get("num_experts") or config["num_local_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        experts=counts["expert"],
        dense=counts["dense"],
        head=counts["head"],
        embedding=counts["embedding"],
    )


def _tensor_sizes(folder: Path) -> dict[str, int]:
    sizes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                sizes[name] = math.prod(file.get_slice(name).get_shape())
    return sizes


def _kind(name: str) -> str:
    if ".experts." in name:
        return "expert"
    if name.startswith("lm_head."):
        return "head"
    return "embedding" if "embed_tokens" in name else "dense"
