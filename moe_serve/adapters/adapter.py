"""A loaded adapter, as requests hold it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch is slow to import, and requests are made without it, too
    from moe_serve.model.stage.adapter_rows import AdapterKind, AdapterWeights

_SHORT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVersion:
    """The content that a name stood for when it was loaded. It never changes: loading the name
    again makes another version."""

    name: str
    folder: Path
    digest: bytes  # SHA-256 of the configuration and of all weight files
    kind: AdapterKind
    rank: int  # the largest of a LoRA; 0: it has none
    loaded_at: int  # seconds since 1970
    num_bytes: int  # of its weights, on the rank that holds the most
    is_pinned: bool = False  # its weights are never dropped while the name stands for it

    @property
    def short_digest(self) -> str:
        """The first digits of the digest, for people."""
        return self.digest.hex()[:_SHORT]

    @property
    def label(self) -> str:
        """The name and the short digest: "sql@3f9a0c1d"."""
        return f"{self.name}@{self.short_digest}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """A version and its weights. A request holds one, so they stay as long as it runs."""

    version: AdapterVersion
    weights: AdapterWeights

    @property
    def name(self) -> str:
        return self.version.name
