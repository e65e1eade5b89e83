"""Stores a trace as a file, and a recording as a folder of such files.

A safetensors file; N tokens, L layers, K choices:

    expert_ids  uint8 or int16  [N, L, K]    weights  float16  [N, L, K]  (if recorded)
    request     int32           [N]          token    int32    [N]        (if recorded)
    position    int32           [N]
    phase       uint8           [N]

Its facts (see `metadata.py`) are the other fields of `RoutingTrace`. Parts of one recording have
its name, so a request that continues in the next part is the same request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routing_predictor.traces.metadata import read_tensors, write_tensors
from routing_predictor.traces.routing_error import TraceError
from routing_predictor.traces.trace import DECODE, PREFILL, RoutingTrace

FORMAT, VERSION = "moe-serve routing trace", 1
SUFFIX = ".safetensors"
MAX_EXPERTS = 2**15  # limit of int16
_SAME = ("num_experts", "layers", "top_k", "model", "model_identity", "placement_version")


def id_dtype(num_experts: int) -> type[np.uint8] | type[np.int16]:
    """Returns the smallest type that holds all expert ids. Raises TraceError if none does."""
    if num_experts > MAX_EXPERTS:
        raise TraceError(f"a trace can have at most {MAX_EXPERTS} experts, got {num_experts}")
    return np.uint8 if num_experts <= 256 else np.int16


def as_int32(values_N: NDArray[np.integer], name: str) -> NDArray[np.int32]:
    """Converts a column of a trace without changing any number. Raises TraceError."""
    if len(values_N) and not -(2**31) <= int(values_N.min()) <= int(values_N.max()) < 2**31:
        raise TraceError(f"{name} must be below {2**31} in a trace, got {values_N.max()}")
    return values_N.astype(np.int32, copy=False)


def as_phase(values_N: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Converts the phase column. Raises TraceError for an unknown phase."""
    if len(values_N) and not PREFILL <= int(values_N.min()) <= int(values_N.max()) <= DECODE:
        raise TraceError(
            f"phase must be {PREFILL} (a token of the prompt) or {DECODE} (a generated "
            f"token), got {values_N.min()} to {values_N.max()}"
        )
    return values_N.astype(np.uint8, copy=False)


def check_columns(trace: RoutingTrace) -> None:
    """Raises TraceError for an unknown phase, or if positions of a request do not ascend; splitting
    requests by time relies on both."""
    as_phase(trace.phase_N)
    order = np.argsort(trace.request_N, kind="stable")
    request_N, position_N = trace.request_N[order], trace.position_N[order].astype(np.int64)
    is_back_N = (np.diff(position_N) <= 0) & (np.diff(request_N) == 0)
    if is_back_N.any():
        at = int(is_back_N.argmax())
        raise TraceError(
            f"request {trace.request_ids[request_N[at]]!r} has position "
            f"{position_N[at + 1]} after {position_N[at]}; the positions of a request must "
            "ascend"
        )


def write_trace(trace: RoutingTrace, path: Path) -> int:
    """Writes the file completely or not at all; returns its bytes. Raises TraceError."""
    check_columns(trace)
    tensors: dict[str, NDArray[Any]] = {
        "expert_ids": trace.expert_ids_NLK.astype(id_dtype(trace.num_experts), copy=False),
        "request": trace.request_N.astype(np.int32, copy=False),
        "position": trace.position_N.astype(np.int32, copy=False),
        "phase": trace.phase_N.astype(np.uint8, copy=False),
    }
    if trace.token_N is not None:
        tensors["token"] = trace.token_N.astype(np.int32, copy=False)
    if trace.weights_NLK is not None:
        tensors["weights"] = trace.weights_NLK.astype(np.float16, copy=False)
    facts = {
        "num_experts": trace.num_experts,
        "layers": list(trace.layers),
        "request_ids": list(trace.request_ids),
        "labels": list(trace.labels),
        "model": trace.model,
        "model_identity": trace.model_identity,
        "placement_version": trace.placement_version,
        "recording": trace.recording,
    }
    if trace.adapters:
        facts["adapters"] = list(trace.adapters)
    return write_tensors(path, tensors, facts, FORMAT, VERSION)


