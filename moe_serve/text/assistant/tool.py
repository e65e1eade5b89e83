"""A function that the model may call, as the parsers see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function.

    `parameters` is the JSON schema of its arguments; by default it has no arguments.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: _NO_ARGUMENTS)

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schema of each argument."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    @property
    def required(self) -> frozenset[str]:
        required = self.parameters.get("required")
        if not isinstance(required, list):
            return frozenset()
        return frozenset(name for name in required if isinstance(name, str))
