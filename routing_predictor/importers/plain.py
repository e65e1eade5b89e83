"""Reads traces and counts in plain formats: npz, npy, CSV and JSON lines.

    npz    an array [tokens, layers, k]; with `pos`, `sample`, `sample_name`: positions, requests,
           and the names of the requests
    npy    [tokens, layers, k], or [tokens, layers] of first choices
    csv    counts: a row for each layer, a column for each expert
    jsonl  {"layer": 3, "token_idx": 17, "topk_ids": [5, 9]}

N tokens, L layers, K choices, E experts.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from routing_predictor.importers.tables import (
    ImportOptions,
    as_array,
    as_ids,
    make_load,
    make_trace,
    read_json_lines,
    read_text,
)
from routing_predictor.traces.load_file import RecordedLoad
from routing_predictor.traces.metadata import regular
from routing_predictor.traces.routing_error import TraceError
from routing_predictor.traces.trace import RoutingTrace, check_distinct

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf)", re.ASCII | re.I)
_MAX_NUMBER = 2**31  # limit on the number of a layer or a token


def import_npz(paths: Sequence[Path], options: ImportOptions) -> RoutingTrace:
    """Reads a trace from an npz file. Raises TraceError."""
    path = _one(paths)
    arrays = _numpy_arrays(path)
    tables = [n for n, a in arrays.items() if a.ndim == 3 and a.dtype.kind in "iu"]
    if len(tables) != 1:
        raise TraceError(
            f"{path} must have one array of expert ids [tokens, layers, k], but has {len(tables)}"
        )
    ids_NLK = arrays[tables[0]]
    _check_ids(ids_NLK, path)
    columns = [arrays.get(name) for name in ("pos", "sample")]
    for name, column in zip(("pos", "sample"), columns, strict=True):
        is_wrong = column is not None and (column.ndim != 1 or column.dtype.kind not in "iu")
        if column is not None and (is_wrong or len(column) != len(ids_NLK) or column.min() < 0):
            raise TraceError(
                f"{path}: {name} must be a column of {len(ids_NLK)} integers of 0 or more"
            )
    position_N, sample_N = columns
    if sample_N is None:
        return make_trace(ids_NLK, options, position_N=position_N)
    samples, request_N = np.unique(sample_N, return_inverse=True)
    names = _names(arrays.get("sample_name"), samples, path)
    return make_trace(
        ids_NLK,
        options,
        request_N=request_N,
        position_N=_counted(sample_N) if position_N is None else position_N,
        request_ids=[str(number) for number in samples],
        labels=names if any(names) else (),
    )


def import_npy(paths: Sequence[Path], options: ImportOptions) -> RoutingTrace:
    """Reads a trace from an npy file. Raises TraceError."""
    path = _one(paths)
    ids = _numpy_arrays(path)[""]
    if ids.ndim not in (2, 3) or ids.dtype.kind not in "iu":
        raise TraceError(
            f"{path} must be integers [tokens, layers] or [tokens, layers, k], but is "
            f"{ids.dtype} {ids.shape}"
        )
    ids_NLK = ids if ids.ndim == 3 else ids[:, :, None]
    _check_ids(ids_NLK, path)
    return make_trace(ids_NLK, options)


def import_csv(paths: Sequence[Path], options: ImportOptions) -> RecordedLoad:
    """Reads counts from a CSV file, whose first row may be a heading. Raises TraceError."""
    path = _one(paths)
    rows = _csv_rows(read_text(path), path)
    if rows and not any(_is_number(cell) for cell in rows[0].cells):
        rows = rows[1:]
    if not rows:
        raise TraceError(f"{path} has no rows of counts")
    width = len(rows[0].cells)
    for number, row in enumerate(rows, 1):
        if row.is_quoted:
            raise TraceError(
                f"{path}: row {number} has a value in quotes: write counts without quotes"
            )
        wrong = [cell for cell in row.cells if not _is_number(cell)]
        if wrong:
            raise TraceError(f"{path}: row {number} has {wrong[0][:40]!r}, which is not a count")
        if len(row.cells) != width:
            raise TraceError(
                f"{path}: row {number} must have {width} counts like the first row, but has "
                f"{len(row.cells)}"
            )
    counts_LE = as_array([[float(cell) for cell in row.cells] for row in rows], 2, str(path))
    return make_load([counts_LE], "csv", options.model)


class _CsvRow(NamedTuple):
    cells: list[str]
    is_quoted: bool


def _csv_rows(text: str, path: Path) -> list[_CsvRow]:
    """Returns the rows that are not empty. Raises TraceError."""
    lines = text.splitlines(keepends=True)
    reader, rows, first = csv.reader(lines), list[_CsvRow](), 0
    try:
        for cells in reader:
            is_quoted = any('"' in line for line in lines[first : reader.line_num])
            first = reader.line_num
            if any(cells):
                rows.append(_CsvRow(cells, is_quoted))
    except csv.Error as error:
        raise TraceError(f"{path} is not valid CSV: {error}") from None
    return rows


def import_token_lines(paths: Sequence[Path], options: ImportOptions) -> RoutingTrace:
    """Reads a trace from JSON lines. Raises TraceError unless every token has every layer once."""
    path = _one(paths)
    found: dict[tuple[int, int], Any] = {}
    for number, entry in enumerate(read_json_lines(path), 1):
        layer, token = entry.get("layer"), entry.get("token_idx")
        if not (_is_index(layer) and _is_index(token)):
            raise TraceError(
                f"{path}:{number}: layer and token_idx must be integers of 0 or more, got "
                f"{layer!r} and {token!r}"
            )
        if (token, layer) in found:
            raise TraceError(f"{path}:{number}: token {token} has layer {layer} twice")
        found[token, layer] = entry.get("topk_ids")
    tokens = sorted({token for token, _ in found})
    layers = sorted({layer for _, layer in found})
    if len(found) != len(tokens) * len(layers):
        raise TraceError(
            f"{path} has {len(found)} lines, but {len(tokens)} tokens in {len(layers)} "
            "layers need one line each"
        )
    rows = [[found[token, layer] for layer in layers] for token in tokens]
    ids_NLK = as_ids(rows, 3, f"{path}: topk_ids")
    _check_ids(ids_NLK, path, layers)
    return make_trace(ids_NLK, options, layers=layers, position_N=np.array(tokens))


def _one(paths: Sequence[Path]) -> Path:
    if len(paths) != 1:
        raise TraceError(f"got {len(paths)} files, but a recording in this format is one file")
    return paths[0]


def _numpy_arrays(path: Path) -> Mapping[str, NDArray[Any]]:
    """Returns the arrays of an npz by name, or that of an npy under ""; numpy itself refuses
    objects."""
    try:
        loaded = np.load(regular(path), allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"": loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist") from None
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error, MemoryError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path} cannot be read as numpy arrays: {reason}") from None


def _check_ids(ids: NDArray[Any], path: Path, layers: Sequence[int] = ()) -> None:
    if not ids.size or int(ids.min()) < 0:
        raise TraceError(f"{path} has no expert ids, or a negative one")
    try:
        check_distinct(ids, layers)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def _names(array: NDArray[Any] | None, samples: NDArray[Any], path: Path) -> list[str]:
    if array is None:
        return [""] * len(samples)
    count = int(samples[-1]) + 1
    if array.ndim != 1 or array.dtype.kind not in "US" or len(array) < count:
        raise TraceError(f"{path}: sample_name must be a list of {count} names")
    if array.dtype.kind == "S":
        array = np.char.decode(array, "utf-8", "replace")
    return [str(array[number]) for number in samples]


def _counted(sample_N: NDArray[Any]) -> NDArray[np.int64]:
    """Returns each token's number within its request."""
    order = np.argsort(sample_N, kind="stable")
    _, starts, counts = np.unique(sample_N[order], return_index=True, return_counts=True)
    position_N = np.empty(len(sample_N), np.int64)
    position_N[order] = np.arange(len(sample_N)) - np.repeat(starts, counts)
    return position_N


def _is_index(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _MAX_NUMBER


def _is_number(cell: str) -> bool:
    """Accepts numbers as spreadsheets write them; Python would also read 1_000 and digits of other
    scripts."""
    return _NUMBER.fullmatch(cell.strip()) is not None
