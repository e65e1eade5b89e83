"""The adapters of a server as JSON, for the dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_serve.adapters.adapter import AdapterVersion
from moe_serve.adapters.registry import AdapterRegistry
from moe_serve.http.generation.generation import GenerationService

_MOST = 50  # most adapters that are shown; the others are only counted


def adapters_part(
    registry: AdapterRegistry | None, generations: GenerationService
) -> dict[str, Any] | None:
    """Returns the adapters, those with requests first; None: the server has none."""
    if registry is None:
        return None
    running, waiting = (generations.adapters(has_begun=has_begun) for has_begun in (True, False))
    versions, stats = registry.versions(), registry.stats
    shown = [_adapter(registry, version, running, waiting) for version in versions]
    shown.sort(key=lambda each: (-each["running"] - each["waiting"], each["state"] == "dropped"))
    return {
        "number": len(versions),
        "in_memory_bytes": stats.bytes_in_memory,
        "memory_bytes": registry.memory_bytes,
        "pinned_bytes": stats.pinned_bytes,
        "loads_total": stats.num_loads,
        "evictions_total": stats.num_evictions,
        "adapters": shown[:_MOST],
    }


def _adapter(
    registry: AdapterRegistry,
    version: AdapterVersion,
    running: Mapping[str, int],
    waiting: Mapping[str, int],
) -> dict[str, Any]:
    return {
        "name": version.name,
        "kind": version.kind,
        "rank": version.rank,
        "version": version.short_digest,
        "loaded_at": version.loaded_at,
        "bytes": version.num_bytes,
        "running": running.get(version.name, 0),
        "waiting": waiting.get(version.name, 0),
        "is_pinned": version.is_pinned,
        "state": "in memory" if registry.is_in_memory(version) else "dropped",
    }
