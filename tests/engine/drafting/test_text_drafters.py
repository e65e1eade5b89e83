"""Drafts from a request's own text, from past answers and from a client's prediction."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from moe_serve.engine.drafting.draft import DraftSource
from moe_serve.engine.drafting.gram_index import GramIndex
from moe_serve.engine.drafting.own_text import OwnText
from moe_serve.engine.drafting.past_answers import PastAnswers
from moe_serve.engine.drafting.prediction import Predictions
from moe_serve.engine.drafting.text_hashes import TextHashes, new_prefix
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence

OWNER, OTHER = b"owner", b"other"
_ids = itertools.count()
texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def make(
    prompt: list[int],
    answer: list[int] | None = None,
    owner: bytes = OWNER,
    prediction: tuple[int, ...] = (),
) -> Sequence:
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=64),
        prediction=prediction,
    )
    sequence = Sequence(next(_ids), request)
    for token in answer or []:
        sequence.append(token)
    sequence.page_keys = [owner]
    return sequence


@given(texts)
def test_an_index_finds_the_newest_occurrence_of_the_longest_end(text: list[int]) -> None:
    hashes, prefix = TextHashes(), new_prefix()
    hashes.extend(prefix, text)
    index = GramIndex(hashes, (2, 4), 1 << 16)
    index.note(prefix, 0, len(text) - 1)
    found = index.find(prefix, text, text)
    for size in (4, 2):
        ends = [e for e in range(size, len(text)) if text[e - size : e] == text[-size:]]
        if ends:
            assert found == (ends[-1], size)
            return
    assert found is None


@given(st.lists(st.integers(0, 2**31 - 1), max_size=60), st.integers(0, 60), st.integers(1, 9))
def test_hashes_are_those_of_the_tokens_alone(text: list[int], cut: int, size: int) -> None:
    """A hash is the same if the text grew by one token or by many at once."""
    hashes, prefix = TextHashes(), new_prefix()
    hashes.extend(prefix, text[:cut])
    hashes.extend(prefix, text[cut:])
    for start in range(len(text) - size + 1):
        alone = new_prefix()
        hashes.extend(alone, text[start : start + size])
        assert hashes.hash(prefix, start, start + size) == hashes.hash(alone, 0, size)
    if len(text) >= size:
        together = hashes.hashes(prefix, size, len(text), size).tolist()
        ends = range(size, len(text) + 1)
        assert together == [hashes.hash(prefix, end - size, end) for end in ends]


@given(texts, st.integers(1, 16))
def test_own_text_goes_on_as_it_did(text: list[int], most: int) -> None:
    sequence, drafter = make(text), OwnText(2, 4, 2048)
    draft = drafter.propose(sequence, most)
    if draft is None:
        return
    assert len(draft.token_ids) == most and draft.source is DraftSource.NGRAM
    known = [*text, *draft.token_ids]
    starts = [
        s for s in range(len(text)) if known[s : s + most] == list(draft.token_ids)
        and text[max(0, s - draft.evidence) : s] == text[-draft.evidence :]
    ]  # fmt: skip
    assert starts, f"{draft} follows nothing in {text}"


def test_a_loop_gives_a_draft_of_any_length() -> None:
    draft = OwnText(2, 4, 2048).propose(make([9, 1, 2, 3, 1, 2, 3]), 8)
    assert draft is not None and draft.token_ids == (1, 2, 3, 1, 2, 3, 1, 2)


def test_a_long_prompt_is_entered_over_several_steps() -> None:
    rng = random.Random(3)
    prompt = [rng.randrange(50_000) for _ in range(20_000)]
    sequence, drafter = make([*prompt, *prompt[100:110]]), OwnText(2, 5, 40_000)
    drafts = [drafter.propose(sequence, 4) for _ in range(6)]
    assert drafts[0] is not None and drafts[0].token_ids == tuple(prompt[110:114])
    assert drafts[-1] is not None and drafts[-1].token_ids == tuple(prompt[110:114])


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=50), max_size=8))
def test_past_answers_go_on_as_one_of_them_did(answers: list[list[int]]) -> None:
    drafter = PastAnswers(10_000)
    for answer in answers:
        drafter.learn(OWNER, make([0, 1, 2, 3], answer))
    drafter.work()
    for answer in answers:
        half = len(answer) // 2
        draft = drafter.propose(make([0, 1, 2, 3], answer[:half]), 8)
        assert draft is not None, "the prompt and half of the answer were seen"
        said, size = list(draft.token_ids), draft.evidence
        tail = [0, 1, 2, 3, *answer[:half]][-size:]
        seen = [[0, 1, 2, 3, *each] for each in answers]
        assert any(
            each[i : i + size] == tail and each[i + size : i + size + len(said)] == said
            for each in seen
            for i in range(len(each))
        ), f"no answer goes on with {said} after {tail}"


def test_owners_never_share_and_memory_is_bounded() -> None:
    drafter, rng = PastAnswers(1_000_000), random.Random(1)
    for owner in range(40):
        for _ in range(4):
            answer = [rng.randrange(1000) for _ in range(1000)]
            key = b"%d" % owner
            drafter.learn(key, make([1, 2, 3, 4], answer, key))
            drafter.work()
            drafter.work()
            mine = drafter.propose(make([], answer[:500], key), 8)
            assert mine is not None and mine.token_ids == tuple(answer[500:508])
            assert drafter.propose(make([], answer[:500], OTHER), 8) is None
    assert drafter.num_bytes <= 64 * 2**20, f"{drafter.num_bytes} bytes"


def test_a_store_grows_and_then_forgets_its_oldest_answers() -> None:
    drafter, rng = PastAnswers(65_536), random.Random(2)
    answers = [[rng.randrange(10_000) for _ in range(500)] for _ in range(300)]
    for answer in answers:
        drafter.learn(OWNER, make([1, 2, 3, 4], answer))
        drafter.work()
    hits = [drafter.propose(make([], a[:64]), 8) is not None for a in answers]
    assert not any(hits[:160]) and sum(hits[-100:]) >= 95, hits


def test_a_prediction_is_followed_and_found_again() -> None:
    predicted = list(range(100, 200))
    drafter = Predictions()
    sequence = make([1, 2], prediction=tuple(predicted))
    first = drafter.propose(sequence, 4)
    assert first is not None and first.token_ids == (100, 101, 102, 103)
    for token in (100, 101, 7):  # 7 in place of 102
        sequence.append(token)
    replaced = drafter.propose(sequence, 4)
    assert replaced is not None and replaced.token_ids == (103, 104, 105, 106)
    assert replaced.evidence == 0, "not certain: the edit may be another one"
    for token in (8, 9):  # more than one token was replaced
        sequence.append(token)
    assert drafter.propose(sequence, 4) is None
    for token in (103, 104):
        sequence.append(token)
    again = drafter.propose(sequence, 4)
    assert again is not None and again.token_ids == (105, 106, 107, 108)
    for token in predicted[5:]:
        sequence.append(token)
    sequence.append(200)
    assert drafter.propose(sequence, 4) is None
    assert drafter.propose(make([1, 2]), 4) is None, "a request without a prediction"


def test_a_token_more_or_less_costs_no_search() -> None:
    predicted = tuple(range(100, 140))
    drafter = Predictions()
    sequence = make([1, 2], prediction=predicted)
    for token in (100, 101, 7, 102):  # the answer has a token more
        sequence.append(token)
        drafter.propose(sequence, 4)
    found = drafter.propose(sequence, 3)
    assert found is not None and found.token_ids == (103, 104, 105)
    for token in (103, 105):  # and one less
        sequence.append(token)
        found = drafter.propose(sequence, 2)
    assert found is not None and found.token_ids == (106, 107)


def test_behind_the_end_of_a_prediction_its_text_is_found_again() -> None:
    line = [10, 11, 12, 13, 14, 15]
    drafter, sequence = Predictions(), make([1, 2], prediction=tuple(line * 2))
    for token in line * 2:
        drafter.propose(sequence, 4)
        sequence.append(token)
    draft = drafter.propose(sequence, 4)
    assert draft is not None and draft.token_ids == tuple(line[:4]), "the answer goes on repeating"
