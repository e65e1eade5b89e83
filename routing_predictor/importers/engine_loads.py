"""Reads the expert loads that vLLM and TensorRT-LLM write.

vLLM: the JSON lines of its statistics file, and snapshots of a benchmark kit.

    {"record_type": "eplb_load_stats", "version": 1, "step": 7, "expert_load": [[...]],
     "p2l_map": [[...]]}                                             one object on each line
    {"snapshots": [{"step": 7, "window_expert_load": [[...]], "physical_to_logical_map": [[...]]}]}

Both are [layers][physical experts], with layers numbered among those that have experts.

TensorRT-LLM: a folder with meta_info.json and a safetensors file of each rank. Key
"<iteration>_<layer>" holds the counts of the experts of a layer; ranks are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from routing_predictor.importers.tables import (
    ImportOptions,
    as_array,
    as_ids,
    logical_counts,
    make_load,
    read_json,
    read_json_lines,
)
from routing_predictor.traces.load_file import RecordedLoad
from routing_predictor.traces.metadata import regular, unreadable
from routing_predictor.traces.routing_error import TraceError

STATS, VERSION = "eplb_load_stats", 1


def import_vllm(paths: Sequence[Path], options: ImportOptions) -> RecordedLoad:
    """Reads the loads. Raises TraceError."""
    if len(paths) != 1:
        raise TraceError(
            f"got {len(paths)} files, but vLLM writes one file for all ranks: give that one"
        )
    (path,) = paths
    model, entries = options.model, list[Any]()
    if path.suffix == ".jsonl":
        entries = [e for e in read_json_lines(path) if e.get("record_type") == STATS]
        for version in (entry.get("version") for entry in entries):
            if version != VERSION:
                raise TraceError(
                    f"{path} has version {version!r} of {STATS}, but only version {VERSION} "
                    "can be read"
                )
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


META = "meta_info.json"


def import_trtllm(paths: Sequence[Path], options: ImportOptions) -> RecordedLoad:
    """Reads the loads of all ranks. Raises TraceError."""
    if len(paths) != 1 or not paths[0].is_dir():
        raise TraceError(f"give one folder with {META} and rank*.safetensors, got {paths[0]}")
    (folder,) = paths
    meta = read_json(folder / META)
    num_experts = meta.get("num_experts") if isinstance(meta, dict) else None
    if type(num_experts) is not int or num_experts < 1:
        raise TraceError(
            f"{folder / META}: num_experts must be an integer of 1 or more, got {num_experts!r}"
        )
    files = sorted(p for p in folder.glob("rank*.safetensors") if not p.stem.endswith("_raw"))
    if not files:
        raise TraceError(f"{folder} has no rank*.safetensors")
    counts: dict[tuple[int, int], np.ndarray] = {}
    for file in files:
        for key, array in _read(file).items():
            iteration, _, layer = key.partition("_")
            if not (iteration.isdecimal() and layer.isdecimal()):
                raise TraceError(
                    f"{file}: a key must be the numbers of an iteration and a layer, such as "
                    f"0_3; got {key!r}"
                )
            found = as_array(array, 1, f"{file}: {key}")
            if len(found) != num_experts:
                raise TraceError(
                    f"{file}: {key} has {len(found)} counts, but there are {num_experts} experts"
                )
            place = int(iteration), int(layer)
            with np.errstate(over="ignore"):  # RecordedLoad refuses infinite counts
                counts[place] = counts[place] + found if place in counts else found
    iterations = sorted({iteration for iteration, _ in counts})
    layers = sorted({layer for _, layer in counts})
    nothing = np.zeros(num_experts)
    steps = [np.stack([counts.get((i, layer), nothing) for layer in layers]) for i in iterations]
    return make_load(steps, "trtllm", options.model, layers)


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(regular(path), framework="numpy") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, TypeError) as error:
        raise unreadable(path, error) from None
