"""The gate for constraints before the engine: it refuses them in a sentence, stops them, or caches
them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.sampling.grammar.compile_lane import CompileLane, looks_quick
from moe_serve.engine.sampling.grammar.frames import Verdict
from moe_serve.engine.sampling.grammar.gate import GrammarGate
from moe_serve.engine.sampling.grammar.grammars import Grammars, digest
from moe_serve.engine.sampling.grammar.guard import Guard
from moe_serve.engine.sampling.grammar.limits import MAX_WAITING, MAX_WAITING_OF_CLIENT
from moe_serve.engine.sampling.grammar.source_check import STRING
from moe_serve.engine.sampling.grammar.vocabulary import Vocabulary
from moe_serve.errors import InvalidGrammarError, ServerOverloadedError

BYTES = Vocabulary(tuple(bytes([i]) for i in range(256)) + (b"<end>",), frozenset({256}), (256,))
RUNAWAY = Constraint("regex", "(x{3000}){1000}")  # takes seconds on any machine
LEAD = 'start: thought @answer\nthought[suffix="."]: /(?s:.*)/\n'
UNENDED = '"' + '\\"' * 2000  # a string that nothing but escaped quotes follow
LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


class YesGuard(Guard):
    """Accepts at once and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Constraint] = []

    def judge(self, constraint: Constraint, vocabulary: Vocabulary) -> Verdict:
        self.asked.append(constraint)
        return Verdict(constraint)


@pytest.fixture(scope="module")
def gate() -> object:
    opened = GrammarGate(Grammars(lambda: BYTES), Guard(timeout_s=2.0))
    yield opened
    opened.close()


def nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "true" + "}}" * depth


WRONG = [
    (Constraint("json_schema", "{"), "not valid JSON"),
    (Constraint("json_schema", "3"), "must be an object"),
    (Constraint("json_schema", '{"$ref":"#"}'), "no answer at all"),
    (Constraint("json_schema", json.dumps(LOOP)), "no answer at all"),
    (Constraint("json_schema", '{"$ref":"https://example.com/a"}'), "fetch"),
    (Constraint("json_schema", '{"not":{}}'), "not"),
    (Constraint("json_schema", '{"type":"nothing"}'), "nothing"),
    (Constraint("json_schema", nested(2000)), "4000 deep, at most 64"),
    (Constraint("json_schema", UNENDED), "Unterminated string"),
    (Constraint("json_schema", json.dumps({"enum": [0] * 10_001})), "at most 10000"),
    (Constraint("regex", ""), "empty"),
    (Constraint("regex", "(a"), "unclosed group"),
    (Constraint("regex", "(" * 3000 + ")" * 3000), "3000 deep"),
    (Constraint("choice", "[]"), "1 to 1024 choices"),
    (Constraint("choice", '[""]'), "the empty one"),
    (Constraint("choice", '["a",1]'), "a list of strings"),
    (Constraint("lark", "start: start"), "no answer at all"),
    (Constraint("lark", "start: missing"), "missing"),
    (Constraint("gbnf", "root = 3"), "::="),
    (Constraint("gbnf", 'root ::= "a'), ""),
]


@pytest.mark.parametrize(("constraint", "words"), WRONG, ids=lambda value: str(value)[:50])
def test_one_sentence_says_what_is_wrong(
    gate: GrammarGate, constraint: Constraint, words: str
) -> None:
    with pytest.raises(InvalidGrammarError) as caught:
        gate.check(constraint)
    message = str(caught.value)
    assert words in message and "\n" not in message and len(message) < 400, message
    assert caught.value.code == "invalid_grammar"
    again = pytest.raises(InvalidGrammarError, gate.check, constraint)
    assert str(again.value) == message


def test_a_string_without_an_end_is_looked_at_once() -> None:
    """A separate search for the end of every quote in 64 KB held the process for 15 s."""
    for source in (UNENDED, '"' + "\\" * 2001, '"a'):
        assert STRING.findall(source) == [source]
    assert STRING.sub("", '{"[\\"[": ["\\\\", "[') == "{: [, "


@pytest.mark.parametrize(
    ("constraint", "answer"),
    [
        (Constraint("regex", "\n"), b"\n"),
        (Constraint("choice", json.dumps(["a\x7f", "\x00"])), b"a\x7f"),
        (Constraint("choice", json.dumps(['\\u0041"\u2028'])), '\\u0041"\u2028'.encode()),
    ],
)
def test_unusual_characters(gate: GrammarGate, constraint: Constraint, answer: bytes) -> None:
    matcher = gate.grammars.matcher(gate.check(constraint))
    assert matcher.try_consume_tokens(list(answer)) == len(answer) and matcher.is_accepting()


def test_patterns_that_backtrackers_fear_are_fine(gate: GrammarGate) -> None:
    pattern = Constraint("regex", "(a+)+b")
    assert gate.check(pattern) == pattern


