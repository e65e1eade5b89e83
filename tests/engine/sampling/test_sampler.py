"""Sampling rules one by one, and their distribution."""

from __future__ import annotations

import math

import pytest
import torch

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.thinking_markers import ThinkingMarkers
from moe_serve.engine.sampling.sampler import (
    Sampled,
    Sampler,
    describe_tokens,
    least_probabilities,
    uniform,
)
from moe_serve.errors import InvalidRequestError
from tests.support.engine.points import ends_of

LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0])


def sequence(
    prompt: tuple[int, ...] = (0,), output: tuple[int, ...] = (), **params: object
) -> Sequence:
    fields = {"temperature": 0.0, "seed": 0, "max_tokens": None} | params
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=prompt,
        params=SamplingParams(**fields),  # type: ignore[arg-type]
    )
    made = Sequence(0, request)
    for token in output:
        made.append(token)
    return made


def sample(one: Sequence, logits: torch.Tensor = LOGITS) -> Sampled:
    return Sampler(frozenset({3})).sample(logits[None].clone(), ends_of([one]))[0]


def draws(count: int = 4000, **params: object) -> list[float]:
    """Returns the frequencies of the five tokens over many positions and seeds."""
    made = [
        sequence(prompt=(0,) * (1 + i % 200), seed=i // 200, temperature=1.0, **params)
        for i in range(count)
    ]
    tokens = [
        s.token_id for s in Sampler(frozenset()).sample(LOGITS.repeat(count, 1), ends_of(made))
    ]
    return [tokens.count(i) / count for i in range(5)]


def test_greedy_takes_the_largest() -> None:
    assert sample(sequence()).token_id == 3


NOT_PLAIN: list[dict[str, object]] = [
    {"temperature": 0.5},
    {"logprobs": 0},
    {"prompt_logprobs": 0},
    {"logit_bias": {0: 1.0}},
    {"min_tokens": 1},
    {"presence_penalty": 0.1},
    {"frequency_penalty": 0.1},
    {"repetition_penalty": 1.1},
    {"allowed_token_ids": (1,)},
    {"bad_word_ids": ((1, 2),)},
    {"thinking_token_budget": 3, "thinking_markers": ThinkingMarkers(end=(5,), closings=((5,),))},
    {"constraint": Constraint("regex", "a")},
]


def test_only_tokens_that_nothing_changes_are_plain() -> None:
    assert sequence(ignore_eos=True, stop_token_ids=(2,)).is_plain
    for params in NOT_PLAIN:
        assert not sequence(**params).is_plain, params


def test_plain_tokens_are_those_of_the_usual_way() -> None:
    """Also of rows that tie, and of rows that are not finite."""
    rows = LOGITS.repeat(4, 1)
    rows[1, 1], rows[2, 0], rows[3, 2] = 3.0, float("nan"), float("inf")
    points = ends_of([sequence() for _ in rows])
    plain = Sampler(frozenset()).sample(rows, points)
    usual = Sampler(frozenset()).sample(rows, [*points[:3], *ends_of([sequence(logprobs=0)])])
    assert plain[:3] == usual[:3]
    assert (plain[3].token_id, plain[3].is_valid) == (usual[3].token_id, usual[3].is_valid)
    assert [token.is_valid for token in plain] == [True, True, False, False]


def test_logit_bias() -> None:
    assert sample(sequence(logit_bias={4: 10.0, 3: -1.0})).token_id == 4


def test_eos_waits_for_min_tokens() -> None:
    assert sample(sequence(min_tokens=2, output=(1,))).token_id == 2
    assert sample(sequence(min_tokens=2, output=(1, 1))).token_id == 3


def test_presence_and_frequency_count_the_answer_only() -> None:
    assert sample(sequence(prompt=(3, 3), presence_penalty=2.0)).token_id == 3
    assert sample(sequence(output=(3,), presence_penalty=1.5)).token_id == 2
    assert sample(sequence(output=(3,), frequency_penalty=0.6)).token_id == 3
    assert sample(sequence(output=(3, 3), frequency_penalty=0.6)).token_id == 2


def test_repetition_counts_the_prompt_too() -> None:
    assert sample(sequence(prompt=(3,), repetition_penalty=1.6)).token_id == 2
    negative = torch.tensor([-1.0, -1.1, -5.0, -5.0, -5.0])
    assert sample(sequence(prompt=(0,), repetition_penalty=1.5), negative).token_id == 1


def test_the_distribution_is_the_softmax() -> None:
    expected = torch.softmax(LOGITS, -1).tolist()
    for found, wanted in zip(draws(), expected, strict=True):
        assert abs(found - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / 4000), (found, wanted)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [({"top_k": 2}, {2, 3}), ({"top_k": 1}, {3}), ({"top_p": 0.7}, {2, 3}), ({"top_p": 0.1}, {3}),
     ({"min_p": 0.3}, {2, 3}), ({"min_p": 1.0}, {3}), ({"top_k": 3, "top_p": 0.99}, {1, 2, 3}),
     ({"top_k": -1}, {0, 1, 2, 3, 4})],
    ids=str,
)  # fmt: skip
def test_filters(params: dict[str, float], allowed: set[int]) -> None:
    frequencies = draws(**params)
    assert {i for i, f in enumerate(frequencies) if f > 0} == allowed
    weights = [math.exp(LOGITS[i]) if i in allowed else 0.0 for i in range(5)]
    for found, weight in zip(frequencies, weights, strict=True):
        assert abs(found - weight / sum(weights)) < 0.035


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    one = sequence(temperature=0.8, top_p=0.9, seed=3, logprobs=2)
    others = [
        sequence(temperature=1.0), sequence(), sequence(temperature=1.0, top_k=2, output=(1,)),
        sequence(presence_penalty=1.0, output=(3,), logit_bias={1: 5.0}),
    ]  # fmt: skip
    logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    (alone,) = Sampler(frozenset()).sample(logits[2:3].clone(), ends_of([one]))
    mixed = Sampler(frozenset()).sample(logits.clone(), ends_of([*others[:2], one, *others[2:]]))
    assert mixed[2] == alone


