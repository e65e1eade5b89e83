"""The result of a step: runs of sampled tokens, failures, and what listeners asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from moe_serve.engine.drafting.draft import NO_PROPOSALS, Proposals
from moe_serve.engine.request.request import (
    DraftResult,
    FinishReason,
    TokenDelta,
    TokenExperts,
    TokenLogprob,
)
from moe_serve.engine.request.sequence import Schedule, Sequence, StopRule
from moe_serve.engine.sampling.answer_masks import MaskCost
from moe_serve.engine.sampling.sampler import Sampled
from moe_serve.pipeline.route_tap import StepChoices


@dataclass(frozen=True, slots=True)
class RowFailure:
    """The request of one row failed; other rows are unaffected.

    `is_of_request` is True if the request asks for something impossible and the server is fine.
    """

    why: str
    is_of_request: bool = False
    code: str | None = None  # for clients

    def delta_of(self, sequence: Sequence) -> TokenDelta:
        """Returns the last delta of the failed sequence."""
        return TokenDelta(
            request_id=sequence.request.request_id,
            finish_reason=FinishReason.ERROR,
            num_preemptions=sequence.num_preemptions,
            error=self.why,
            is_of_request=self.is_of_request,
            error_code=self.code,
        )


NO_TOKEN = RowFailure("the step returned no token for this request")  # only a faulty rank does this
NAN = RowFailure("the model produced NaN for this request")
TOO_COSTLY = RowFailure(
    "its grammar is too costly to follow while other requests wait for a seat; use one that is "
    "less ambiguous, or try again later",
    is_of_request=True,
)
DEADLINE_EXCEEDED = RowFailure(
    "its deadline passed before the answer was complete, and it asks to be ended then (strict); "
    "send it again, or with a longer target",
    is_of_request=True,
    code="deadline_exceeded",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The result of a step. All mappings are by sequence id.

    A sequence that caught up gets a run of tokens, which follow its last token. The step has
    computed the rows of a run's tokens except the last, so that the run's last token is the next
    one to compute. A sequence in `failures` fails after its run, which may then be missing.

    Executors leave the sequences as they are. The engine appends the tokens.
    """

    sampled: Mapping[int, tuple[Sampled, ...]] = field(default_factory=dict)
    failures: Mapping[int, RowFailure] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    choices: StepChoices | None = None  # the routers' choices, if the plan asked for them
    spoiled: Collection[int] = ()  # sequences whose refused drafted tokens left NaNs in pages
    proposals: Proposals = NO_PROPOSALS  # drafts for the next step
    mask_costs: Mapping[int, MaskCost] = field(default_factory=dict)

    def run_of(self, sequence_id: int) -> tuple[tuple[Sampled, ...], RowFailure | None]:
        """Returns the valid tokens of a sequence that caught up, and why it fails after them, if it
        does."""
        run, failure = self.sampled.get(sequence_id, ()), self.failures.get(sequence_id)
        if run and not run[-1].is_valid:
            run, failure = run[:-1], NAN
        is_lacking = not (run or failure or sequence_id in self.spoiled)
        return run, NO_TOKEN if is_lacking else failure

    def is_sound(self, sequence_id: int) -> bool:
        """Returns whether a sequence got tokens, all of them valid."""
        run = self.sampled.get(sequence_id, ())
        return bool(run) and sequence_id not in self.failures and all(s.is_valid for s in run)

    def cut(self, schedule: Schedule, stop: StopRule) -> StepOutcome:
        """Returns the outcome without the tokens behind the ends of the scheduled sequences."""
        runs = self.sampled
        if not [run for run in runs.values() if len(run) > 1]:
            return self
        kept = dict(runs)
        for key, run in runs.items():
            if len(run) > 1 and key in schedule:
                kept[key] = _cut(run, schedule[key][0], stop)
        return replace(self, sampled=kept)


def delta_of(
    sequence: Sequence,
    run: tuple[Sampled, ...],
    reason: FinishReason | None,
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None,
    experts: tuple[TokenExperts, ...] | None,
    drafted: DraftResult | None = None,
) -> TokenDelta:
    """Returns the delta of a run that a sequence got, and with which it ended if there is a
    reason."""
    token_ids: tuple[int, ...] = (run[0].token_id,)
    logprobs = None if run[0].logprob is None else tuple([s.logprob for s in run if s.logprob])
    if len(run) > 1:
        token_ids = tuple([sampled.token_id for sampled in run])
    if experts is not None and drafted is not None:
        accepted = experts[: drafted.num_accepted]
        marked = [replace(each, drafter=drafted.source) for each in accepted]
        experts = (*marked, *experts[drafted.num_accepted :])
    return TokenDelta(
        request_id=sequence.request.request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=reason,
        stop_token_id=run[-1].token_id if reason is FinishReason.STOP else None,
        num_cached_tokens=sequence.num_cached_tokens,
        num_tier_tokens=min(sequence.num_tier_tokens, sequence.num_cached_tokens),
        num_dropped_tokens=0 if sequence.kv_window is None else sequence.num_dropped_tokens,
        num_preemptions=sequence.num_preemptions,
        routed_experts=experts,
        started_at=sequence.started_at,
        drafted=drafted,
    )


def _cut(run: tuple[Sampled, ...], sequence: Sequence, stop: StopRule) -> tuple[Sampled, ...]:
    """Returns the run up to its first token that is not valid or ends the sequence."""
    for count, sampled in enumerate(run, 1):
        length = sequence.num_output_tokens + count
        if not sampled.is_valid or stop.reason(sequence, sampled.token_id, length) is not None:
            return run[:count]
    return run
