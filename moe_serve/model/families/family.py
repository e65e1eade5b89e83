"""What a family file declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.tensor_names import TensorNames
from moe_serve.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of checkpoints.

    `prefixes`: what may stand before every tensor's name, for a text model inside a larger one; the
    first under which the embedding is found is taken.
    """

    name: str
    architectures: tuple[str, ...]
    read_spec: Callable[[HFConfig], ModelSpec]
    names: TensorNames = field(default_factory=TensorNames)
    prefixes: tuple[str, ...] = ("",)

    def names_in(self, has: Callable[[str], bool]) -> TensorNames:
        """The names as this checkpoint writes them; `has` says which are there."""
        for prefix in self.prefixes:
            names = self.names.after(prefix)
            if has(names.embedding):
                return names
        return self.names.after(self.prefixes[0])
