"""The tokens that a row may take under constraints, allowed tokens and bad words, alone and
together."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.request import FinishReason, GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence, StopRule
from moe_serve.engine.request.thinking_markers import ThinkingMarkers
from moe_serve.engine.sampling.answer_masks import AnswerMasks, MaskedRows
from moe_serve.engine.sampling.grammar.grammars import Grammars
from moe_serve.engine.sampling.grammar.vocabulary import Vocabulary, _Wrapped
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.engine.sampling.sampling_step import make_sampling_step
from moe_serve.errors import InvalidGrammarError
from tests.support.engine.points import ends_of

EOS = 40
TOKENS = tuple(bytes([97 + i]) for i in range(26)) + (b"ab", b"abc", b"") + (b"?",) * 12
VOCABULARY = Vocabulary(TOKENS, frozenset({EOS}), (EOS,))
A, B, C, AB, ABC, NOTHING = 0, 1, 2, 26, 27, 28


@pytest.fixture(scope="module")
def masks() -> AnswerMasks:
    return AnswerMasks(len(TOKENS), frozenset({EOS}), Grammars(lambda: VOCABULARY))


def sequence(answer: tuple[int, ...] = (), **params: object) -> Sequence:
    fields = {"temperature": 0.0, "max_tokens": None, "seed": 1} | params
    if isinstance(pattern := fields.pop("regex", None), str):
        fields["constraint"] = Constraint("regex", pattern)
    wishes = SamplingParams(**fields)  # type: ignore[arg-type]
    made = Sequence(0, GenerationRequest(request_id="r", prompt_token_ids=(5, A), params=wishes))
    for token in answer:
        made.append(token)
    return made


def allowed(masked: MaskedRows, row: int = 0) -> set[int]:
    assert masked.masks is not None
    place = masked.masks.rows_C.tolist().index(row)
    bits = np.unpackbits(masked.masks.bits_CW[place].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_free_rows_have_no_mask(masks: AnswerMasks) -> None:
    assert masks.of(ends_of([sequence(), sequence(min_tokens=3)])) == MaskedRows()
    found = masks.of(ends_of([sequence(), sequence(regex="a"), sequence()]))
    assert found.masks is not None and found.masks.rows_C.tolist() == [1]


def test_a_constraint_token_by_token(masks: AnswerMasks) -> None:
    wanted = sequence(regex="(ab|cd)e?")
    assert allowed(masks.of(ends_of([wanted]))) == {A, C, AB}
    wanted.append(A)
    assert allowed(masks.of(ends_of([wanted]))) == {B}
    wanted.append(B)
    assert allowed(masks.of(ends_of([wanted]))) == {4, EOS}
    assert allowed(masks.of(ends_of([wanted]))) == {4, EOS}, "asking twice changes nothing"
    wanted.append(4)
    assert allowed(masks.of(ends_of([wanted]))) == {EOS}


def test_another_rank_catches_up_with_the_answer_so_far(masks: AnswerMasks) -> None:
    """A replay has the tokens but no matcher; a preemption keeps the matcher."""
    for answer in [(), (A,), (A, B), (AB, 4)]:
        followed = sequence(regex="(ab|cd)e?")
        for token in answer:
            masks.of(ends_of([followed]))
            followed.append(token)
        followed.restart()
        assert allowed(masks.of(ends_of([followed]))) == allowed(
            masks.of(ends_of([sequence(answer, regex="(ab|cd)e?")]))
        )


def test_choices_of_one_request_go_their_own_ways(masks: AnswerMasks) -> None:
    one, two = sequence((A,), regex="ab|cd"), sequence((C,), regex="ab|cd")
    both = masks.of(ends_of([one, two]))
    assert allowed(both, 0) == {B} and allowed(both, 1) == {3}


def test_the_end_comes_late_unless_nothing_else_is_left(masks: AnswerMasks) -> None:
    assert allowed(masks.of(ends_of([sequence((A,), regex="a+")]))) == {A, EOS}
    for late in ({"min_tokens": 3}, {"ignore_eos": True}):
        assert allowed(masks.of(ends_of([sequence((A,), regex="a+", **late)]))) == {A}
        complete = sequence((A,), regex="a", **late)
        assert allowed(masks.of(ends_of([complete]))) == {EOS}
        (token,) = Sampler(frozenset({EOS})).sample(
            torch.zeros(1, len(TOKENS)), ends_of([complete]), masks.of(ends_of([complete])).masks
        )
        assert token.token_id == EOS and token.is_valid
        complete.append(EOS)
        assert StopRule(frozenset({EOS}), 99).reason(complete, EOS, 2) is FinishReason.STOP
    assert make_sampling_step(ends_of([sequence(min_tokens=3, regex="a")]), [EOS]).entries is None


def test_what_contradicts_itself_fails_alone(masks: AnswerMasks) -> None:
    rows = [
        sequence(regex="a", allowed_token_ids=[B]),
        sequence(regex="a"),
        sequence((B,), regex="a"),
        sequence(allowed_token_ids=[EOS], min_tokens=1),
    ]
    found = masks.of(ends_of(rows))
    assert found.failures.keys() == {0, 2, 3} and allowed(found, 1) == {A}
    assert "no token" in found.failures[0] and "followed" in found.failures[2]


def test_a_grammar_that_cannot_be_compiled_fails_alone(masks: AnswerMasks) -> None:
    found = masks.of(ends_of([sequence(regex="("), sequence(regex="a")]))
    assert found.failures.keys() == {0} and "regular expression" in found.failures[0]


def test_allowed_tokens(masks: AnswerMasks) -> None:
    assert allowed(masks.of(ends_of([sequence(allowed_token_ids=[3, C, 3])]))) == {C, 3}
    both = masks.of(ends_of([sequence(regex="[a-c]", allowed_token_ids=[A, C, 9])]))
    assert allowed(both) == {A, C}


def test_bad_words_end_with_the_token_that_would_complete_them(masks: AnswerMasks) -> None:
    everything = set(range(len(TOKENS)))
    words = ((A, B, C), (7,))
    assert allowed(masks.of(ends_of([sequence(bad_word_ids=words)]))) == everything - {7}
    assert allowed(masks.of(ends_of([sequence((A, B), bad_word_ids=words)]))) == everything - {7, C}
    assert allowed(masks.of(ends_of([sequence((B, A), bad_word_ids=words)]))) == everything - {7}
    beyond = ((A, len(TOKENS)), (10_000,), (A, 7))
    assert allowed(masks.of(ends_of([sequence((A,), bad_word_ids=beyond)]))) == everything - {7}
    # The prompt ends with A: only the answer counts.
    assert allowed(masks.of(ends_of([sequence((B,), bad_word_ids=words)]))) == everything - {7}


CLOSE = 23  # x
THINKING = ThinkingMarkers(end=(CLOSE,), closings=((CLOSE,),), is_open=True)


def test_a_spent_thinking_budget_leaves_one_token(masks: AnswerMasks) -> None:
    thinks = {"thinking_token_budget": 2, "thinking_markers": THINKING}
    assert (
        masks.of(ends_of([sequence((A,), **thinks), sequence((A, CLOSE), **thinks)]))
        == MaskedRows()
    )
    wanted = sequence((A, A), **thinks)
    assert allowed(masks.of(ends_of([sequence(), wanted])), 1) == {CLOSE}
    logits = torch.zeros(1, len(TOKENS))
    logits[0, CLOSE] = -100
    found = masks.of(ends_of([wanted])).masks
    (token,) = Sampler(frozenset({EOS})).sample(logits, ends_of([wanted]), found)
    assert token.token_id == CLOSE and token.is_valid
    wanted.restart()  # a preemption
    assert allowed(masks.of(ends_of([wanted]))) == {CLOSE}
    wanted.append(CLOSE)
    assert masks.of(ends_of([wanted])) == MaskedRows()


def test_a_thinking_budget_among_other_wishes(masks: AnswerMasks) -> None:
    thinks = {"thinking_token_budget": 1, "thinking_markers": THINKING}
    few = sequence((A,), allowed_token_ids=(B, CLOSE), **thinks)
    assert allowed(masks.of(ends_of([few]))) == {CLOSE}
    lead = 'start: /([abc]{2})*/ "x" @answer\n'
    constraint = Constraint("regex", "b+", lead)
    led = sequence((A, B), constraint=constraint, min_tokens=9, **thinks)
    assert allowed(masks.of(ends_of([led]))) == {CLOSE}
    led.append(CLOSE)
    assert allowed(masks.of(ends_of([led]))) == {B}
    pair = sequence((A,), constraint=constraint, **thinks)
    assert allowed(masks.of(ends_of([pair]))) == {A, B, C, AB, ABC}, (
        "its grammar does not allow the end yet"
    )
    pair.append(B)
    assert allowed(masks.of(ends_of([pair]))) == {CLOSE}
    late = sequence((A,), stop_token_ids=(CLOSE,), min_tokens=2, **thinks)
    assert CLOSE not in allowed(masks.of(ends_of([late]))), "it would end the answer"
    late.append(B)
    assert allowed(masks.of(ends_of([late]))) == {CLOSE}
    word = sequence((A,), bad_word_ids=((A, CLOSE),), **thinks)
    assert CLOSE not in allowed(masks.of(ends_of([word])))
    word.append(B)
    assert allowed(masks.of(ends_of([word]))) == {CLOSE}


def test_a_channel_that_was_closed_stays_closed(masks: AnswerMasks) -> None:
    channels = ThinkingMarkers(
        end=(CLOSE,), closings=((CLOSE,),), openings=((A, B),), can_reopen=True
    )
    thinks = {"thinking_token_budget": 0, "thinking_markers": channels}
    again = sequence((A, B, CLOSE, A), **thinks)
    assert allowed(masks.of(ends_of([again]))) == set(range(len(TOKENS))) - {B}
    assert allowed(
        masks.of(ends_of([sequence((A, B, CLOSE, A), allowed_token_ids=(B, CLOSE), **thinks)]))
    ) == {CLOSE}
    only = sequence((A, B, CLOSE, A), regex="abxab", **thinks)
    assert allowed(masks.of(ends_of([only]))) == {B}, "nothing else is left"


def test_the_library_gets_tokens_that_spell_what_it_asks_for() -> None:
    """If only one text is possible, the library takes the tokenizer's tokens; a wrong one would be
    sampled."""
    wrong = Vocabulary(TOKENS, frozenset({EOS}), (EOS,), encode=lambda text: [B] * len(text))
    assert _Wrapped(wrong)(b"abcab") == [ABC, AB]
    assert _Wrapped(VOCABULARY)(b"ab\xff") == [AB]
    own = AnswerMasks(len(TOKENS), frozenset({EOS}), Grammars(lambda: wrong))
    assert allowed(own.of(ends_of([sequence(regex="abcxyz")]))) <= {A, AB, ABC}


def test_tokens_that_spell_nothing_are_never_allowed(masks: AnswerMasks) -> None:
    assert NOTHING not in allowed(masks.of(ends_of([sequence(regex="(?s:.*)")])))


def test_masked_rows_leave_the_others_bit_equal(masks: AnswerMasks) -> None:
    logits = torch.randn(6, len(TOKENS), generator=torch.Generator().manual_seed(3))
    free = [sequence(temperature=t, seed=i, logprobs=3) for i, t in enumerate((0.0, 1.0, 1.5))]
    bound = [sequence(temperature=1.0, regex="[a-f]+", logprobs=2, seed=i) for i in range(3)]
    mixed = [free[0], bound[0], free[1], bound[1], free[2], bound[2]]
    sampler, kept = Sampler(frozenset({EOS})), logits.clone()
    together = sampler.sample(logits, ends_of(mixed), masks.of(ends_of(mixed)).masks)
    assert torch.equal(logits, kept), "the logits are the model's still"
    for row in (0, 2, 4):
        assert sampler.sample(logits[row : row + 1], ends_of([mixed[row]])) == [together[row]]
    for row in (1, 3, 5):
        assert together[row].token_id in {*range(6), AB, ABC}
        chosen = together[row].logprob
        assert chosen is not None, "log probabilities are those of the model, before the mask"
        expected = torch.log_softmax(logits[row], -1)
        assert chosen.logprob == float(expected[chosen.token_id])
        assert chosen.top[0][0] == int(logits[row].argmax())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_mask_hides_no_fault_of_the_model(masks: AnswerMasks, value: float) -> None:
    logits = torch.zeros(1, len(TOKENS))
    logits[0, 9] = value  # not allowed
    rows = [sequence(regex="a")]
    (found,) = Sampler(frozenset()).sample(logits, ends_of(rows), masks.of(ends_of(rows)).masks)
    assert not found.is_valid


class StuckGrammars(Grammars):
    """Holds one of its grammars uncompiled until the test releases it."""

    def __init__(self) -> None:
        super().__init__(lambda: VOCABULARY)
        self.go, self.num_begun = threading.Event(), 0

    def matcher(self, constraint: Constraint) -> LLMatcher:
        if constraint.source == "stuck" and not self.has(constraint):
            self.num_begun += 1
            assert self.go.wait(60), "the test lets go"
        return super().matcher(constraint)


def test_a_step_does_not_wait_long_for_a_grammar_that_is_slow_to_compile() -> None:
    """Ranks compile within their steps, so many hostile grammars of 2 s each would hold up other
    requests."""
    grammars = StuckGrammars()
    grammars._patience.spend(3600)
    own = AnswerMasks(len(TOKENS), frozenset({EOS}), grammars)
    for _ in range(3):
        found = own.of(ends_of([sequence(regex="stuck"), sequence(regex="a"), sequence()]))
        assert found.failures.keys() == {0} and "not compiled yet" in found.failures[0]
        assert allowed(found, 1) == {A}
    assert grammars.num_begun == 1
    grammars.go.set()
    while not grammars.has(Constraint("regex", "stuck")):
        time.sleep(0.01)
    assert own.of(ends_of([sequence(regex="stuck")])).failures == {}


def test_grammars_that_cannot_be_compiled_say_so_within_a_step() -> None:
    grammars = Grammars(lambda: VOCABULARY)
    for _ in range(2):
        with pytest.raises(InvalidGrammarError, match="regular expression"):
            grammars.matcher_within(Constraint("regex", "("))
