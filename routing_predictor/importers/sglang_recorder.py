"""Reads SGLang's expert distribution recorder (.pt and .json), and its answers with routed experts.

    stat                 {"logical_count": [steps, layers, experts]}          one file
    per_pass, per_token  {"records": [...], "last_physical_to_logical_map"}   one file of each rank
    answers              {"meta_info": {"routed_experts": base64 of int32}}   JSON or JSON lines

Layers count all decoder layers; those without experts hold zeros (or -1) and are left out. L
layers, P physical experts, E experts, T tokens of a pass (padded), K choices (padded).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routing_predictor.importers.tables import (
    Imported,
    ImportOptions,
    as_array,
    as_ids,
    logical_counts,
    make_load,
    make_trace,
    read_json,
    read_json_lines,
)
from routing_predictor.torch_files.torch_file import read_torch_file
from routing_predictor.traces.load_file import RecordedLoad
from routing_predictor.traces.routing_error import TraceError
from routing_predictor.traces.trace import DECODE, PREFILL, RoutingTrace

_EXTEND = 1  # forward_mode of tokens of prompts


def import_sglang(paths: Sequence[Path], options: ImportOptions) -> Imported:
    """Reads one file, or those of all ranks of one recording. Raises TraceError."""
    first = paths[0]
    if first.suffix == ".jsonl":
        return _answers([entry for path in paths for entry in read_json_lines(path)], options)
    contents = [read_torch_file(p) if p.suffix == ".pt" else read_json(p) for p in paths]
    if isinstance(contents[0], list):
        return _answers([entry for content in contents for entry in content], options)
    if not all(isinstance(content, dict) for content in contents):
        raise TraceError(f"{first} is not a file of SGLang's recorder")
    if "logical_count" in contents[0]:
        if len(contents) > 1:
            raise TraceError("logical_count already covers all ranks: give only one file")
        return _stat(contents[0]["logical_count"], options, str(first))
    if "records" not in contents[0]:
        return _answers(contents, options)
    if "topk_ids_of_layer" in _records(contents[0], first)[0]:
        return _per_token(contents, options, paths)
    return _per_pass(contents, options, paths)


def _stat(value: Any, options: ImportOptions, what: str) -> RecordedLoad:
    num_dimensions = np.ndim(value) if isinstance(value, np.ndarray) else _depth(value)
    counts = as_array(value, 2 if num_dimensions == 2 else 3, f"{what}: logical_count")
    steps = [counts] if counts.ndim == 2 else list(counts)
    return make_load(steps, "sglang", options.model)


def _depth(value: Any) -> int:
    depth = 0
    while isinstance(value, list) and value:
        depth, value = depth + 1, value[0]
    return depth


def _records(content: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    records = content.get("records")
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise TraceError(f"{path} has no records")
    if not records:
        raise TraceError(f"{path} has no record of a pass: nothing was recorded")
    return records


def _map(content: dict[str, Any], path: Path) -> NDArray[np.int64]:
    what = f"{path}: last_physical_to_logical_map"
    return as_ids(content.get("last_physical_to_logical_map"), 2, what)


def _per_pass(
    contents: Sequence[dict[str, Any]], options: ImportOptions, paths: Sequence[Path]
) -> RecordedLoad:
    """Makes a load with one step for each pass: the sum over its ranks."""
    steps: dict[Any, NDArray[np.float64]] = {}
    for content, path in zip(contents, paths, strict=True):
        map_LP = _map(content, path)
        num_experts = options.num_experts or int(map_LP.max()) + 1
        for record in _records(content, path):
            what = f"{path}: global_physical_count"
            counts_LP = as_array(record.get("global_physical_count"), 2, what)
            logical_LE = logical_counts(counts_LP, map_LP, num_experts, what)
            key = record.get("forward_pass_id")
            if not isinstance(key, int):
                raise TraceError(f"{path}: forward_pass_id must be an integer, got {key!r}")
            with np.errstate(over="ignore"):  # RecordedLoad refuses infinite counts
                steps[key] = steps[key] + logical_LE if key in steps else logical_LE
    return make_load([steps[key] for key in sorted(steps)], "sglang", options.model)


def _per_token(
    contents: Sequence[dict[str, Any]], options: ImportOptions, paths: Sequence[Path]
) -> RoutingTrace:
    """Makes a trace. The file does not name the request of a token, so each chunk of a prompt is a
    request, and each generated token is one of its own."""
    columns: list[list[NDArray[Any]]] = [[], [], [], [], []]
    names: list[str] = []
    num_experts, is_sparse_L = 0, None
    for rank, (content, path) in enumerate(zip(contents, paths, strict=True)):
        map_LP = _map(content, path)
        num_experts = max(num_experts, int(map_LP.max()) + 1)
        for record in _records(content, path):
            ids_TLK, token_T, position_T = _pass(record, map_LP, path)
            sparse = (ids_TLK >= 0).any(axis=(0, 2))
            is_sparse_L = sparse if is_sparse_L is None else is_sparse_L | sparse
            is_prompt = record.get("forward_mode") == _EXTEND
            lengths = _lengths(record, len(token_T), is_prompt, path)
            stem = f"{rank}-{record.get('forward_pass_id')}"
            columns[0].append(ids_TLK)
            columns[1].append(token_T)
            columns[2].append(position_T)
            columns[3].append(np.repeat(np.arange(len(lengths)) + len(names), lengths))
            columns[4].append(np.full(len(token_T), PREFILL if is_prompt else DECODE, np.uint8))
            names += [f"{stem}-{index}" for index in range(len(lengths))]
    widths = {part.shape[2] for part in columns[0]}
    if len(widths) != 1 or is_sparse_L is None or not is_sparse_L.any():
        raise TraceError(
            f"{paths[0]}: its passes have no choices of experts, or different numbers of "
            "choices per token"
        )
    ids_NLK, token_N, position_N, request_N, phase_N = (np.concatenate(part) for part in columns)
    ids_NLK = ids_NLK[:, is_sparse_L]
    ids_NLK = ids_NLK[:, :, (ids_NLK >= 0).any(axis=(0, 1))]  # K is padded with -1
    if (ids_NLK < 0).any():
        raise TraceError(f"{paths[0]}: some tokens have fewer choices than others")
    numbers = np.flatnonzero(is_sparse_L).tolist()
    options = _with_experts(options, num_experts)
    return make_trace(
        ids_NLK,
        options,
        layers=numbers,
        request_N=request_N,
        position_N=position_N,
        phase_N=phase_N,
        token_N=token_N,
        request_ids=names,
    )


def _pass(
    record: dict[str, Any], map_LP: NDArray[np.int64], path: Path
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns one pass as logical ids [T, L, K] (-1: no expert), token ids and positions."""
    token_T = as_ids(record.get("input_ids"), 1, f"{path}: input_ids")
    position_T = as_ids(record.get("positions"), 1, f"{path}: positions")
    ids_LTK = as_ids(record.get("topk_ids_of_layer"), 3, f"{path}: topk_ids_of_layer")
    count = len(token_T)
    if len(position_T) != count or ids_LTK.shape[1] < count or len(ids_LTK) != len(map_LP):
        raise TraceError(
            f"{path}: a pass of {count} tokens has {len(position_T)} positions, choices "
            f"{ids_LTK.shape}, and a map of {len(map_LP)} layers"
        )
    ids_LTK = ids_LTK[:, :count]
    if ids_LTK.max() >= map_LP.shape[1]:
        raise TraceError(
            f"{path}: a token chose slot {ids_LTK.max()}, but there are {map_LP.shape[1]} slots"
        )
    layers = np.arange(len(map_LP))[:, None, None]
    logical_LTK = np.where(ids_LTK < 0, -1, map_LP[layers, np.maximum(ids_LTK, 0)])
    return logical_LTK.transpose(1, 0, 2), token_T, position_T


