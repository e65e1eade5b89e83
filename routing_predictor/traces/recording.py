"""A recording: a folder of numbered parts of one trace, capped in bytes with the recordings before
it, the oldest dropped.

    part-000007.safetensors  part-000008.safetensors  ...

Whoever adds tokens never waits for the disk: full parts are written by a thread, and a part that
comes while it is still busy with two others is lost, and counted; only who is patient waits, and
is told by a TraceError that the disk failed.
N tokens, L layers, K choices.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from routing_predictor.traces.capped_parts import CappedParts, Part
from routing_predictor.traces.errors import TraceError
from routing_predictor.traces.trace import DECODE, PREFILL, RoutingTrace
from routing_predictor.traces.trace_file import SUFFIX, id_dtype, write_trace

_log = logging.getLogger(__name__)

_NO_LABELS: Mapping[str, str] = {}
_MAX_FULL_PARTS = 2  # that wait for the disk
_MAX_RUNS = 2**15  # of tokens in a part: each weighs some 400 bytes until it is written


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """What all tokens of a recording have in common."""

    num_experts: int
    layers: tuple[int, ...]
    model: str = ""
    model_identity: str = ""
    placement_version: str = ""
    has_tokens: bool = False
    has_weights: bool = False


class TracedTokens(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """Some tokens of one request, from position `start` on.

    A struct, as one is made for each sequence of each step: ten times as fast as a dataclass.
    """

    request_id: str
    start: int
    num_prompt_tokens: int  # positions below this one are the prompt's
    token_ids_N: NDArray[np.int32]
    expert_ids_NLK: NDArray[np.integer[Any]]
    weights_NLK: NDArray[np.float16] | None = None


@dataclass(frozen=True, slots=True)
class RecordingStats:
    """So far. Lost: tokens that came faster than the disk takes them, or after it failed."""

    num_tokens: int = 0
    num_written_bytes: int = 0
    num_parts: int = 0  # in the folder
    num_dropped_parts: int = 0
    num_lost_tokens: int = 0
    failure: str | None = None  # why nothing is written any more


class RecordingWriter:
    """`add` and `close` are for one thread at a time, `stats` for any."""

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
        """Makes the folder, for its owner alone. `labels`: of requests; `earlier`: what counts
        towards `max_bytes` too, and is dropped first. Raises TraceError."""
        self._labels = labels
        self._folder, self._header = folder, header
        self._part_bytes, self._parts = part_bytes, CappedParts(max_bytes, earlier)
        id_dtype(header.num_experts)  # raises where ids do not fit
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
        """Keep what a step told of some requests; the arrays must not change any more."""
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
        """Write what is left, and wait for it."""
        self._full.put(self._open)  # however busy the disk is: it is waited for anyway
        self._open, self._open_bytes = [], 0
        self._full.put(None)
        self._thread.join()
        if self._is_patient and not self._num_made:
            with contextlib.suppress(OSError):
                self._folder.rmdir()  # nothing came: the name is free again
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
        """Who waits for the disk is told that it failed."""
        if self._is_patient and self._failure is not None:
            raise TraceError(f"{self._failure}; {self._num_made} parts were written before")

    def _token_bytes(self, tokens: TracedTokens) -> int:
        """Of a token in the file."""
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
        """The writing thread."""
        while (part := self._full.get()) is not None:
            if not part:
                continue
            if self._failure is None:
                try:
                    self._write(part)
                    continue
                except TraceError as error:
                    self._failure = str(error)
                except Exception as error:  # whatever it is, who adds must not wait for ever
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
    """Runs of tokens as one trace, in the order in which they came; at least one."""
    numbers: dict[str, int] = {}
    for part in parts:
        numbers.setdefault(part.request_id, len(numbers))
    of_requests = tuple(labels.get(request_id, "") for request_id in numbers)
    counts = np.array([len(part.expert_ids_NLK) for part in parts])
    before = np.cumsum(counts) - counts
    offsets = np.array([part.start for part in parts]) - before
    position_N = np.arange(counts.sum()) + np.repeat(offsets, counts)
    prompt_N = np.repeat([part.num_prompt_tokens for part in parts], counts)
    ids_NLK = np.concatenate([part.expert_ids_NLK for part in parts])
    weights = [part.weights_NLK for part in parts if part.weights_NLK is not None]
    assert not header.has_weights or len(weights) == len(parts), "weights were asked for"
    return RoutingTrace(
        expert_ids_NLK=ids_NLK.astype(id_dtype(header.num_experts), copy=False),
        request_N=np.repeat([numbers[part.request_id] for part in parts], counts).astype(np.int32),
        position_N=position_N.astype(np.int32),
        phase_N=np.where(position_N < prompt_N, PREFILL, DECODE).astype(np.uint8),
        num_experts=header.num_experts,
        layers=header.layers,
        request_ids=tuple(numbers),
        labels=of_requests if any(of_requests) else (),
        model=header.model,
        model_identity=header.model_identity,
        placement_version=header.placement_version,
        token_N=np.concatenate([p.token_ids_N for p in parts]) if header.has_tokens else None,
        weights_NLK=np.concatenate(weights) if header.has_weights else None,
        recording=recording,
    )


def _num_tokens(part: Sequence[TracedTokens]) -> int:
    return sum(len(tokens.token_ids_N) for tokens in part)