def test_logprobs_are_the_models_own() -> None:
    result = sample(sequence(logprobs=2, logit_bias={0: 50.0}))
    assert result.token_id == 0 and result.logprob is not None
    expected = torch.log_softmax(LOGITS, -1)
    assert result.logprob.logprob == pytest.approx(expected[0].item())
    assert result.logprob.rank == 4
    assert [i for i, _ in result.logprob.top] == [3, 2]
    assert sample(sequence(logprobs=0)).logprob is not None
    assert sample(sequence()).logprob is None


def test_logprobs_of_given_tokens() -> None:
    """The chosen token comes first, then the named ones in their order, each once."""
    expected = torch.log_softmax(LOGITS, -1)
    given = sequence(logprobs=2, logprob_token_ids=(0, 3, 1, 0), logit_bias={1: 50.0})
    others = [sequence(logprobs=3), sequence(), sequence(logprobs=0, logprob_token_ids=(4,))]
    rows = Sampler(frozenset()).sample(LOGITS.repeat(4, 1), ends_of([given, *others]))
    described = [row.logprob for row in rows]
    assert described[0] is not None and described[1] is not None and described[3] is not None
    assert described[0].token_id == 1
    assert [token for token, _ in described[0].top] == [1, 0, 3]
    assert [value for _, value in described[0].top] == [expected[i].item() for i in (1, 0, 3)]
    assert len(described[1].top) == 3 and described[2] is None
    assert [token for token, _ in described[3].top] == [3, 4]


def test_describing_tokens() -> None:
    (entry,) = describe_tokens(LOGITS[None], [1], 1)
    assert (entry.token_id, entry.rank, entry.top[0][0]) == (1, 3, 3)
    assert describe_tokens(LOGITS[:0], [], 3) == []
    (all_of_them,) = describe_tokens(LOGITS[None], [0], 20)
    assert len(all_of_them.top) == 5, "no more than the vocabulary has"


def test_equal_tokens_are_told_in_order_whatever_a_neighbour_asks_for() -> None:
    logits_2V = torch.full((2, 300), -1.0)
    logits_2V[0, [250, 17, 98, 147]] = 2.0
    logits_2V[1, 5] = 3.0
    told = [describe_tokens(logits_2V[:1], [17], num)[0].top for num in (1, 2, 3, 6)]
    assert [token for token, _ in told[-1]] == [17, 98, 147, 250, 0, 1]
    assert all(top == told[-1][: len(top)] for top in told)
    assert describe_tokens(logits_2V, [17, 5], 6)[0].top == told[-1]


def test_nan_and_infinity_are_reported_for_their_rows_only() -> None:
    logits = torch.stack([LOGITS, LOGITS * float("nan"), LOGITS + float("inf")])
    rows = [sequence(), sequence(temperature=1.0), sequence(temperature=1.0)]
    good, *bad = Sampler(frozenset()).sample(logits, ends_of(rows))
    assert good.is_valid and not any(b.is_valid for b in bad)


