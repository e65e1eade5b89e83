"""What a family file declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from moe_serve.model.hf_config import HFConfig
from moe_serve.model.spec import ModelSpec
from moe_serve.model.tensor_names import TensorNames


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of checkpoints."""

    name: str
    architectures: tuple[str, ...]
    read_spec: Callable[[HFConfig], ModelSpec]
    names: TensorNames = field(default_factory=TensorNames)
