"""Records a trace as a folder of numbered parts, limited in bytes together with earlier recordings;
the oldest parts are deleted.

    traces/20260102-030405/part-000007.safetensors      part-000008.safetensors  ...
    traces/20260102-030405-2/part-000000.safetensors    of the second recording in that second

Only files with such names are ever deleted, and a folder when it is empty.

Adding tokens never waits for the disk: a thread writes full parts. A part that is full while two
others still wait for the disk is lost and counted. Only a writer with `is_patient` waits instead,
and gets a TraceError if the disk fails. N tokens, L layers, K choices.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from routing_predictor.traces.routing_error import TraceError
from routing_predictor.traces.trace import DECODE, PREFILL, RoutingTrace
from routing_predictor.traces.trace_file import SUFFIX, id_dtype, write_trace

_log = logging.getLogger(__name__)

_NO_LABELS: Mapping[str, str] = {}
_RECORDING = re.compile(r"\d{8}-\d{6}(-\d+)?")
_MAX_FULL_PARTS = 2  # parts that may wait for the disk
_MAX_RUNS = 2**15  # runs of tokens in a part; each uses some 400 bytes until it is written


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """The facts that all tokens of a recording share."""

    num_experts: int
    layers: tuple[int, ...]
    model: str = ""
    model_identity: str = ""
    placement_version: str = ""
    has_tokens: bool = False
    has_weights: bool = False


class TracedTokens(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """Consecutive tokens of one request, from position `start` on.

    A struct, because one is made for each sequence of each step: ten times as fast as a dataclass.
    """

    request_id: str
    start: int
    num_prompt_tokens: int  # positions below this one belong to the prompt
    token_ids_N: NDArray[np.int32]
    expert_ids_NLK: NDArray[np.integer[Any]]
    weights_NLK: NDArray[np.float16] | None = None
    adapter: str = ""  # its name and the first digits of its digest; empty: the base model


@dataclass(frozen=True, slots=True)
class RecordingStats:
    """Counts so far. Lost tokens came faster than the disk takes them, or after it failed."""

    num_tokens: int = 0
    num_written_bytes: int = 0
    num_parts: int = 0  # in the folder
    num_dropped_parts: int = 0
    num_lost_tokens: int = 0
    failure: str | None = None  # the reason why writing has stopped


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a recording."""

    path: Path
    size: int


class CappedParts:
    """The parts of all recordings. One thread adds parts; any thread may read `num_own` and
    `num_dropped`."""

    def __init__(self, max_bytes: int, earlier: Iterable[Part] = ()) -> None:
        """`earlier` lists the parts of other recordings, the oldest first; they count too."""
        self._max_bytes = max_bytes
        self._parts = deque(earlier)
        self._total, self._num_earlier = sum(part.size for part in self._parts), len(self._parts)
        self.num_own = 0  # own parts that exist
        self.num_dropped = 0  # deleted parts of any recording

    def add(self, path: Path, size: int) -> None:
        """Registers a new file and deletes old ones. The newest stays, whatever its size. Raises
        TraceError."""
        self._parts.append(Part(path, size))
        self._total += size
        self.num_own += 1
        while len(self._parts) > 1 and self._total > self._max_bytes:
            self._drop(self._parts.popleft())

    def _drop(self, part: Part) -> None:
        try:
            part.path.unlink(missing_ok=True)
        except OSError as error:
            raise TraceError(f"{part.path} cannot be deleted: {error.strerror}") from None
        self._total -= part.size
        self.num_dropped += 1
        if self._num_earlier:
            self._num_earlier -= 1
            with contextlib.suppress(OSError):  # the folder is not empty
                part.path.parent.rmdir()
        else:
            self.num_own -= 1


def earlier_parts(directory: Path) -> list[Part]:
    """Lists the parts of the recordings in a folder, as `Tracing` names them, the oldest first.
    Raises TraceError if the folder cannot be read; a path that is not a folder has no parts."""
    if not directory.is_dir():
        return []
    try:
        folders = [each for each in directory.iterdir() if _RECORDING.fullmatch(each.name)]
        folders.sort(key=lambda each: tuple(int(part) for part in each.name.split("-")))
        files = [path for folder in folders for path in sorted(folder.glob(f"part-*{SUFFIX}"))]
    except OSError as error:
        raise TraceError(f"{directory} cannot be read: {error.strerror}") from None
    return [Part(path, _size(path)) for path in files]


