"""The settings of adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ExpertLora = Literal["auto", "added", "merged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Fine-tunes of the model that requests name in its place."""

    is_enabled: bool = False  # else every other key here must be left out
    modules: tuple[str, ...] = ()  # name=path of each adapter that is loaded at the start
    pinned: tuple[str, ...] = ()  # names of `modules` whose weights are never dropped
    root: str | None = None  # clients with an admin key load folders below it; None: they load none
    memory_bytes: int | None = None  # of all adapters in memory; None: no limit
    max_adapters: int = 1000  # names
    max_rank: int = 64  # of a LoRA
    # LoRAs of routed experts: added in the kernels, or merged into copies of whole experts, which
    # cost more memory and no time; auto: added, where the kernels can.
    expert_lora: ExpertLora = "auto"
