"""Runs the process that compiles every grammar first, and that is ended if it takes too much time
or memory.

python -m moe_serve.engine.sampling.grammar.worker
"""

from __future__ import annotations

import os
import queue
import resource
import sys
import threading

import msgspec

from moe_serve.engine.sampling.grammar.compiler import check_parts, compile_constraint, lark_of
from moe_serve.engine.sampling.grammar.frames import Compile, Verdict, Words, receive, send
from moe_serve.engine.sampling.grammar.limits import WORKER_BYTES
from moe_serve.engine.sampling.grammar.vocabulary import Vocabulary
from moe_serve.errors import InvalidGrammarError

_STACK_BYTES = 1 << 21  # smaller than any server thread's, so what fits here fits there


def judge(order: Compile, vocabulary: Vocabulary) -> Verdict:
    try:
        constraint = lark_of(order.constraint)
        check_parts(constraint, vocabulary)
        compile_constraint(constraint, vocabulary)
    except InvalidGrammarError as error:
        return Verdict(why=str(error), place=error.place)
    return Verdict(constraint)


def _work(orders: queue.SimpleQueue[bytes]) -> None:
    words = msgspec.msgpack.decode(orders.get(), type=Words)
    vocabulary = Vocabulary(words.tokens, frozenset(words.special_ids), words.eos_ids)
    assert vocabulary.tokenizer is not None  # made before the first order
    send(1, Verdict())
    while True:
        send(1, judge(msgspec.msgpack.decode(orders.get(), type=Compile), vocabulary))


def main() -> int:
    """Runs until standard input ends, which means that the parent is gone, even while compiling."""
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.stack_size(_STACK_BYTES)
    threading.excepthook = lambda _: os._exit(1)  # e.g. MemoryError; a new worker is started
    threading.Thread(target=_work, args=(orders,), daemon=True).start()
    while (order := receive(0)) is not None:
        orders.put(order)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
