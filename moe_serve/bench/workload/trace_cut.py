"""Fits a trace to a server: takes a part of it, changes its speed and shortens its requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_serve.bench.workload.request import Block
from moe_serve.bench.workload.trace_rows import Trace, TraceRow
from moe_serve.errors import BenchError


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
