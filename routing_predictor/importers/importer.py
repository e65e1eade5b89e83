"""Chooses the reader for a foreign file, by request or by looking at the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from routing_predictor.importers.engine_loads import import_trtllm, import_vllm
from routing_predictor.importers.plain import (
    import_csv,
    import_npy,
    import_npz,
    import_token_lines,
)
from routing_predictor.importers.sglang_recorder import import_sglang
from routing_predictor.importers.tables import Imported, ImportOptions, read_json, read_json_lines
from routing_predictor.traces.routing_error import TraceError

Importer = Callable[[Sequence[Path], ImportOptions], Imported]
IMPORTERS: Mapping[str, Importer] = {
    "sglang": import_sglang,
    "vllm": import_vllm,
    "trtllm": import_trtllm,
    "npz": import_npz,
    "npy": import_npy,
    "csv": import_csv,
    "jsonl": import_token_lines,
}
_BY_SUFFIX = {".pt": "sglang", ".npz": "npz", ".npy": "npy", ".csv": "csv"}


def import_files(paths: Sequence[Path], kind: str, options: ImportOptions) -> Imported:
    """Import files with the reader `kind`, a name of IMPORTERS or auto. Raises TraceError."""
    assert paths, "import_files needs at least one path"
    if kind == "auto":
        kind = detect(paths[0])
    if kind not in IMPORTERS:
        raise TraceError(f"{kind} is not a known format: use auto, {', '.join(IMPORTERS)}")
    return IMPORTERS[kind](paths, options)


def detect(path: Path) -> str:
    """Returns the name of the format, from the file's name and, for JSON, from its keys. Raises
    TraceError."""
    if not path.exists():
        raise TraceError(f"{path} does not exist")
    if path.is_dir():
        return "trtllm"
    if path.suffix in _BY_SUFFIX:
        return _BY_SUFFIX[path.suffix]
    if path.suffix == ".jsonl":
        keys = read_json_lines(path)[0].keys()
        if "record_type" in keys:
            return "vllm"
        return "jsonl" if "topk_ids" in keys else "sglang"
    if path.suffix == ".json":
        content = read_json(path)
        return "vllm" if isinstance(content, dict) and "snapshots" in content else "sglang"
    raise TraceError(
        f"{path}: its format is not known from its name, as with {', '.join(_BY_SUFFIX)}, "
        ".json or .jsonl; `moe-serve trace import` takes any name, with --from"
    )
