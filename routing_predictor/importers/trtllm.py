"""Reads TensorRT-LLM's statistics: a folder with meta_info.json and a safetensors file of each
rank.

Key "<iteration>_<layer>" holds the counts of a layer's experts; ranks are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from routing_predictor.importers.tables import ImportOptions, as_array, make_load, read_json
from routing_predictor.traces.errors import TraceError
from routing_predictor.traces.load_file import ExpertLoad
from routing_predictor.traces.metadata import regular, unreadable

META = "meta_info.json"


def import_trtllm(paths: Sequence[Path], options: ImportOptions) -> ExpertLoad:
    """Read the loads of all ranks. Raises TraceError."""
    if len(paths) != 1 or not paths[0].is_dir():
        raise TraceError(f"{paths[0]} is not one folder with {META} and rank*.safetensors")
    (folder,) = paths
    meta = read_json(folder / META)
    num_experts = meta.get("num_experts") if isinstance(meta, dict) else None
    if type(num_experts) is not int or num_experts < 1:
        raise TraceError(f"{folder / META}: num_experts is {num_experts!r}, not a number")
    files = sorted(p for p in folder.glob("rank*.safetensors") if not p.stem.endswith("_raw"))
    if not files:
        raise TraceError(f"{folder} has no rank*.safetensors")
    counts: dict[tuple[int, int], np.ndarray] = {}
    for file in files:
        for key, array in _read(file).items():
            iteration, _, layer = key.partition("_")
            if not (iteration.isdecimal() and layer.isdecimal()):
                raise TraceError(f"{file}: {key!r} is not iteration_layer")
            found = as_array(array, 1, f"{file}: {key}")
            if len(found) != num_experts:
                raise TraceError(f"{file}: {key} has {len(found)} counts, of {num_experts} experts")
            place = int(iteration), int(layer)
            with np.errstate(over="ignore"):  # ExpertLoad refuses infinite counts
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
