"""Deltas of tokens become text: hidden stop tokens, stop strings, min_tokens, any grouping."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.request import FinishReason, TokenDelta, TokenLogprob
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.text.text_stream import TextDelta, TextStream
from moe_serve.text.tokenizer import Tokenizer

EOS = 256


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend, eos_token_ids=[EOS])


TOKENIZER = make_tokenizer()


def run(text: str, sizes: list[int], **params: Any) -> list[TextDelta]:
    """Feeds the text's bytes in groups of these sizes, then the rest with an end-of-text token."""
    stream = TextStream(TOKENIZER, SamplingParams(max_tokens=1000, **params))
    ids = [*TOKENIZER.encode(text), EOS]
    deltas: list[TextDelta] = []
    while ids:
        size = min(sizes.pop(0) if sizes else 3, len(ids))
        group, ids = ids[:size], ids[size:]
        logprobs = tuple(TokenLogprob(token, -1.0, 1, ()) for token in group)
        is_last = not ids
        deltas.append(
            stream.push(
                TokenDelta(
                    request_id="r",
                    token_ids=tuple(group),
                    logprobs=logprobs,
                    finish_reason=FinishReason.STOP if is_last else None,
                    stop_token_id=EOS if is_last else None,
                )
            )
        )
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text("aé🎉b ", max_size=20),
    sizes=st.lists(st.integers(1, 6), max_size=20),
    stops=st.lists(st.sampled_from(["b", "éa", "🎉🎉", "a a"]), max_size=2, unique=True),
    min_tokens=st.integers(0, 6),
    keeps=st.booleans(),
)
def test_grouping_changes_nothing(
    text: str, sizes: list[int], stops: list[str], min_tokens: int, keeps: bool
) -> None:
    params: dict[str, Any] = {
        "stop": tuple(stops),
        "min_tokens": min_tokens,
        "include_stop_str_in_output": keeps,
    }
    grouped, single = run(text, sizes, **params), run(text, [1] * 100, **params)
    for deltas in (grouped, single):
        assert all(len(d.logprobs or ()) == len(d.token_ids) for d in deltas)
        assert all(len(d.text_offsets) == len(d.token_ids) for d in deltas)
    assert text_of(grouped) == text_of(single)
    for name in ("token_ids", "text_offsets"):
        joined = [[x for d in deltas for x in getattr(d, name)] for deltas in (grouped, single)]
        assert joined[0] == joined[1], name
    assert grouped[-1].stop_reason == single[-1].stop_reason


def test_a_grammar_gets_the_first_space_that_it_asks_for() -> None:
    """SentencePiece's decoder drops it; text before a grammar's part does not change."""
    backend = Backend(models.BPE({"<unk>": 0, "▁yes": 1, "▁": 2, "y": 3}, [], unk_token="<unk>"))
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), strip])
    tokenizer = Tokenizer(backend)
    asked, lead = Constraint("regex", " +yes"), Constraint("regex", "y", lead="start: @answer")
    for ids, constraint, expected in (
        ((1,), asked, " yes"),
        ((2, 1), asked, "  yes"),
        ((3, 1), asked, "y yes"),
        ((1, 1), lead, "yes yes"),
        ((1, 1), None, "yes yes"),
    ):
        stream = TextStream(tokenizer, SamplingParams(constraint=constraint))
        delta = TokenDelta(request_id="r", token_ids=ids, finish_reason=FinishReason.LENGTH)
        assert stream.push(delta).text == expected


def test_end_of_text_is_not_shown_and_is_no_stop_reason() -> None:
    deltas = run("hello", [2, 2], skip_special_tokens=False)
    assert text_of(deltas) == "hello"
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_reason is None


def test_an_ignored_end_of_text_is_a_token_like_others() -> None:
    stream = TextStream(TOKENIZER, SamplingParams(ignore_eos=True, skip_special_tokens=False))
    delta = stream.push(TokenDelta(request_id="r", token_ids=(EOS, *TOKENIZER.encode("x"))))
    assert delta.text == "<|end|>x"


@pytest.mark.parametrize(("is_kept", "expected"), [(False, "a"), (True, "a.")])
def test_stop_token_ids(is_kept: bool, expected: str) -> None:
    dot = TOKENIZER.encode(".")[0]
    params = SamplingParams(stop_token_ids=(dot,), include_stop_str_in_output=is_kept)
    delta = TextStream(TOKENIZER, params).push(
        TokenDelta(
            request_id="r",
            token_ids=(*TOKENIZER.encode("a"), dot),
            finish_reason=FinishReason.STOP,
            stop_token_id=dot,
        )
    )
    assert (delta.text, delta.stop_reason) == (expected, dot)


def test_a_stop_string_cuts_the_text_and_the_tokens_after_it() -> None:
    (delta,) = run("one STOP two", [100], stop=("STOP",))
    assert delta.text == "one "
    assert delta.stop_reason == "STOP"
    assert delta.is_stopped_by_text
    assert len(delta.token_ids) == len("one STOP")
    assert len(delta.logprobs or ()) == len("one STOP")
    assert delta.text_offsets == tuple(range(len("one STOP")))


def test_no_stop_string_before_min_tokens() -> None:
    assert text_of(run("a.b.c.", [], stop=(".",), min_tokens=3)) == "a.b"


def test_what_is_held_back_comes_with_the_end() -> None:
    deltas = run("abc EN", [1] * 20, stop=("END",))
    assert text_of(deltas) == "abc EN"
    assert deltas[-1].text == "EN"
    assert not deltas[-1].is_stopped_by_text


def test_half_a_character_at_the_end_is_replaced() -> None:
    stream = TextStream(TOKENIZER, SamplingParams())
    ids = tuple(TOKENIZER.encode("é")[:1])
    delta = stream.push(
        TokenDelta(request_id="r", token_ids=ids, finish_reason=FinishReason.LENGTH)
    )
    assert delta.text == "\ufffd"
