"""One engine in a process of its own: lines of JSON in, lines of JSON out (see `job`).

    echo '{"engine": "transformers", ...}' | python -m offline.worker   (in the folder benchmarks)

Runs in the interpreter of the engine, which may know nothing of moe-serve: this module and what it
imports need the standard library, and the engine's adapter what that engine brings.
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
    """Take turns until the input ends."""
    for line in turns:
        turn = Turn(**json.loads(line))
        start = time.perf_counter()
        token_ids = engine.generate(turn.prompts, turn.num_output)
        seconds = time.perf_counter() - start
        _send(replies, asdict(Answer(seconds=seconds, token_ids=token_ids)))


def _take_stdout() -> TextIO:
    """The pipe to our parent; what libraries print goes to stderr from here on."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _send(replies: TextIO, message: dict[str, object]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
