"""Checks arrays from foreign files before they become traces or loads.

S steps, L layers, P physical experts (slots), E logical experts, N tokens, K choices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routing_predictor.traces.load_file import RecordedLoad
from routing_predictor.traces.metadata import regular, whole_number
from routing_predictor.traces.routing_error import TraceError
from routing_predictor.traces.trace import DECODE, RoutingTrace
from routing_predictor.traces.trace_file import as_int32, id_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Facts that some formats lack."""

    num_experts: int | None = None  # the largest id plus one if None
    num_layers: int | None = None
    top_k: int | None = None
    model: str = ""


Imported = RoutingTrace | RecordedLoad


def read_text(path: Path) -> str:
    """Reads a text file, without the byte order mark that spreadsheets write. Raises TraceError."""
    try:
        return regular(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise TraceError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None


def read_json(path: Path) -> Any:
    return parse_json(read_text(path), str(path))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file with one on each line."""
    entries = []
    # Not `splitlines`: JSON may hold U+2028 and similar characters in a string.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            entry = parse_json(line, f"{path}:{number}")
            if not isinstance(entry, dict):
                raise TraceError(f"{path}:{number} is not a JSON object")
            entries.append(entry)
    if not entries:
        raise TraceError(f"{path} is empty")
    return entries


def parse_json(text: str, place: str) -> Any:
    try:
        return json.loads(text, parse_int=whole_number)
    except TraceError as error:
        raise TraceError(f"{place} {error}") from None
    except (ValueError, RecursionError):
        raise TraceError(f"{place} is not JSON") from None


def as_array(value: Any, num_dimensions: int, what: str) -> NDArray[np.float64]:
    """Returns numbers (lists of lists, or an array) with this number of dimensions. Refuses texts
    and booleans, which numpy would convert to numbers."""
    _check_types(value, what, ())
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise TraceError(f"{what} is not a table of numbers") from None
    if array.ndim != num_dimensions or not array.size:
        raise TraceError(
            f"{what} must have {num_dimensions} dimensions and not be empty, but has the shape "
            f"{array.shape}"
        )
    wrong = ~np.isfinite(array)
    if wrong.any():
        first = tuple(int(index) for index in np.argwhere(wrong)[0])
        raise TraceError(
            f"{what} has {int(wrong.sum())} numbers that are not finite; the first is "
            f"{array[first]} at {list(first)}"
        )
    return array


def _check_types(value: Any, what: str, place: tuple[int, ...]) -> None:
    """Raises TraceError with the first entry that is not a number."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iuf":
            raise TraceError(f"{what} must be an array of numbers, but has the dtype {value.dtype}")
        return
    if isinstance(value, list):
        if not set(map(type, value)) <= {int, float}:  # fast path for a row of numbers
            for index, entry in enumerate(value):
                _check_types(entry, what, (*place, index))
        return
    if type(value) not in (int, float):
        shown = json.dumps(value)[:40] if isinstance(value, (str, bool)) else type(value).__name__
        where = f" at {list(place)}" if place else ""
        raise TraceError(
            f"{what} is not a table of numbers: it has {shown}{where}; write numbers without quotes"
        )


def as_ids(value: Any, num_dimensions: int, what: str) -> NDArray[np.int64]:
    """Returns whole numbers, -1 or more."""
    array = as_array(value, num_dimensions, what)
    if (array != np.floor(array)).any() or array.min() < -1 or array.max() >= 2**31:
        raise TraceError(f"{what} contains a value that is not an expert id")
    return array.astype(np.int64)


def logical_counts(
    counts_LP: NDArray[np.float64], map_LP: NDArray[np.int64], num_experts: int, what: str
) -> NDArray[np.float64]:
    """Returns [L, E]: the counts of slots, added up for the experts in them."""
    if counts_LP.shape != map_LP.shape:
        raise TraceError(
            f"{what}: counts have the shape {counts_LP.shape}, but the map of slots has "
            f"{map_LP.shape}"
        )
    id_dtype(num_experts)  # raises if there are too many experts
    if map_LP.max() >= num_experts:
        raise TraceError(
            f"{what}: a slot holds expert {map_LP.max()}, but there are {num_experts} experts"
        )
    logical_LE = np.zeros((len(counts_LP), num_experts))
    for layer, (counts_P, map_P) in enumerate(zip(counts_LP, map_LP, strict=True)):
        used = map_P >= 0
        with np.errstate(over="ignore"):  # RecordedLoad refuses infinite counts
            np.add.at(logical_LE[layer], map_P[used], counts_P[used])
    return logical_LE


def make_load(
    steps: Sequence[NDArray[np.float64]], source: str, model: str, layers: Sequence[int] = ()
) -> RecordedLoad:
    """Makes a load from [L, E] tables; layers without any count (dense ones) are left out."""
    shapes = {step.shape for step in steps}
    if len(shapes) != 1:
        raise TraceError(f"all steps must have the same shape, got {sorted(shapes)}")
    counts_SLE = np.stack(steps)
    numbers = list(layers) or list(range(counts_SLE.shape[1]))
    is_sparse = np.asarray(counts_SLE.any(axis=(0, 2)))
    if not is_sparse.any():
        raise TraceError("all counts are 0: nothing was recorded")
    return RecordedLoad(
        counts_SLE=counts_SLE[:, is_sparse],
        layers=tuple(n for n, keep in zip(numbers, is_sparse, strict=True) if keep),
        source=source,
        model=model,
    )


def make_trace(
    ids_NLK: NDArray[Any],
    options: ImportOptions,
    *,
    layers: Sequence[int] = (),
    request_N: NDArray[Any] | None = None,
    position_N: NDArray[Any] | None = None,
    phase_N: NDArray[np.uint8] | None = None,
    token_N: NDArray[Any] | None = None,
    request_ids: Sequence[str] = (),
    labels: Sequence[str] = (),
) -> RoutingTrace:
    """Makes a trace from logical ids. Tokens without a known request form one request; tokens
    without a known phase count as generated."""
    count = len(ids_NLK)
    if not count:
        raise TraceError("the recording contains no tokens")
    num_experts = options.num_experts or int(ids_NLK.max()) + 1
    # otherwise RoutingTrace raises the error
    is_sound = ids_NLK.min() >= 0 and ids_NLK.max() < num_experts
    if position_N is None:
        position_N = np.arange(count)
    if request_N is None:
        request_N, request_ids = np.zeros(count, np.int32), ("0",)
    return RoutingTrace(
        expert_ids_NLK=ids_NLK.astype(id_dtype(num_experts)) if is_sound else ids_NLK,
        request_N=as_int32(request_N, "request"),
        position_N=as_int32(position_N, "position"),
        phase_N=np.full(count, DECODE, np.uint8) if phase_N is None else phase_N,
        num_experts=num_experts,
        layers=tuple(layers) or tuple(range(ids_NLK.shape[1])),
        request_ids=tuple(request_ids),
        labels=tuple(labels),
        model=options.model,
        token_N=None if token_N is None else as_int32(token_N, "token"),
    )
