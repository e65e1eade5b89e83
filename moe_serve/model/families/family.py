"""The declaration that each family file makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.tensor_names import TensorNames
from moe_serve.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of checkpoints.

    `prefixes`: prefixes that may precede every tensor's name, for a text model inside a larger one;
    the first one under which the embedding is found is used.
    """

    name: str
    architectures: tuple[str, ...]
    read_spec: Callable[[HFConfig], ModelSpec]
    names: TensorNames = field(default_factory=TensorNames)
    prefixes: tuple[str, ...] = ("",)

    def names_in(self, has: Callable[[str], bool]) -> TensorNames:
        """Return the names as this checkpoint writes them; `has` tells whether a tensor exists."""
        for prefix in self.prefixes:
            names = self.names.after(prefix)
            if has(names.embedding):
                return names
        return self.names.after(self.prefixes[0])
