"""Recorded workloads: the CSV of Azure and BurstGPT, Mooncake's JSON lines, and our own.

`TraceCut` fits one to a server: it takes a part, changes its speed and shortens its requests.
"""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from moe_serve.bench.workload.prompt_maker import Block, Prompt
from moe_serve.errors import BenchError
from moe_serve.regular_file import regular_file

MOONCAKE_BLOCK_TOKENS = 512
_TIMES = ("TIMESTAMP", "Timestamp", "timestamp", "at_s", "t", "arrival_s", "arrived_at")
_PROMPTS = (
    "ContextTokens",
    "Request tokens",
    "input_length",
    "prompt_tokens",
    "num_prefill_tokens",
)
_OUTPUTS = (
    "GeneratedTokens", "Response tokens", "output_length", "output_tokens", "num_decode_tokens"
)  # fmt: skip
# Columns that a trace may have.
_TENANTS = ("tenant", "client", "user", "tenant_id", "client_id")
_TIERS = ("tier", "service_tier")
_SESSIONS = ("session", "session_id", "Session ID", "conversation_id")
_LONGEST_LABEL = 200
_COARSE_MS = 1000  # times that are all multiples of a second or more were rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One recorded request."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[Block, ...] = ()
    prompt: Prompt | None = None
    tenant: str = ""
    tier: str = ""
    session: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Rows ordered by time; the first is at 0."""

    rows: tuple[TraceRow, ...]
    num_skipped: int = 0  # rows without an answer: requests that failed when they were recorded


def read_trace(path: Path) -> Trace:
    """Reads a trace; the format follows from the file's name and first line. .gz and .xz are
    unpacked."""
    try:
        with _opened(path) as file:
            is_json = ".jsonl" in path.suffixes or ".json" in path.suffixes
            found = list(_json_rows(file, path) if is_json else _csv_rows(file, path))
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror or error}.") from None
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        raise BenchError(f"cannot unpack {path}: {error}.") from None
    except UnicodeDecodeError:
        raise BenchError(f"{path} is not text in UTF-8.") from None
    except csv.Error as error:
        raise BenchError(f"{path} is not CSV: {error}.") from None
    rows = [row for row in found if row.prompt_tokens > 0 and row.output_tokens > 0]
    if not rows:
        raise BenchError(f"{path} has no request with a prompt and an answer.")
    rows.sort(key=lambda row: row.at_s)
    start = rows[0].at_s
    if start < 0:
        raise BenchError(f"{path} has a request at {start:g} s: times must be 0 or more.")
    return Trace(
        rows=tuple(replace(row, at_s=row.at_s - start) for row in rows),
        num_skipped=len(found) - len(rows),
    )


def _opened(path: Path) -> IO[str]:
    regular_file(path)
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _csv_rows(file: Iterable[str], path: Path) -> Iterator[TraceRow]:
    reader = csv.DictReader(file)
    names = reader.fieldnames or ()
    time, prompt, output = (_column(names, known, path) for known in (_TIMES, _PROMPTS, _OUTPUTS))
    for row in reader:
        try:
            yield TraceRow(
                at_s=_seconds(row[time]),
                prompt_tokens=int(float(row[prompt])),
                output_tokens=int(float(row[output])),
                tenant=_label(row, _TENANTS),
                tier=_label(row, _TIERS),
                session=_label(row, _SESSIONS),
            )
        except (ValueError, TypeError, OverflowError):
            raise BenchError(
                f"line {reader.line_num} of {path} is not a request: {_shown(row)}."
            ) from None


def _column(names: Sequence[str], known: Sequence[str], path: Path) -> str:
    for name in known:
        if name in names:
            return name
    raise BenchError(
        f"{path} has no column {' or '.join(known)}; it has {', '.join(names) or 'none'}."
    )


def _seconds(text: str) -> float:
    """Parses a number of seconds, or a date and time with any number of decimals, in UTC if it
    states no zone: the clock of the machine that replays the trace may change in the middle of
    it."""
    try:
        seconds = float(text)
    except ValueError:
        whole, _, rest = text.strip().partition(".")
        decimals = rest[: len(rest) - len(rest.lstrip("0123456789"))]
        zone = rest[len(decimals) :].replace("Z", "+00:00")
        moment = datetime.fromisoformat(whole + zone)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        seconds = moment.timestamp() + (float(f"0.{decimals}") if decimals else 0.0)
    if not math.isfinite(seconds):
        raise ValueError(text)
    return seconds


def _json_rows(file: Iterable[str], path: Path) -> Iterator[TraceRow]:
    rows: list[tuple[int, TraceRow]] = []  # (milliseconds or -1, row)
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            rows.append(_json_row(json.loads(line)))
        except (ValueError, LookupError, TypeError, OverflowError):
            raise BenchError(f"line {number} of {path} is not a request: {line[:80]!r}.") from None
    yield from _spread(rows)


def _json_row(row: Mapping[str, Any]) -> tuple[int, TraceRow]:
    """Parses a JSON line: Mooncake's `timestamp` is in milliseconds, our own `at_s` in seconds."""
    is_own = "timestamp" not in row
    at_ms = -1 if is_own else int(row["timestamp"])
    at_s = float(row["at_s"]) if is_own else at_ms / 1e3
    prompt = row.get("prompt", row.get("messages"))
    given = row.get("input_length", row.get("prompt_tokens"))
    num_prompt = _guess(prompt) if given is None else int(given)
    num_output = int(row["output_length"] if "output_length" in row else row["output_tokens"])
    if not math.isfinite(at_s):
        raise ValueError(at_s)
    return at_ms, TraceRow(
        at_s=at_s,
        prompt_tokens=num_prompt,
        output_tokens=num_output,
        blocks=_blocks(row, num_prompt),
        prompt=prompt,
        tenant=_label(row, _TENANTS),
        tier=_label(row, _TIERS),
        session=_label(row, _SESSIONS),
    )