def test_a_worker_that_hangs_is_ended_and_the_next_is_served(gate: GrammarGate) -> None:
    gate.check(Constraint("regex", "first"))
    num_ended, worker = gate._guard.num_ended, gate._guard._worker
    assert worker is not None
    os.kill(worker.pid, signal.SIGSTOP)
    hanging = Constraint("regex", "hanging")
    with pytest.raises(InvalidGrammarError, match="longer than 2 s"):
        gate.check(hanging)
    assert gate._guard.num_ended == num_ended + 1 and worker.poll() is not None
    assert gate.check(Constraint("regex", "after")).source == "after"
    with pytest.raises(InvalidGrammarError, match="longer than 2 s"):
        gate.check(hanging)
    assert gate._guard.num_ended == num_ended + 1, "remembered: no second worker is spent on it"


@pytest.mark.parametrize("lead", ["", LEAD])
def test_a_runaway_is_ended(lead: str) -> None:
    """A grammar that compiles much longer than the limit is stopped, with a lead and without."""
    gate = GrammarGate(Grammars(lambda: BYTES), Guard(timeout_s=0.1))
    try:
        with pytest.raises(InvalidGrammarError, match="longer than 0.1 s"):
            gate.check(replace(RUNAWAY, lead=lead))
        assert gate._guard.num_ended == 1
    finally:
        gate.close()


def test_a_worker_that_died_between_two_questions_is_nobodys_fault(gate: GrammarGate) -> None:
    gate.check(Constraint("regex", "before"))
    worker = gate._guard._worker
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    assert gate.check(Constraint("regex", "behind")).source == "behind"


def test_gbnf_becomes_lark(gate: GrammarGate) -> None:
    for _ in range(2):  # remembered or not
        made = gate.check(Constraint("gbnf", 'root ::= "a" | "b"'))
        assert made.kind == "lark" and "start" in made.source


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", '{"$ref":"#"}'),
        ("regex", "(a"),
        ("lark", "start: start"),
        ("lark", "start: @answer"),
    ],
)
def test_a_lead_hides_nothing_from_the_judge(gate: GrammarGate, kind: Any, source: str) -> None:
    """A lead allows any tokens, but the constraint behind it is judged all the same."""
    with pytest.raises(InvalidGrammarError) as alone:
        gate.check(Constraint(kind, source))
    with pytest.raises(InvalidGrammarError) as led:
        gate.check(Constraint(kind, source, LEAD))
    assert str(led.value) == str(alone.value)


def test_a_lead_is_kept_and_told_apart(gate: GrammarGate) -> None:
    made = gate.check(Constraint("gbnf", 'root ::= "a" | "b"', LEAD))
    assert (made.kind, made.lead) == ("lark", LEAD)
    plain = Constraint("regex", "a")
    assert len({digest(plain), digest(replace(plain, lead=LEAD))}) == 2
    assert gate.check(replace(plain, lead=LEAD)).lead == LEAD
    with pytest.raises(InvalidGrammarError, match="must contain @answer"):
        Constraint("regex", "a", 'start: "x"')


def test_what_is_remembered_is_bounded() -> None:
    """Ten thousand different schemas come."""
    guard, grammars = YesGuard(), Grammars(lambda: BYTES, max_kept=5)
    gate = GrammarGate(grammars, guard)
    for i in range(10_000):
        gate.check(Constraint("regex", f"x{i}"))
    assert len(guard.asked) == 10_000 and len(gate) == 4096
    for i in range(20):
        grammars.matcher(Constraint("json_schema", json.dumps({"const": i})))
    assert len(grammars) == 5


def test_an_event_loop_goes_on_and_asks_once() -> None:
    guard = YesGuard()

    async def work() -> None:
        gate = GrammarGate(Grammars(lambda: BYTES), guard)
        wanted = Constraint("regex", "[ab]")
        assert await gate.admit(wanted) == wanted
        assert await gate.admit(wanted) == wanted
        gate._quick.num_waiting = MAX_WAITING
        assert await gate.admit(wanted) == wanted, "what is known needs no waiting"
        with pytest.raises(ServerOverloadedError, match="64 grammars wait"):
            await gate.admit(Constraint("regex", "new"))
        gate.close()

    asyncio.run(work())
    assert len(guard.asked) == 1


def test_what_was_forgotten_is_compiled_before_the_engine_needs_it() -> None:
    guard, grammars = YesGuard(), Grammars(lambda: BYTES, max_kept=1)
    first, second = Constraint("regex", "[ab]"), Constraint("regex", "[cd]")

    async def work() -> None:
        gate = GrammarGate(grammars, guard)
        for constraint in (first, second, first):
            await gate.admit(constraint)
            assert grammars.has(constraint)
        gate.close()

    asyncio.run(work())
    assert len(guard.asked) == 2


