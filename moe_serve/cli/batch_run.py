"""A batch from its first line to its last: so many lines under way at once, rows as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from moe_serve.cli.batch_lines import BatchLine, BatchRow, read_line, repeated
from moe_serve.cli.batch_output import BatchOutput
from moe_serve.cli.batch_target import BatchTarget


@dataclass(slots=True)
class BatchCount:
    """What came of the lines so far."""

    answered: int = 0
    refused: int = 0  # the server answered with an error
    bad: int = 0  # never sent, or never answered
    skipped: int = 0  # an earlier run wrote their rows
    num_tokens: int = 0  # that were generated
    begun: float | None = None  # when the first line could be sent
    on_change: Callable[[BatchCount], None] = field(default=lambda _: None, repr=False)

    @property
    def num_lines(self) -> int:
        return self.answered + self.refused + self.bad + self.skipped

    @property
    def num_failed(self) -> int:
        return self.refused + self.bad

    def add(self, row: BatchRow) -> None:
        if row.is_good:
            self.answered += 1
            self.num_tokens += _num_generated(row)
        elif row.status is not None:
            self.refused += 1
        else:
            self.bad += 1
        self.on_change(self)

    def skip(self) -> None:
        self.skipped += 1
        self.on_change(self)


async def run_lines(
    lines: Iterable[bytes],
    output: BatchOutput,
    target: BatchTarget,
    concurrency: int,
    count: BatchCount,
) -> None:
    """Answer what has no row yet. Raises what the target raises; rows that are written stay."""
    todo = _todo(lines, output, count)
    workers = [
        asyncio.create_task(_work(todo, output, target, count)) for _ in range(max(1, concurrency))
    ]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _work(
    todo: Iterable[BatchLine], output: BatchOutput, target: BatchTarget, count: BatchCount
) -> None:
    for line in todo:  # one iterator of all workers: each takes the next line
        row = await target.send(line)
        output.append(row)
        count.add(row)


def _todo(lines: Iterable[bytes], output: BatchOutput, count: BatchCount) -> Iterable[BatchLine]:
    """Lines to send; the others are skipped, or get their rows at once."""
    first: dict[str, int] = {}  # custom_id -> its line
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        line = read_line(number, text)
        if line.custom_id is not None and first.setdefault(line.custom_id, number) != number:
            line = repeated(number, line.custom_id, first[line.custom_id])
        if output.has(number, line.custom_id):
            count.skip()
        elif isinstance(line, BatchRow):
            output.append(line)
            count.add(line)
        else:
            yield line


def _num_generated(row: BatchRow) -> int:
    """By the usage of chat and text completions, or of responses and messages."""
    usage = row.body.get("usage") if isinstance(row.body, dict) else None
    if not isinstance(usage, dict):
        return 0
    number = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return number if isinstance(number, int) else 0