def _label(row: Mapping[str, Any], known: Sequence[str]) -> str:
    """Reads an optional name, which may be written as a number; empty: none."""
    value = next((row[name] for name in known if row.get(name) is not None), "")
    if not isinstance(value, str | int) or len(str(value)) > _LONGEST_LABEL:
        raise ValueError(value)
    return str(value)


def _blocks(row: Mapping[str, Any], num_prompt: int) -> tuple[Block, ...]:
    """Reads Mooncake's `hash_ids`, or our own `prefix` with its `prefix_tokens`."""
    if "prefix" in row:
        num_tokens = min(int(row["prefix_tokens"]), num_prompt)
        return (Block(key=f"prefix {row['prefix']}", num_tokens=num_tokens),)
    ids = row.get("hash_ids") or ()
    size = int(row.get("block_size", MOONCAKE_BLOCK_TOKENS))
    sizes = (min(size, num_prompt - i * size) for i in range(len(ids)))
    return tuple(
        Block(key=f"hash {key}", num_tokens=num_tokens)
        for key, num_tokens in zip(ids, sizes, strict=True)
        if num_tokens > 0
    )


def _guess(prompt: Prompt | None) -> int:
    """Estimates the tokens of a prompt whose count is not in the file. Used only for planning; the
    server's usage counts."""
    if prompt is None:
        raise ValueError("neither a prompt nor its length")
    if isinstance(prompt, str):
        return max(1, len(prompt) // 4)
    return max(1, len(prompt) if prompt and isinstance(prompt[0], int) else len(str(prompt)) // 4)


def _spread(rows: list[tuple[int, TraceRow]]) -> Iterator[TraceRow]:
    """Spreads the requests of a step evenly if times were rounded to a second or more.

    Mooncake's published traces have steps of 3 s: 3000 3000 3000 -> 3.0 4.0 5.0.
    """
    step_ms = math.gcd(*(at_ms for at_ms, _ in rows)) if rows else 0
    if step_ms < _COARSE_MS:
        yield from (row for _, row in rows)
        return
    ordered = sorted(rows, key=lambda pair: pair[0])
    for at_ms, pairs in groupby(ordered, key=lambda pair: pair[0]):
        together = [row for _, row in pairs]
        for i, row in enumerate(together):
            yield replace(row, at_s=(at_ms + step_ms * i / len(together)) / 1e3)


def _shown(row: Mapping[str, object]) -> str:
    return ", ".join(str(value) for value in row.values())[:80]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCut:
    """The changes applied to a trace: first the part, then the times, then the lengths, which are
    scaled and then cut."""

    start_s: float = 0.0  # in the trace's own time
    max_requests: int | None = None
    scale_time: float = 1.0  # 0.5: twice as fast
    scale_prompt: float = 1.0
    scale_output: float = 1.0
    max_prompt: int | None = None
    max_output: int | None = None

    def of(self, trace: Trace) -> Trace:
        rows = self._part(trace)
        if not rows:
            last = trace.rows[-1].at_s
            raise BenchError(
                f"the trace ends after {last:.1f} s: --trace-start {self.start_s:g} leaves nothing."
            )
        first = rows[0].at_s
        return replace(trace, rows=tuple(self._row(row, first) for row in rows))

    def num_cut(self, trace: Trace) -> int:
        """Counts the requests of the part that --max-prompt or --max-output shortened. A prompt
        that the trace itself holds is sent as it is."""
        return sum(
            (not row.prompt and _is_above(row.prompt_tokens * self.scale_prompt, self.max_prompt))
            or _is_above(row.output_tokens * self.scale_output, self.max_output)
            for row in self._part(trace)
        )

    def _part(self, trace: Trace) -> list[TraceRow]:
        return [row for row in trace.rows if row.at_s >= self.start_s][: self.max_requests]

    def _row(self, row: TraceRow, first: float) -> TraceRow:
        num_prompt = _scaled(row.prompt_tokens, self.scale_prompt, self.max_prompt)
        return replace(
            row,
            at_s=(row.at_s - first) * self.scale_time,
            prompt_tokens=num_prompt,
            output_tokens=_scaled(row.output_tokens, self.scale_output, self.max_output),
            blocks=self._blocks(row.blocks, num_prompt),
        )

    def _blocks(self, blocks: tuple[Block, ...], num_prompt: int) -> tuple[Block, ...]:
        """Scales blocks like the prompt, so that the shared part keeps its share."""
        kept: list[Block] = []
        for block in blocks:
            size = min(_scaled(block.num_tokens, self.scale_prompt, None), num_prompt)
            if size > 0:
                kept.append(replace(block, num_tokens=size))
            num_prompt -= size
        return tuple(kept)


def _scaled(num_tokens: int, factor: float, limit: int | None) -> int:
    scaled = max(1, round(num_tokens * factor))
    return scaled if limit is None else min(scaled, limit)


def _is_above(num_tokens: float, limit: int | None) -> bool:
    return limit is not None and round(num_tokens) > limit
