"""Placeholder."""
from collections.abc import Iterator, Sequence
from lengths.stream import Streamed

def queue_gain(found: Sequence[Streamed]) -> Iterator[tuple[str, ...]]:
    yield from ()
