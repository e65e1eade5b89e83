"""Measures what looking for drafts and choosing them costs, without a model.

Sequences grow by tokens that are random, or that repeat an earlier passage now and then, and no
draft is right. Steps are taken to last as long as those of the demonstration model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from moe_serve.config.sections import SpeculationConfig
from moe_serve.engine.drafting.drafting import Drafting
from moe_serve.engine.drafting.drafting_maker import drafting_maker
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence, StopRule

_VOCAB_SIZE = 4096
_STEPS, _REPEATED = 400, 0.3  # steps of a run; share of the tokens that repeat a passage
_FIXED_S, _ROW_S = 0.0005, 0.0002  # of a step, and of each of its rows


def drafting_times(rounds: int) -> Iterator[str]:
    """Yields a line for each batch and context: microseconds per sequence and step, the least of
    the rounds."""
    stop = StopRule(frozenset([0]), 1 << 17)
    make = drafting_maker(SpeculationConfig(method="auto"), _VOCAB_SIZE, stop)
    for context, batches in ((200, (1, 4, 16, 64)), (2048, (1, 16)), (32768, (1, 4))):
        for batch in batches:
            for share in (0.0, _REPEATED):
                times = list[float]()
                for number in range(rounds):
                    drafting = make()
                    assert drafting is not None, "the method is not off"
                    times.append(_microseconds(drafting, batch, context, share, number))
                text = "random" if not share else f"{share:.0%} repeated"
                yield f"{context:6} tokens, batch {batch:2}, {text:13}: {min(times):6.1f} us"


def _microseconds(
    drafting: Drafting, batch: int, context: int, share: float, first_id: int
) -> float:
    rng, clock_s = random.Random(first_id), 0.0
    asked = [_sequence(rng, first_id * batch + number, context) for number in range(batch)]
    schedule = {sequence.id: (sequence, 1) for sequence in asked}
    drafting.note_step(batch * context, 0, batch * context * _ROW_S, reads_prompt=True)
    for _ in range(_STEPS):
        for sequence in asked:
            is_repeated = rng.random() < share
            sequence.append(sequence.token_ids[-40] if is_repeated else rng.randrange(_VOCAB_SIZE))
            sequence.num_computed_tokens = sequence.num_tokens - 1
        begin = time.perf_counter()
        drafts = drafting.choose(schedule, 16 * batch)
        for key, draft in drafts.items():
            drafting.note(key, draft, 0)
        num_drafted = sum(len(draft.token_ids) for draft in drafts.values())
        seconds = _FIXED_S + _ROW_S * (batch + num_drafted)
        drafting.note_step(batch + num_drafted, num_drafted, seconds, reads_prompt=False)
        clock_s += time.perf_counter() - begin
    return clock_s / (_STEPS * batch) * 1e6


def _sequence(rng: random.Random, number: int, context: int) -> Sequence:
    """Returns a sequence that has read its prompt and has its first token."""
    prompt = tuple(rng.randrange(_VOCAB_SIZE) for _ in range(context))
    params = SamplingParams(max_tokens=2 * _STEPS)
    request = GenerationRequest(request_id=str(number), prompt_token_ids=prompt, params=params)
    sequence = Sequence(number, request)
    sequence.append(rng.randrange(_VOCAB_SIZE))
    return sequence