def _size(path: Path) -> int:
    """Returns the size of a file, 0 if it has been deleted meanwhile."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


class RecordingWriter:
    """Writes a recording. `add` and `close` are for one thread at a time, `stats` for any."""

    def __init__(
        self,
        folder: Path,
        header: TraceHeader,
        *,
        part_bytes: int,
        max_bytes: int,
        is_patient: bool = False,
        labels: Mapping[str, str] = _NO_LABELS,
        earlier: Iterable[Part] = (),
    ) -> None:
        """Makes the folder, readable only by its owner. `labels` are those of requests; `earlier`
        parts also count towards `max_bytes` and are deleted first. Raises TraceError."""
        self._labels = labels
        self._folder, self._header = folder, header
        self._part_bytes, self._parts = part_bytes, CappedParts(max_bytes, earlier)
        id_dtype(header.num_experts)  # raises if ids do not fit
        try:
            folder.mkdir(parents=True, mode=0o700)
        except OSError as error:
            raise TraceError(f"{folder} cannot be made: {error.strerror}") from None
        self._is_patient = is_patient
        self._recording = secrets.token_hex(8)
        self._open: list[TracedTokens] = []
        self._open_bytes = 0
        self._full: queue.Queue[list[TracedTokens] | None] = queue.Queue(_MAX_FULL_PARTS + 1)
        self._num_tokens = self._num_written = self._num_made = self._num_lost = 0
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="moe-serve-trace", daemon=True)
        self._thread.start()

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def has_weights(self) -> bool:
        return self._header.has_weights

    def add(self, tokens: Sequence[TracedTokens]) -> None:
        """Records the tokens of a step; the arrays must not change any more."""
        if not tokens:
            return
        self._check_patient()
        self._open += tokens
        count = sum([len(each.token_ids_N) for each in tokens])
        self._num_tokens += count
        self._open_bytes += count * self._token_bytes(tokens[0])
        if self._open_bytes >= self._part_bytes or len(self._open) >= _MAX_RUNS:
            self._hand_over()

    def close(self) -> RecordingStats:
        """Writes the remaining tokens, and waits for it."""
        self._full.put(self._open)  # close() waits for the disk anyway
        self._open, self._open_bytes = [], 0
        self._full.put(None)
        self._thread.join()
        if self._is_patient and not self._num_made:
            with contextlib.suppress(OSError):
                self._folder.rmdir()  # nothing was recorded; the name becomes free again
        self._check_patient()
        return self.stats()

    def stats(self) -> RecordingStats:
        return RecordingStats(
            self._num_tokens,
            self._num_written,
            self._parts.num_own,
            self._parts.num_dropped,
            self._num_lost,
            self._failure,
        )

    def _check_patient(self) -> None:
        """Raises TraceError if the disk failed and the writer is patient."""
        if self._is_patient and self._failure is not None:
            raise TraceError(f"{self._failure}; {self._num_made} parts were written before")

    def _token_bytes(self, tokens: TracedTokens) -> int:
        """Returns the bytes of one token in the file."""
        _, num_layers, top_k = tokens.expert_ids_NLK.shape
        choice_bytes = tokens.expert_ids_NLK.itemsize + 2 * self._header.has_weights
        return int(num_layers * top_k * choice_bytes) + 9 + 4 * self._header.has_tokens

    def _hand_over(self) -> None:
        part, self._open, self._open_bytes = self._open, [], 0
        if self._is_patient or self._full.qsize() < _MAX_FULL_PARTS:
            self._full.put(part)
        else:
            self._num_lost += _num_tokens(part)

    def _run(self) -> None:
        """Writes full parts; runs on the writing thread."""
        while (part := self._full.get()) is not None:
            if not part:
                continue
            if self._failure is None:
                try:
                    self._write(part)
                    continue
                except TraceError as error:
                    self._failure = str(error)
                except Exception as error:  # after any error, callers of add must not wait for ever
                    self._failure = f"{self._folder}: {type(error).__name__}: {error}"
                _log.warning("nothing more is recorded: %s", self._failure)
            self._num_lost += _num_tokens(part)

    def _write(self, part: list[TracedTokens]) -> None:
        path = self._folder / f"part-{self._num_made:06}{SUFFIX}"
        size = write_trace(as_trace(part, self._header, self._labels, self._recording), path)
        self._num_made += 1
        self._num_written += size
        self._parts.add(path, size)


def as_trace(
    parts: Sequence[TracedTokens],
    header: TraceHeader,
    labels: Mapping[str, str] = _NO_LABELS,
    recording: str = "",
) -> RoutingTrace:
    """Joins runs of tokens (at least one) into a trace, in the order of their arrival."""
    numbers: dict[str, int] = {}
    for part in parts:
        numbers.setdefault(part.request_id, len(numbers))
    adapters = {part.request_id: part.adapter for part in parts}
    of_requests = tuple(labels.get(request_id, "") for request_id in numbers)
    counts = np.array([len(part.expert_ids_NLK) for part in parts])
    before = np.cumsum(counts) - counts
    offsets = np.array([part.start for part in parts]) - before
    position_N = np.arange(counts.sum()) + np.repeat(offsets, counts)
    prompt_N = np.repeat([part.num_prompt_tokens for part in parts], counts)
    ids_NLK = np.concatenate([part.expert_ids_NLK for part in parts])
    weights = [part.weights_NLK for part in parts if part.weights_NLK is not None]
    assert not header.has_weights or len(weights) == len(parts), (
        "all parts need weights, because the header asks for them"
    )
    return RoutingTrace(
        expert_ids_NLK=ids_NLK.astype(id_dtype(header.num_experts), copy=False),
        request_N=np.repeat([numbers[part.request_id] for part in parts], counts).astype(np.int32),
        position_N=position_N.astype(np.int32),
        phase_N=np.where(position_N < prompt_N, PREFILL, DECODE).astype(np.uint8),
        num_experts=header.num_experts,
        layers=header.layers,
        request_ids=tuple(numbers),
        labels=of_requests if any(of_requests) else (),
        adapters=tuple(adapters.values()) if any(adapters.values()) else (),
        model=header.model,
        model_identity=header.model_identity,
        placement_version=header.placement_version,
        token_N=np.concatenate([p.token_ids_N for p in parts]) if header.has_tokens else None,
        weights_NLK=np.concatenate(weights) if header.has_weights else None,
        recording=recording,
    )


def _num_tokens(part: Sequence[TracedTokens]) -> int:
    return sum(len(tokens.token_ids_N) for tokens in part)
