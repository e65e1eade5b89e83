"""Reads traces and tables of loads as the scenarios of one problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experts.placement.placement_error import PlacementInputError
from experts.placement.problem.loads import ExpertLoads, TokenChoices
from routing_predictor.importers.engine_loads import META
from routing_predictor.importers.importer import import_files
from routing_predictor.importers.tables import Imported, ImportOptions, read_json
from routing_predictor.traces.load_file import FORMAT, RecordedLoad, read_load
from routing_predictor.traces.metadata import read_metadata
from routing_predictor.traces.routing_error import TraceError
from routing_predictor.traces.trace import RoutingTrace, check_distinct
from routing_predictor.traces.trace_file import read_traces
from routing_predictor.traces.trace_stats import windows

_PLAN_KEYS = ("num_ranks", "physical_to_logical_map", "layer_list", "initial_global_assignments")
_COUNTED = ("vllm", "csv", "npz", "npy")  # they count layers among those with experts, from 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workloads:
    """Scenarios, and the tokens behind them if all files have tokens."""

    loads: ExpertLoads
    tokens: TokenChoices | None
    model: str  # its name, where a file says it
    has_model_numbers: bool  # layers are numbered as in the model, as far as the file tells

    @property
    def top_k(self) -> int | None:
        """Experts that a token chooses in a layer, if the files have tokens."""
        return None if self.tokens is None else int(self.tokens.expert_ids_NLK.shape[2])


def read_workloads(paths: Sequence[Path], num_windows: int, num_experts: int | None) -> Workloads:
    """Reads each file as a scenario, or as `num_windows` scenarios. Raises PlacementInputError,
    TraceError."""
    if not paths:
        raise PlacementInputError("give --trace or --load: a plan needs loads.")
    options = ImportOptions(num_experts=num_experts)
    found = [_read(path, options) for path in paths]
    for one, path in zip(found, paths, strict=True):
        _check_distinct(one, path)
    _check_alike(found, paths)
    names, tables = list[str](), list[NDArray[np.float64]]()
    for one, name in zip(found, _names(paths), strict=True):
        counts_WLE = _windows(one, num_windows, name)
        tables += list(counts_WLE)
        of_many = len(counts_WLE) > 1
        names += [
            f"{name} {number}/{len(counts_WLE)}" if of_many else name
            for number in range(1, len(counts_WLE) + 1)
        ]
    return Workloads(
        loads=ExpertLoads(
            counts_SLE=np.stack(tables), layers=found[0].layers, scenarios=tuple(names)
        ),
        tokens=_tokens(found),
        model=next((one.model for one in found if one.model), ""),
        has_model_numbers=all(_has_model_numbers(*pair) for pair in zip(found, paths, strict=True)),
    )


def _read(path: Path, options: ImportOptions) -> Imported:
    """Reads a file of moe-serve, or of a program that `trace import` knows."""
    if path.is_dir() and not (path / META).exists():
        return read_traces([path])
    if path.suffix == ".safetensors":
        is_load = path.is_file() and read_metadata(path).get("format") == FORMAT
        return read_load(path) if is_load else read_traces([path])
    try:
        return import_files([path], "auto", options)
    except TraceError as error:
        if _is_plan(path):
            raise PlacementInputError(
                f"{path} is a plan, not loads: give a recorded trace or a table of loads."
            ) from None
        named = str(error)
        raise TraceError(named if str(path) in named else f"{path}: {named}") from None


def holds_loads(path: Path) -> bool:
    """Returns whether a file holds loads that `read_workloads` takes; used to explain a file that
    is not a plan."""
    try:
        _read(path, ImportOptions())
    except (PlacementInputError, TraceError):
        return False
    return True


def _is_plan(path: Path) -> bool:
    """Returns whether a JSON file is a plan, of moe-serve or of another engine; used to explain a
    file that is not loads."""
    if path.suffix not in (".json", ".jsonl"):
        return False
    try:
        content = read_json(path)
    except TraceError:
        return False
    keys = content.keys() if isinstance(content, dict) else ()
    return any(key in keys for key in _PLAN_KEYS)


def _check_distinct(one: Imported, path: Path) -> None:
    """Checks that a token chooses an expert at most once in a layer, whatever the format."""
    if isinstance(one, RoutingTrace):
        try:
            check_distinct(one.expert_ids_NLK, one.layers)
        except TraceError as error:
            raise PlacementInputError(f"{path}: {error}.") from None


def _check_alike(found: Sequence[Imported], paths: Sequence[Path]) -> None:
    first = found[0]
    for other, path in zip(found, paths, strict=True):
        if other.num_experts != first.num_experts:
            raise PlacementInputError(
                f"{paths[0]} has {first.num_experts} experts, but {path} has "
                f"{other.num_experts}: if the last experts were never chosen, give their "
                "number with --num-experts."
            )
        if other.layers != first.layers:
            raise PlacementInputError(
                f"{paths[0]} has {_told(first.layers)}, but {path} has "
                f"{_told(other.layers)}: all scenarios of a plan must have the same layers."
            )


def _told(layers: tuple[int, ...]) -> str:
    return f"{len(layers)} layers ({layers[0]} to {layers[-1]})"


def _names(paths: Sequence[Path]) -> list[str]:
    """Names the scenarios by file name, with the folder's name if names repeat, else in full."""
    for name in (lambda p: p.stem, lambda p: f"{p.parent.name}/{p.stem}"):
        names = [name(path.absolute()) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _windows(one: Imported, count: int, name: str) -> NDArray[np.float64]:
    """Returns [W, L, E]: equal runs of a trace's tokens, or of a table's steps."""
    available = one.num_tokens if isinstance(one, RoutingTrace) else len(one.counts_SLE)
    if available < count:
        what = "tokens" if isinstance(one, RoutingTrace) else "steps"
        raise PlacementInputError(
            f"{name} has only {available} {what}, too few for --windows {count}."
        )
    if isinstance(one, RoutingTrace):
        return windows(one, count).astype(np.float64)
    return np.stack([part.sum(axis=0) for part in np.array_split(one.counts_SLE, count)])


def _tokens(found: Sequence[Imported]) -> TokenChoices | None:
    traces = [one for one in found if isinstance(one, RoutingTrace)]
    if len(traces) < len(found) or len({trace.top_k for trace in traces}) > 1:
        return None
    return TokenChoices(
        expert_ids_NLK=np.concatenate([trace.expert_ids_NLK for trace in traces]),
        num_experts=traces[0].num_experts,
        layers=traces[0].layers,
    )


def _has_model_numbers(one: Imported, path: Path) -> bool:
    if isinstance(one, RecordedLoad):
        return one.source not in _COUNTED
    return path.suffix.lstrip(".") not in _COUNTED
