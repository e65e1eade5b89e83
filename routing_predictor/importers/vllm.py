"""Reads vLLM's expert loads: the JSON lines of its statistics file, and snapshots of a benchmark
kit.

    {"record_type": "eplb_load_stats", "version": 1, "step": 7, "expert_load": [[...]],
     "p2l_map": [[...]]}                                             one object on each line
    {"snapshots": [{"step": 7, "window_expert_load": [[...]], "physical_to_logical_map": [[...]]}]}

Both are [layers][physical experts], with layers numbered among those that have experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from routing_predictor.importers.tables import (
    ImportOptions,
    as_array,
    as_ids,
    logical_counts,
    make_load,
    read_json,
    read_json_lines,
)
from routing_predictor.traces.errors import TraceError
from routing_predictor.traces.load_file import ExpertLoad

STATS, VERSION = "eplb_load_stats", 1


def import_vllm(paths: Sequence[Path], options: ImportOptions) -> ExpertLoad:
    """Read the loads. Raises TraceError."""
    if len(paths) != 1:
        raise TraceError(f"{len(paths)} files; vLLM writes one for all ranks")
    (path,) = paths
    model, entries = options.model, list[Any]()
    if path.suffix == ".jsonl":
        entries = [e for e in read_json_lines(path) if e.get("record_type") == STATS]
        for version in (entry.get("version") for entry in entries):
            if version != VERSION:
                raise TraceError(f"{path}: version {version!r} of {STATS}; {VERSION} is read")
        names = ("expert_load", "p2l_map")
    else:
        content = read_json(path)
        found = content.get("snapshots") if isinstance(content, dict) else None
        if not isinstance(found, list):
            raise TraceError(f"{path} has no snapshots")
        entries = found
        model = model or str(content.get("model_name", ""))
        names = ("window_expert_load", "physical_to_logical_map")
    if not entries:
        raise TraceError(f"{path} has no record of a load")
    steps = [_counts(entry, *names, path) for entry in entries]
    num_experts = options.num_experts or max(int(map_LP.max()) + 1 for _, map_LP in steps)
    tables = [logical_counts(counts, map_LP, num_experts, str(path)) for counts, map_LP in steps]
    return make_load(tables, "vllm", model)


def _counts(entry: Any, load: str, slots: str, path: Path) -> tuple[Any, Any]:
    if not isinstance(entry, dict):
        raise TraceError(f"{path} holds a record that is not an object")
    counts_LP = as_array(entry.get(load), 2, f"{path}: {load}")
    return counts_LP, as_ids(entry.get(slots), 2, f"{path}: {slots}")