def _lengths(record: dict[str, Any], count: int, is_prompt: bool, path: Path) -> list[int]:
    """Returns the number of tokens of each request of a pass."""
    if not is_prompt or record.get("extend_seq_lens") is None:
        return [count] if is_prompt else [1] * count
    lengths = as_ids(record["extend_seq_lens"], 1, f"{path}: extend_seq_lens")
    if lengths.min() < 0 or lengths.sum() != count:
        raise TraceError(
            f"{path}: extend_seq_lens must add up to the {count} tokens of the pass, but give "
            f"{lengths.sum()}"
        )
    return [int(length) for length in lengths]


def _answers(entries: Sequence[Any], options: ImportOptions) -> RoutingTrace:
    """Makes a trace from answers of the server, one request each; they list experts as flat
    [tokens, layers, k]."""
    if options.num_layers is None or options.top_k is None:
        raise TraceError(
            "answers with routed experts do not state their shape: give --num-layers and --top-k"
        )
    if not entries:
        raise TraceError("the file contains no answers")
    width, parts, prompts = options.num_layers * options.top_k, [], []
    for number, entry in enumerate(entries):
        meta = entry.get("meta_info", entry) if isinstance(entry, dict) else None
        if not isinstance(meta, dict) or not isinstance(meta.get("routed_experts"), str):
            raise TraceError(f"answer {number + 1} has no routed_experts in its meta_info")
        try:
            content = base64.b64decode(meta["routed_experts"], validate=True)
        except (binascii.Error, ValueError):
            raise TraceError(f"answer {number + 1}: routed_experts is not base64") from None
        if not content or len(content) % (4 * width):
            raise TraceError(
                f"answer {number + 1}: routed_experts has {len(content)} bytes, which is "
                f"not a multiple of int32 for {options.num_layers} layers x "
                f"{options.top_k} choices"
            )
        flat = np.frombuffer(content, "<i4").reshape(-1, options.num_layers, options.top_k)
        parts.append(flat)
        length = meta.get("prompt_tokens")
        prompts.append(length if isinstance(length, int) else 0)
    counts = [len(part) for part in parts]
    position_N = np.concatenate([np.arange(count) for count in counts])
    return make_trace(
        np.concatenate(parts),
        options,
        request_N=np.repeat(np.arange(len(parts)), counts),
        position_N=position_N,
        phase_N=np.where(position_N < np.repeat(prompts, counts), PREFILL, DECODE).astype(np.uint8),
        request_ids=[str(number) for number in range(len(parts))],
    )


def _with_experts(options: ImportOptions, num_experts: int) -> ImportOptions:
    return ImportOptions(
        num_experts=options.num_experts or num_experts,
        num_layers=options.num_layers,
        top_k=options.top_k,
        model=options.model,
    )
