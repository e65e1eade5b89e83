"""Runs one engine in a separate process: lines of JSON in, lines of JSON out (see `job`).

    echo '{"engine": "transformers", ...}' | python -m offline.worker   (in the folder benchmarks)

It runs in the interpreter of the engine, in which moe-serve may be missing. This module and its
imports therefore need only the standard library, and the engine's adapter only the packages of that
engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import TextIO

from .engines import Engine, make_engine
from .job import Answer, Job, Turn


def main() -> None:
    replies = _take_stdout()
    job = Job(**json.loads(sys.stdin.readline()))
    engine = make_engine(job)
    _send(replies, asdict(engine.ready()))
    serve(engine, sys.stdin, replies)


def serve(engine: Engine, turns: Iterable[str], replies: TextIO) -> None:
    """Takes turns until the input ends."""
    for line in turns:
        turn = Turn(**json.loads(line))
        start = time.perf_counter()
        token_ids = engine.generate(turn.prompts, turn.num_output)
        seconds = time.perf_counter() - start
        _send(replies, asdict(Answer(seconds=seconds, token_ids=token_ids)))


def _take_stdout() -> TextIO:
    """Returns the pipe to the parent; output of libraries goes to stderr from then on."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _send(replies: TextIO, message: dict[str, object]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
