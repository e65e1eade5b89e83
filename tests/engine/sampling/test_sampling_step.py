"""The sequences of a step become inputs of the kernels' sampler."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moe_kernels.interface.token_sampler import TokenEntries
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.sampling_step import make_sampling_step
from tests.support.engine.points import ends_of


def sequence(
    prompt: tuple[int, ...], answer: tuple[int, ...], choice: int = 0, **params: object
) -> Sequence:
    wishes = SamplingParams(**({"max_tokens": None} | params))  # type: ignore[arg-type]
    made = Sequence(
        0,
        GenerationRequest(
            request_id="r", prompt_token_ids=prompt, params=wishes, choice=choice
        ),
    )  # fmt: skip
    for token in answer:
        made.append(token)
    return made


def row_of(entries: TokenEntries, row: int) -> list[tuple[int, float, int, bool]]:
    """Returns (token, bias, count, is seen) of one row."""
    columns: tuple[NDArray[np.generic], ...] = (
        entries.tokens_M,
        entries.biases_M,
        entries.counts_M,
        entries.is_seen_M,
    )
    is_row = entries.rows_M == row
    return list(zip(*(column[is_row].tolist() for column in columns), strict=True))


def test_the_worked_example() -> None:
    rows = [
        sequence((1,), (2,)),
        sequence((5, 3), (3, 7), repetition_penalty=1.5, presence_penalty=1.0, logit_bias={9: 2.0}),
    ]
    entries = make_sampling_step(ends_of(rows), [0]).entries
    assert entries is not None and row_of(entries, 0) == []
    assert row_of(entries, 1) == [
        (3, 0.0, 1, True),
        (5, 0.0, 0, True),
        (7, 0.0, 1, True),
        (9, 2.0, 0, False),
    ]


def test_tokens_of_one_kind() -> None:
    """Only tokens that a penalty needs are looked up; their order does not matter."""
    repeated = sequence((5, 3), (3, 7), repetition_penalty=1.5)
    counted = sequence((5, 3), (3, 7, 3), frequency_penalty=0.5)
    entries = make_sampling_step(ends_of([repeated, counted]), [0]).entries
    assert entries is not None, "both are penalised"
    seen, found = row_of(entries, 0), row_of(entries, 1)
    assert sorted(seen) == [(3, 0.0, 0, True), (5, 0.0, 0, True), (7, 0.0, 0, True)]
    assert sorted(found) == [(3, 0.0, 2, False), (7, 0.0, 1, False)]


def test_stops_are_banned_up_to_the_minimum_length() -> None:
    def made(answer: tuple[int, ...]) -> TokenEntries | None:
        asked = sequence((4,), answer, min_tokens=2, stop_token_ids=(8, 0), logit_bias={8: 1.0})
        return make_sampling_step(ends_of([asked]), [0]).entries

    short, long = made((6,)), made((6, 6))
    assert short is not None and long is not None, "there is a bias"
    assert row_of(short, 0) == [(0, -np.inf, 0, False), (8, -np.inf, 0, False)]
    assert row_of(long, 0) == [(8, 1.0, 0, False)], "and no penalty counts the answer"
    assert make_sampling_step(ends_of([sequence((4,), (), min_tokens=2)]), []).entries is None, (
        "no stops"
    )


def test_rows_are_those_of_the_requests() -> None:
    rows = [
        sequence((1, 2), (3,), choice=2, seed=-5, temperature=1e-9, top_k=-1, logprobs=0),
        sequence((1,), (), seed=2**63 - 1, temperature=0.5, top_k=7, top_p=0.1, min_p=0.2),
        sequence((1,), (), seed=0, frequency_penalty=0.5, presence_penalty=-1.0, logprobs=4),
    ]
    step = make_sampling_step(ends_of(rows), [])
    assert step.temperatures_S.tolist() == [0.0, 0.5, 1.0], "tiny temperatures are greedy"
    assert step.top_ks_S.tolist() == [0, 7, 0]
    assert step.top_ps_S.tolist() == [1.0, 0.1, 1.0], "in float64, as the request has it"
    assert step.min_ps_S.tolist() == [0.0, float(np.float32(0.2)), 0.0]
    keys = np.stack((step.seeds_S, step.choices_S, step.positions_S), axis=1)
    assert list(map(tuple, keys.tolist())) == [(-5, 2, 3), (2**63 - 1, 0, 1), (0, 0, 1)]
    assert (step.presences_S.tolist(), step.frequencies_S.tolist()) == ([0, 0, -1], [0, 0, 0.5])
    assert (step.scored_rows_R.tolist(), step.num_top) == ([0, 2], 4)
    assert step.entries is None, "nothing was answered that could be penalised"
    assert (step.num_rows, step.is_greedy, step.has_filter) == (3, False, True)


def test_what_no_row_needs_is_known() -> None:
    greedy = make_sampling_step(ends_of([sequence((1,), (), temperature=0.0, top_k=5)]), [])
    assert greedy.is_greedy and not greedy.has_filter, "the filter of a greedy row is none"
    assert not make_sampling_step(ends_of([sequence((1,), (), seed=1)]), []).has_filter