def read_trace(path: Path) -> RoutingTrace:
    """Reads and checks one file. Raises TraceError."""
    file = read_tensors(path, FORMAT, VERSION)
    layers = file.fact("layers", list)
    if not all(isinstance(layer, int) and layer >= 0 for layer in layers):
        raise TraceError(f"{path}: layers holds a value that is not a layer number")
    has_weights, has_tokens = "weights" in file.tensors, "token" in file.tensors
    try:
        id_dtype(file.fact("num_experts", int))  # raises if there are too many experts
        trace = RoutingTrace(
            expert_ids_NLK=file.tensor("expert_ids", "iu", 3),
            request_N=as_int32(file.tensor("request", "iu", 1), "request"),
            position_N=as_int32(file.tensor("position", "iu", 1), "position"),
            phase_N=as_phase(file.tensor("phase", "iu", 1)),
            token_N=as_int32(file.tensor("token", "iu", 1), "token") if has_tokens else None,
            weights_NLK=file.tensor("weights", "f", 3) if has_weights else None,
            num_experts=file.fact("num_experts", int),
            layers=tuple(layers),
            request_ids=file.strings("request_ids"),
            labels=file.strings("labels"),
            adapters=file.strings("adapters") if "adapters" in file.facts else (),
            model=file.fact("model", str),
            model_identity=file.fact("model_identity", str),
            placement_version=file.fact("placement_version", str),
            recording=file.fact("recording", str),
        )
        check_columns(trace)
    except TraceError as error:
        named = str(error)
        raise TraceError(named if named.startswith(str(path)) else f"{path}: {named}") from None
    return trace


def part_files(folder: Path) -> list[Path]:
    """Returns the parts of a recording in order. Raises TraceError for a folder without parts."""
    parts = sorted(path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith("."))
    if not parts:
        raise TraceError(f"{folder} contains no recording: it has no file *{SUFFIX}")
    return parts


def read_traces(paths: Sequence[Path]) -> RoutingTrace:
    """Reads files and folders of parts as one trace. Raises TraceError."""
    files = [file for path in paths for file in (part_files(path) if path.is_dir() else [path])]
    return join_traces([read_trace(file) for file in files])


def join_traces(traces: Sequence[RoutingTrace]) -> RoutingTrace:
    """Joins traces in this order. A request of the same recording is one request; requests of
    different recordings stay apart. Fields that some parts lack (tokens, weights) are left out.

    Raises TraceError for traces of different models, layers or placements.
    """
    if not traces:
        raise TraceError("no traces were given; give at least one")
    first = traces[0]
    if len(traces) == 1:
        return first
    for trace in traces[1:]:
        for name in _SAME:
            mine, other = getattr(first, name), getattr(trace, name)
            if mine != other:
                raise TraceError(f"traces with {name} {mine!r} and {other!r} cannot be joined")
    numbers: dict[tuple[object, str], int] = {}
    labels: list[str] = []
    adapters: list[str] = []
    request_N = []
    for index, trace in enumerate(traces):
        of_part = np.zeros(max(1, len(trace.request_ids)), dtype=np.int32)
        for request, request_id in enumerate(trace.request_ids):
            key = (trace.recording or index, request_id)
            of_part[request] = numbers.setdefault(key, len(numbers))
            if len(numbers) > len(labels):
                labels.append(trace.labels[request] if trace.labels else "")
                adapters.append(trace.adapters[request] if trace.adapters else "")
        request_N.append(of_part[trace.request_N])
    recordings = {trace.recording for trace in traces}
    has_tokens = all(trace.token_N is not None for trace in traces)
    has_weights = all(trace.weights_NLK is not None for trace in traces)
    return replace(
        first,
        expert_ids_NLK=np.concatenate([trace.expert_ids_NLK for trace in traces]),
        request_N=np.concatenate(request_N),
        position_N=np.concatenate([trace.position_N for trace in traces]),
        phase_N=np.concatenate([trace.phase_N for trace in traces]),
        token_N=_joined([trace.token_N for trace in traces]) if has_tokens else None,
        weights_NLK=_joined([trace.weights_NLK for trace in traces]) if has_weights else None,
        request_ids=_names(numbers, is_one=len(recordings) == 1),
        labels=tuple(labels) if any(labels) else (),
        adapters=tuple(adapters) if any(adapters) else (),
        recording=first.recording if len(recordings) == 1 else "",
    )


def _names(numbers: dict[tuple[object, str], int], *, is_one: bool) -> tuple[str, ...]:
    """Returns the request ids, prefixed by their recording if there are several."""
    if is_one and all(isinstance(source, str) for source, _ in numbers):
        return tuple(request_id for _, request_id in numbers)
    return tuple(f"{source}:{request_id}" for source, request_id in numbers)


def _joined(columns: Sequence[NDArray[Any] | None]) -> NDArray[Any]:
    return np.concatenate([column for column in columns if column is not None])
