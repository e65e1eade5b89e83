"""Measures the cost of a constraint: its compilation, and a mask for each token.

    python benchmarks/run.py grammar_masks
    python benchmarks/run.py grammar_masks --vocabulary 150000
    python benchmarks/run.py grammar_masks --different 10000

A vocabulary larger than the demonstration model's consists of pairs of its tokens: it has a
realistic size, but belongs to no real model. The host's sampler applies the masks to random logits.
`--different` compiles that many different schemas and reports the memory that remains in use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import numpy as np
import psutil
import torch

from harness.environment import describe_environment
from moe_kernels.interface.token_sampler import TokenMasks, ban_others, num_words
from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.matcher import SequenceMatcher
from moe_serve.engine.sampling.grammar.compiler import compile_constraint
from moe_serve.engine.sampling.grammar.gate import GrammarGate
from moe_serve.engine.sampling.grammar.grammars import Grammars
from moe_serve.engine.sampling.grammar.vocabulary import Vocabulary, vocabulary_of
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.text.assistant.format_grammars import Spelling, thinking_lead
from moe_serve.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ANSWER = '{"name": "The king of the bells and of the river", "age": 42, "tags": ["red", "blue"]}'
THOUGHT = "The king of the bells and of the river is 42, so much is said. " * 20 + "</think>"
LEAD = thinking_lead("<think>", "</think>", Spelling({}), is_open=True, has_layout=True)
TAGS = {
    "structures": [
        {"begin": f"<function=f{i}>", "schema": PERSON, "end": "</function>"} for i in range(4)
    ],
    "triggers": ["<function="],
}
CALLED = THOUGHT + f"<function=f2>{ANSWER}</function> so it is."
CASES = (
    ("json_object", Constraint("json_object"), ANSWER),
    ("json_schema", Constraint("json_schema", json.dumps(PERSON)), ANSWER),
    ("thought, then", Constraint("json_schema", json.dumps(PERSON), LEAD), THOUGHT + ANSWER),
    ("text, then tag", Constraint("structural_tag", json.dumps(TAGS)), CALLED),
    ("regex", Constraint("regex", "[a-z ]{20,200}"), "the king of the bells and of the river"),
    ("choice", Constraint("choice", json.dumps([f"item {i}" for i in range(200)])), "item 77"),
)


def vocabulary(size: int) -> tuple[Vocabulary, Tokenizer]:
    tokenizer = Tokenizer.load(demo_model_folder())
    own = vocabulary_of(tokenizer, tokenizer.vocab_size, frozenset(tokenizer.eos_token_ids))
    rng, tokens = np.random.default_rng(0), dict.fromkeys(own.tokens)
    while len(tokens) < size:
        left, right = rng.integers(3, len(own.tokens), 2)
        tokens.setdefault(own.tokens[left] + own.tokens[right])
    return Vocabulary(tuple(tokens)[: max(size, 1)], own.special_ids, own.eos_ids), tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--different", type=int, help="schemas, each sent once")
    options = parser.parse_args()
    torch.set_num_threads(1)
    words, tokenizer = vocabulary(options.vocabulary)
    if options.different:
        _send_different(options.different, words)
        return 0
    size, clock = len(words.tokens), time.perf_counter()
    assert words.tokenizer is not None, "made here, so that no case pays for it"
    made = time.perf_counter() - clock
    about = describe_environment()
    print(f"{about['cpu']}, {about['cores']} cores; {size} tokens, ready in {1e3 * made:.0f} ms")
    print(f"{'constraint':<14}{'compile ms':>12}{'mask us: median':>18}{'p99':>8}{'max':>8}")
    for name, constraint, answer in CASES:
        ids = tokenizer.encode(answer, add_special_tokens=False)
        compile_ms, masks_us = _walk(constraint, words, ids, options.runs)
        p99 = float(np.percentile(masks_us, 99))
        columns = f"{statistics.median(masks_us):>18.0f}{p99:>8.0f}{max(masks_us):>8.0f}"
        print(f"{name:<14}{compile_ms:>12.1f}{columns}")
    print(f"put on logits: {_ban(size, 1):.0f} us for 1 row, {_ban(size, 16):.0f} us for 16")
    return 0


def _send_different(num_schemas: int, words: Vocabulary) -> None:
    """Returns the memory of this process since the first schema, and that of the compiling
    process.
    """
    gate = GrammarGate(Grammars(lambda: words))
    print(
        f"{'schemas':>8}{'here, MiB more':>16}{'worker, MiB':>13}{'compiled':>10}{'verdicts':>10}"
    )
    try:
        before = 0.0
        for number in range(1, num_schemas + 1):
            schema = {"type": "object", "properties": {f"f{number}": {"enum": [number]}}}
            constraint = gate.check(Constraint("json_schema", json.dumps(schema)))
            gate.grammars.matcher(constraint)
            if number == 1:
                before = _own_mib(os.getpid())
            if number in (1, 300, 1000) or number % max(1, num_schemas // 4) == 0:
                (worker,) = psutil.Process().children()
                here = _own_mib(os.getpid()) - before
                columns = f"{here:>16.1f}{_own_mib(worker.pid):>13.1f}"
                print(f"{number:>8}{columns}{len(gate.grammars):>10}{len(gate):>10}", flush=True)
    finally:
        gate.close()


def _own_mib(pid: int) -> float:
    """Returns the private memory of the process, without pages of files."""
    memory = psutil.Process(pid).memory_info()
    return float(memory.rss - getattr(memory, "shared", 0)) / 2**20


def _walk(
    constraint: Constraint, words: Vocabulary, ids: list[int], runs: int
) -> tuple[float, list[float]]:
    """Returns the median milliseconds to compile, and the microseconds of every mask of an
    answer.
    """
    compiled, masks = [], []
    for _ in range(runs):
        clock = time.perf_counter()
        matcher = SequenceMatcher(compile_constraint(constraint, words).deep_copy())
        compiled.append(1e3 * (time.perf_counter() - clock))
        for count in range(len(ids) + 1):
            bits_W = np.zeros(num_words(len(words.tokens)), np.uint32)
            clock = time.perf_counter()
            why = matcher.fill(ids[:count], bits_W)
            masks.append(1e6 * (time.perf_counter() - clock))
            assert why is None, f"{constraint} after {ids[:count]}: {why}"
    return statistics.median(compiled), masks


def _ban(vocab_size: int, num_rows: int) -> float:
    """Returns the microseconds to copy the logits and ban tokens in them."""
    logits_SV = torch.randn(num_rows, vocab_size)
    bits = np.full((num_rows, num_words(vocab_size)), 0x55555555, np.uint32)
    masks, seconds = TokenMasks(np.arange(num_rows), bits), []
    for _ in range(20):
        clock = time.perf_counter()
        ban_others(logits_SV.clone(), masks)
        seconds.append(time.perf_counter() - clock)
    return 1e6 * statistics.median(seconds)
