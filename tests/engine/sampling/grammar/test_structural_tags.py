"""Tags in free text: the mask's texts are compared with a second definition of structural tags."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema_rs
import llguidance
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.structural_tag import StructuralTagError, read_structural_tag
from moe_serve.engine.sampling.grammar.compiler import compile_constraint
from moe_serve.engine.sampling.grammar.gate import GrammarGate
from moe_serve.engine.sampling.grammar.grammars import Grammars
from moe_serve.engine.sampling.grammar.guard import Guard
from moe_serve.engine.sampling.grammar.vocabulary import Vocabulary
from moe_serve.errors import InvalidGrammarError
from tests.support.sampled_cases import EVERY_CASE

EOS, MARK, CALL = 256, 257, 258
PIECES = (b"<f=", b"x<", b"=a>", b'>{"', b'"n": ', b"</f>", b"</f><f", b"}</f>a", b"true", b"aa")
VOCABULARY = Vocabulary(
    (*(bytes([i]) for i in range(256)), b"<end>", b"[M]", b"<call>", *PIECES),
    frozenset({EOS, MARK, CALL}),
    (EOS,),
)
FIELDS: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"enum": [1, "a<f="]}, "b": {"type": "boolean"}},
    "required": ["n"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Tags:
    """The tags of a request; `structures` are (begin, schema, end)."""

    structures: tuple[tuple[str, Any, str], ...]
    triggers: tuple[str, ...]

    @property
    def constraint(self) -> Constraint:
        parts = [{"begin": b, "schema": s, "end": e} for b, s, e in self.structures]
        source = {"structures": parts, "triggers": list(self.triggers)}
        return Constraint("structural_tag", json.dumps(source))

    def fits(self, text: str, start: int = 0) -> bool:
        """Returns True if a whole answer may be this text, from `start` on."""
        ends = [text.find(t, start) + len(t) for t in self.triggers if t in text[start:]]
        if not ends:
            return True
        come = [t for t in self.triggers if text[: min(ends)].endswith(t)]
        return any(
            self._goes_on(text, min(ends) - len(trigger), structure)
            for trigger in come
            for structure in self.structures
            if structure[0].startswith(trigger)
        )

    def _goes_on(self, text: str, start: int, structure: tuple[str, Any, str]) -> bool:
        begin, schema, end = structure
        if not text.startswith(begin, start):
            return False
        try:
            value, stop = json.JSONDecoder().raw_decode(text, start + len(begin))
        except ValueError:
            return False
        is_valid = jsonschema_rs.is_valid(schema, value)
        return is_valid and text.startswith(end, stop) and self.fits(text, stop + len(end))


def matcher_of(tags: Tags) -> llguidance.LLMatcher:
    return compile_constraint(tags.constraint, VOCABULARY)


def takes(tags: Tags | llguidance.LLMatcher, *parts: str | int) -> bool:
    """Returns True if the parts are an answer; an integer is a token. A matcher stays as it is."""
    matcher = matcher_of(tags) if isinstance(tags, Tags) else tags.deep_copy()
    ids = [i for part in parts for i in ([part] if isinstance(part, int) else part.encode())]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def allowed(matcher: llguidance.LLMatcher) -> list[int]:
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()  # type: ignore[no-any-return]


TRIGGERS = st.sampled_from(["<f=", "<f", "<", "aa", "ab", "a=", '"', "\n", "é<", "<f=a>"])
SUFFIXES = st.sampled_from(["", "a>", "b>", "ab", "=a>", "é", '"\\', "{"])
SCHEMAS = st.sampled_from([FIELDS, {"type": "boolean"}, {"enum": ["x", "<f="]}, {"type": "array"}])
ENDS = st.sampled_from(["</f>", "", ">", "\n}", "<f="])


@st.composite
def structural_tags(draw: st.DrawFn) -> Tags:
    triggers = draw(st.lists(TRIGGERS, min_size=1, max_size=3))
    count = draw(st.integers(1, 3))
    structures = tuple(
        (draw(st.sampled_from(triggers)) + draw(SUFFIXES), draw(SCHEMAS), draw(ENDS))
        for _ in range(count)
    )
    made = Tags(structures, tuple(triggers))
    try:
        read_structural_tag(made.constraint.source)
    except StructuralTagError:
        assume(False)
    return made


VALUES = ['{"n": 1}', '{"n": "a<f=", "b": true}', "true", '"x"', '"<f="', '[1, "<f="]', '{"n": 2}']


@settings(max_examples=150 if EVERY_CASE else 70, deadline=None, derandomize=True)
@given(tags=structural_tags(), seed=st.integers(0, 2**32))
def test_texts_are_taken_if_and_only_if_they_fit(tags: Tags, seed: int) -> None:
    """The texts are made of pieces that are often right or nearly right."""
    rng, matcher = random.Random(seed), matcher_of(tags)
    begins, _, ends = zip(*tags.structures, strict=True)
    for _ in range(30):
        text = ""
        for _ in range(rng.randint(1, 4)):
            begin, _, end = rng.choice(tags.structures)
            if rng.random() < 0.4:
                text += rng.choice(["a", "x<", "é", "\n", "b=", *tags.triggers, *begins, *ends])
            else:
                text += begin + rng.choice(VALUES) + end
        fits = tags.fits(text)
        assert takes(matcher, text) == fits, (tags, text)


@settings(max_examples=120 if EVERY_CASE else 60, deadline=None, derandomize=True)
@given(tags=structural_tags(), seed=st.integers(0, 2**32))
def test_walks_under_the_mask_fit(tags: Tags, seed: int) -> None:
    """The end is allowed exactly if the text so far fits, and some token is always allowed."""
    rng, matcher, text = random.Random(seed), matcher_of(tags), b""
    likely = {*range(259, 259 + len(PIECES)), *"".join(tags.triggers).encode(), *b'<f=a>{}"n:1/'}
    for _ in range(60):
        may = allowed(matcher)
        assert may, (tags, text)
        whole = _decoded(text)
        assert (EOS in may) == (whole is not None and tags.fits(whole)), (tags, text)
        assert not {MARK, CALL} & {*may}, "free text holds no special token"
        ids = [i for i in may if i != EOS]
        preferred = [i for i in ids if i in likely]
        token = rng.choice(preferred if preferred and rng.random() < 0.8 else ids)
        text += VOCABULARY.tokens[token]
        assert matcher.consume_token(token), (tags, text)


def _decoded(text: bytes) -> str | None:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


ONE = Tags((("<f=a>", FIELDS, "</f>"),), ("<f=",))


def test_a_trigger_that_begins_no_tag_never_appears() -> None:
    tags = Tags(ONE.structures, ("<f=", "bad", "e<"))
    assert takes(tags, 'ba<f=a>{"n":1}</f>ba')
    for text in ("bad", 'bad<f=a>{"n":1}</f>', 'e<f=a>{"n":1}</f>', '<f=a>{"n":1}</f>bad'):
        assert not takes(tags, text) and not tags.fits(text)
    matcher = matcher_of(tags)
    matcher.consume_tokens(list(b"ba"))
    assert ord("d") not in allowed(matcher) and EOS in allowed(matcher)


def test_special_tokens_are_what_they_are_called() -> None:
    """Inside a tag the token or its text is allowed; free text has neither."""
    tags = Tags((("[M]get<call>", {"type": "boolean"}, "[M]"),), ("[M]",))
    for parts in (
        ("x", MARK, "get", CALL, "true", MARK, "y"),
        ("x[M]get<call>true[M]y",),
        (MARK, "get<call>true[M]", MARK, "get", CALL, "false", MARK),
    ):
        assert takes(tags, *parts), parts
    for parts in ((CALL,), (MARK,), ("x", MARK, CALL), ("[M]get", MARK), ("[M", MARK)):
        assert not takes(tags, *parts), parts
    # A trigger may be the beginning of the token's name.
    assert takes(Tags((("<call>1", {}, "."),), ("<c",)), "x", CALL, "1[].")
    with pytest.raises(InvalidGrammarError, match=r"triggers.0 must begin with the special token"):
        matcher_of(Tags((("a[M]", {}, ""),), ("a[M]",)))
    with pytest.raises(InvalidGrammarError, match="must begin with the special token"):
        matcher_of(Tags((("a[M]", {}, ""),), ("a[",)))


def test_the_end_of_the_text_is_no_part_of_a_tag() -> None:
    tags = Tags((("<end>", {"type": "null"}, "<end>"),), ("<end>",))
    assert takes(tags, "x<end>null<end>y") and not takes(tags, EOS, "null<end>")


HOSTILE = ['"', "\\", '\\"', "\n", "\x7f", "\x00", "/", "#", "\u2028", "😀", " %json {}", '" | "x']


@pytest.mark.parametrize("text", [*HOSTILE, "".join(HOSTILE), "//", "<[256]>", "@answer", "]: x"])
def test_no_string_gets_out_of_its_quotes(text: str) -> None:
    schema = {"type": "object", "properties": {"k": {"const": text}}, "required": ["k"]}
    tags = Tags(((text + "b", schema, text),), (text,))
    value = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    assert takes(tags, f'a{text}b{{"k": {value}}}{text}c')
    assert not takes(tags, f"a{text}c") and not takes(tags, f"a{text}b{{}}{text}")


@pytest.fixture(scope="module")
def gate() -> Iterator[GrammarGate]:
    opened = GrammarGate(Grammars(lambda: VOCABULARY), Guard(timeout_s=20.0))
    yield opened
    opened.close()


def structures(**changes: Any) -> dict[str, Any]:
    tag = {"begin": "<f=a>", "schema": FIELDS, "end": "</f>", **changes}
    return {"structures": [structure("<f=z>"), tag], "triggers": ["<f="]}


def structure(begin: str, schema: Any = FIELDS) -> dict[str, Any]:
    return {"begin": begin, "schema": schema, "end": "."}


def triggered(content: Any = None, **changes: Any) -> dict[str, Any]:
    content = content or {"type": "json_schema", "json_schema": FIELDS}
    tag = {"type": "tag", "begin": "<f=a>", "content": content, "end": "</f>"}
    form = {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag], **changes}
    return {"type": "structural_tag", "format": form}


MANY = [structure(f"<f={i}>") for i in range(129)]
WRONG: list[tuple[Any, str, str]] = [
    ("{", "", "not valid JSON"),
    ([], "", "must be an object"),
    ({"triggers": ["<"]}, "structures", "is missing"),
    ({"structures": [], "triggers": ["<"]}, "structures", "at least 1 entries"),
    ({"structures": MANY, "triggers": ["<"]}, "structures", "at most 128 entries"),
    ({**structures(), "triggers": []}, "triggers", "at least 1 entries"),
    ({**structures(), "triggers": ["<f=", ""]}, "triggers.1", "at least 1 characters"),
    ({**structures(), "triggers": ["<f="] * 33}, "triggers", "at most 32 entries"),
    ({**structures(), "triggers": ["<f=", "x<f=y"]}, "triggers.1", "holds triggers.0"),
    ({**structures(), "other": 1}, "other", "is not known"),
    ({**structures(), "type": "tag"}, "type", "'tag'"),
    (structures(begin=""), "structures.1.begin", "at least 1 characters"),
    (structures(begin="x" * 513), "structures.1.begin", "at most 512 characters"),
    (structures(begin="f=a>"), "structures.1.begin", "starts with none of the triggers"),
    (structures(begin="<f=z>"), "structures.1.begin", "is also that of structures.0"),
    (structures(begin="<f=z>{"), "structures.1.begin", "cannot be told apart"),
    (structures(begin=3), "structures.1.begin", "got `int`"),
    (structures(end="x" * 513), "structures.1.end", "at most 512 characters"),
    (structures(ends=1), "structures.1.ends", "is not known"),
    (structures(schema=3), "structures.1.schema", "got `int`"),
    (structures(schema="{"), "structures.1.schema", "or a string that holds one"),
    (structures(schema="[" * 900 + "]" * 900), "structures.1.schema", "a string that holds one"),
    (structures(schema='{"a":' * 900 + "1" + "}" * 900), "structures.1.schema", "at most 64"),
    (structures(schema={"enum": [0] * 10_001}), "", "at most 10000"),
    (structures(schema={"not": {}}), "structures.1.schema", "not"),
    (structures(schema={"$ref": "#"}), "structures.1.schema", "no answer at all"),
    ({"format": {}}, "format.type", "must be triggered_tags"),
    ({"format": {"type": "any_text"}}, "format.type", "must be triggered_tags"),
    ({**triggered(), "triggers": []}, "triggers", "is not known"),
    (triggered(at_least_one=True), "format.at_least_one", "must be false"),
    (triggered(stop_after_first=True), "format.stop_after_first", "must be false"),
    (triggered(excludes=["x"]), "format.excludes", "at most 0 entries"),
    (triggered({"type": "regex", "pattern": "a"}), "format.tags.0.content.type", "'regex'"),
    (
        triggered({"type": "json_schema", "json_schema": {}, "maximum": 1}),
        "format.tags.0.content.maximum",
        "is not known",
    ),
    (
        triggered({"type": "json_schema", "json_schema": {"not": {}}}),
        "format.tags.0.content.json_schema",
        "not",
    ),
]


@pytest.mark.parametrize(("value", "place", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_and_where(gate: GrammarGate, value: Any, place: str, words: str) -> None:
    source = value if isinstance(value, str) else json.dumps(value)
    for _ in range(2):  # the second answer is remembered
        with pytest.raises(InvalidGrammarError) as caught:
            gate.check(Constraint("structural_tag", source))
        message = str(caught.value)
        assert words in message and "\n" not in message and len(message) < 450, message
        assert caught.value.place == place and place in message, message


def test_both_forms_are_the_same(gate: GrammarGate) -> None:
    defaults = {"at_least_one": False, "stop_after_first": False, "excludes": []}
    style = {"type": "json_schema", "json_schema": FIELDS, "style": "json", "any_order": False}
    older = {"structures": [structure("<f=a>", json.dumps(FIELDS)) | {"end": "</f>"}]}
    for value in (triggered(), triggered(style, **defaults), {**older, "triggers": ["<f="]}):
        checked = gate.check(Constraint("structural_tag", json.dumps(value)))
        matcher = gate.grammars.matcher(checked)
        text = b'a <f=a>{\n "n": 1}</f> b'
        assert matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


def test_the_largest_one_is_compiled(gate: GrammarGate) -> None:
    tags = [structure(f"<f={i}>" + "x" * 60, {"type": "object"}) for i in range(128)]
    triggers = [f"<f={i}>" for i in range(100, 128)] + ["<f=1", "<f=2", "<f=3", "<f="]
    made = Constraint("structural_tag", json.dumps({"structures": tags, "triggers": triggers}))
    assert gate.check(made) == made
    with pytest.raises(InvalidGrammarError, match="at most 65536 characters"):
        Constraint("structural_tag", json.dumps(structures(schema={"enum": ["x" * 66_000]})))
