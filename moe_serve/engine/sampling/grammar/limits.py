"""Limits on the size of constraints and on the cost of compiling and following them.

The library's own limits count work, not seconds, so a grammar that one process has compiled within
them compiles in every process.
"""

from __future__ import annotations

import llguidance

MAX_DEPTH = 64  # of brackets
MAX_NODES = 10_000  # values and keys of a schema
MAX_CHOICES = 1024
MAX_REASON_CHARS = 200  # of the library's words in an error

COMPILE_TIMEOUT_S = 2.0  # usually a few ms
QUICK_TIMEOUT_S = 0.5  # for quick-looking constraints; beyond it they are judged again as slow ones
MAX_QUICK_CHARS, MAX_QUICK_COUNTS = 16_384, 10_000  # limits for looking quick
NUM_SLOW_WORKERS = 2  # beside the one for quick-looking constraints
MAX_WAITING_OF_CLIENT = 32  # of MAX_WAITING
WORKER_BYTES = 1 << 30  # of address space
MAX_WAITING = 64  # constraints waiting in each of the two lanes
# A step that needs a grammar that is not compiled yet, as on an attention rank, waits up to
# COMPILE_TIMEOUT_S, within this share of recent time, but always at least LEAST_PATIENCE_S.
PATIENCE_SHARE, LEAST_PATIENCE_S = 0.2, 0.1
MAX_COMPILING = 4  # threads for that
MAX_KEPT = 128  # compiled grammars; some 200 KB each, more for large ones
MAX_VERDICTS = 4096  # remembered verdicts, by digest


# Items of Earley's algorithm in one mask. An ordinary grammar needs up to 5 000 with 4 096 tokens
# and 30 000 with 150 000; the time of an ambiguous one grows with their third power.
_LEAST_ITEMS, _MOST_ITEMS, _ITEMS_PER_TOKEN = 10_000, 50_000, 0.3


def parser_limits(vocab_size: int) -> llguidance.LLParserLimits:
    """Returns the library's limits on a grammar's size and on the cost of one step of following it.
    All count work, so the same grammar ends at the same token on every machine."""
    items = round(_LEAST_ITEMS + _ITEMS_PER_TOKEN * vocab_size)
    return llguidance.LLParserLimits(
        max_grammar_size=200_000,
        max_lexer_states=16_000,  # 1 to 2 KB each
        initial_lexer_fuel=1_000_000,  # about 20 ms
        step_lexer_fuel=200_000,  # about 15 ms
        step_max_items=min(items, _MOST_ITEMS),
        verbose_errors=False,
    )