@pytest.mark.parametrize("temperature", [1e-60, 1e-38, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert sample(sequence(temperature=temperature, seed=3)).token_id == 3


def naive_kept(probs: list[float], params: SamplingParams) -> set[int]:
    """Computes the kept tokens by definition, one by one, with ties at the cut."""
    least = params.min_p * max(probs)
    kept = {i for i, p in enumerate(probs) if p >= least}
    order = sorted(kept, key=lambda i: -probs[i])
    if params.top_k > 0:
        order = order[: params.top_k]
    total, before, last = sum(probs[i] for i in order), 0.0, max(probs)
    for i in order:
        if before >= params.top_p * total:
            break
        before, last = before + probs[i], probs[i]
    return {i for i, p in enumerate(probs) if p >= last}


@pytest.mark.parametrize("vocab_size", [7, 3000])
def test_cuts_match_their_definition_and_ignore_the_batch(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    params = [
        SamplingParams(top_p=top_p, top_k=top_k, min_p=min_p)
        for top_p in (0.3, 0.9, 0.999, 1.0)
        for top_k in (0, 1, 5, 2000)
        for min_p in (0.0, 0.01)
    ]
    scales = torch.rand(len(params), 1, generator=generator) * 3  # flat rows have large nuclei
    logits = torch.randn(len(params), vocab_size, generator=generator) * scales
    probs = torch.softmax(logits, -1)
    together = least_probabilities(probs, params)
    for row, one in enumerate(params):
        alone = least_probabilities(probs[row : row + 1], [one])
        assert torch.equal(alone, together[row : row + 1]), f"{one=}"
        kept = set((probs[row] >= together[row]).nonzero()[:, 0].tolist())
        expected = naive_kept(probs[row].double().tolist(), one)
        assert len(kept ^ expected) <= (1 if vocab_size > 100 else 0), f"{one=}"


def test_draws_depend_on_seed_choice_and_position_alone() -> None:
    seen = {
        uniform(seed, choice, position)
        for seed in range(-5, 5)
        for choice in range(3)
        for position in range(20)
    }
    assert len(seen) == 10 * 3 * 20
    assert all(0 <= u < 1 for u in seen)
    assert uniform(7, 1, 9) == uniform(7, 1, 9)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("temperature", 2.1), ("temperature", float("nan")), ("top_p", 0.0),
     ("top_p", 1.5), ("top_k", -2), ("min_p", 2.0), ("presence_penalty", 3.0), ("n", 0),
     ("n", 1000), ("max_tokens", 0), ("logprobs", 21), ("repetition_penalty", 0.0),
     ("max_tokens", True), ("top_k", 1.5), ("seed", 2**63), ("stop", ("",)), ("stop", ("x",) * 17),
     ("stop", 3), ("logit_bias", [1]),
     ("stop_token_ids", (-1,)), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: 101.0}),
     ("logprob_token_ids", (1,)), ("logprob_token_ids", tuple(range(129))), ("logprobs", -1),
     ("prompt_logprobs", -1)],
    ids=str,
)  # fmt: skip
def test_wrong_values_name_the_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


def test_ids_outside_the_vocabulary_are_refused() -> None:
    given = SamplingParams(logprobs=0, logprob_token_ids=(50,))
    params_of = (SamplingParams(stop_token_ids=(50,)), SamplingParams(logit_bias={50: 1.0}), given)
    for params in params_of:
        with pytest.raises(InvalidRequestError, match=r"in \[0, 49\], got 50"):
            params.check_vocabulary(50)


def test_all_wrong_values_are_named() -> None:
    bias = dict.fromkeys(range(60), 1.0)
    with pytest.raises(InvalidRequestError, match=r"got 50, 51, .*, 59\.") as caught:
        SamplingParams(logit_bias=bias).check_vocabulary(50)
    assert caught.value.param == "logit_bias"
    with pytest.raises(InvalidRequestError, match=r"got 40, .*, 49 and 10 more\."):
        SamplingParams(allowed_token_ids=tuple(bias)).check_vocabulary(40)
    with pytest.raises(InvalidRequestError, match=r"value must be .*, got 101\.0, -200\.0\."):
        SamplingParams(logit_bias={1: 101.0, 2: 3.0, 3: -200.0})
    with pytest.raises(InvalidRequestError, match="-1, is not served; name tokens in logprob_tok"):
        SamplingParams(logprobs=-1)