def test_a_model_without_an_end_takes_no_constraint() -> None:
    gate = GrammarGate(Grammars(lambda: Vocabulary((b"a",), frozenset(), ())), YesGuard())
    with pytest.raises(InvalidGrammarError, match="no end-of-text token"):
        gate.check(Constraint("regex", "a"))


@pytest.mark.parametrize("source", [3, "x" * 65_537])
def test_a_constraint_of_the_wrong_size_or_type(source: object) -> None:
    with pytest.raises(InvalidGrammarError):
        Constraint("regex", source)  # type: ignore[arg-type]
    with pytest.raises(InvalidGrammarError, match="json_object, json_schema"):
        Constraint("xml")  # type: ignore[arg-type]


SCHEMA = Constraint("json_schema", '{"type":"object","properties":{"a":{"maxLength":20}}}')


@pytest.mark.parametrize(
    ("constraint", "is_quick"),
    [
        (SCHEMA, True),
        (Constraint("regex", "[a-z]{2,80}"), True),
        (Constraint("choice", json.dumps([f"item {i}" for i in range(500)])), True),
        (RUNAWAY, False),
        (Constraint("regex", "(a{1,500}){1,500}"), False),
        (Constraint("regex", "a{99999999999999999999}"), False),
        (Constraint("lark", "start: (x~100)~101"), False),
        (Constraint("json_schema", '{"maxItems": 2000, "items": {"maxLength": 2000}}'), False),
        (Constraint("json_schema", json.dumps({"enum": ["x" * 20_000]})), False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_looks_quick(constraint: Constraint, is_quick: bool) -> None:
    assert looks_quick(constraint) is is_quick


class SlowGuard(YesGuard):
    """Holds expensive constraints until the test releases them."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def judge(self, constraint: Constraint, vocabulary: Vocabulary) -> Verdict:
        super().judge(constraint, vocabulary)
        assert self.go.wait(60), "the test lets go"
        return Verdict(constraint)


def test_a_trivial_schema_does_not_wait_behind_hostile_ones() -> None:
    """Twenty clients once held the only worker for two seconds each, one after the other."""

    async def work() -> None:
        slow = SlowGuard()
        gate = GrammarGate(Grammars(lambda: BYTES))
        gate._slow = CompileLane([slow])
        hostile = [
            asyncio.create_task(gate.admit(Constraint("regex", f"x{{9999}}{{9999}}{i}"), f"c{i}"))
            for i in range(20)
        ]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(gate.admit(SCHEMA, "neighbour"), 60) == SCHEMA
        assert not any(task.done() for task in hostile)
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)
        slow.go.set()
        gate.close()

    asyncio.run(work())


def test_clients_take_turns() -> None:
    async def work() -> list[str]:
        guard, done = SlowGuard(), list[str]()
        lane = CompileLane([guard])

        async def ask(client: str, number: int) -> None:
            constraint = Constraint("regex", f"{client}{number}")
            await lane.run(client, lambda g: g.judge(constraint, BYTES))
            done.append(f"{client}{number}")

        tasks = [asyncio.create_task(ask("a", i)) for i in range(4)]
        tasks += [asyncio.create_task(ask("b", i)) for i in range(2)]
        await asyncio.sleep(0)
        tasks[3].cancel()  # one that waits gives up its place
        await asyncio.sleep(0)
        guard.go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert lane.num_waiting == 0 and not lane._lines and lane._free == [guard]
        lane.close()
        return done

    assert asyncio.run(work()) == ["a0", "a1", "b0", "a2", "b1"]


def test_one_client_cannot_fill_the_line() -> None:
    async def work() -> None:
        slow = SlowGuard()
        gate = GrammarGate(Grammars(lambda: BYTES), slow)
        asked = [
            asyncio.create_task(gate.admit(Constraint("regex", f"x{i}"), "greedy"))
            for i in range(MAX_WAITING_OF_CLIENT + 1)
        ]
        await asyncio.sleep(0)
        with pytest.raises(ServerOverloadedError, match="32 of them from this client"):
            await gate.admit(Constraint("regex", "y"), "greedy")
        other = asyncio.create_task(gate.admit(Constraint("regex", "z"), "other"))
        slow.go.set()
        assert (await other).source == "z"
        await asyncio.gather(*asked)
        gate.close()

    asyncio.run(work())


def test_what_looks_quick_and_is_not_gets_the_time_of_the_others() -> None:
    async def work() -> None:
        gate = GrammarGate(Grammars(lambda: BYTES))
        gate._quick = CompileLane([Guard(timeout_s=0.0)])
        assert await gate.admit(SCHEMA) == SCHEMA
        assert await gate.admit(SCHEMA) == SCHEMA
        gate.close()

    asyncio.run(work())
