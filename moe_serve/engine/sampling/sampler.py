"""Turns logits into tokens in torch. Each row's result depends on its own logits and request only.

S rows, V vocabulary, N the part of a row that is sorted. Order of operations: logit bias and
minimum length, penalties, masks, temperature, min_p, top-k, top-p, draw. Log probabilities are
those of the model, before all of these.

min_p, top-k and top-p cut by value, not by rank, so they need sorted values only. Equal values have
no order, so the cut does not depend on a sorting algorithm or on how much of a row was sorted:
tokens that tie with the last one kept are kept too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Rows
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moe_kernels.interface.token_sampler import TokenMasks, ban_others, ban_others_on_device
from moe_serve.engine.request.request import TokenLogprob
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling.sampling_point import SamplingPoint

Largest = Callable[[Tensor], tuple[list[float], list[int]]]

_USUAL_NUCLEUS = 1024  # tokens; rows with a larger nucleus are sorted completely
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token of one row. `is_valid` is False if the row's logits held NaN or infinity."""

    token_id: int
    is_valid: bool
    logprob: TokenLogprob | None


def _largest(x_SV: Tensor) -> tuple[list[float], list[int]]:
    values_S, places_S = x_SV.max(dim=-1)
    return values_S.tolist(), places_S.tolist()


class Sampler:
    """Implements SamplingBackend with torch operations, on the logits' device.

    `eos_token_ids` are banned before a request's minimum length. `largest` returns each row's
    largest value and its first place; see `Kernels.largest`.
    """

    def __init__(self, eos_token_ids: frozenset[int], largest: Largest = _largest) -> None:
        self._eos, self._largest = sorted(eos_token_ids), largest

    def sample(
        self, logits_SV: Tensor, points: Rows[SamplingPoint], masks: TokenMasks | None = None
    ) -> list[Sampled]:
        """Samples one token for each row, at its point."""
        if masks is None and not [p for p in points if not p.sequence.is_plain]:
            tops, tokens = self._largest(logits_SV)
            pairs = zip(tokens, tops, strict=True)
            return [Sampled(token, math.isfinite(top), None) for token, top in pairs]
        adjusted_SV = self._adjust(logits_SV, points)
        if masks is not None:
            adjusted_SV = logits_SV.clone() if adjusted_SV is logits_SV else adjusted_SV
            _ban_others(adjusted_SV, masks)
        tops, tokens = self._largest(adjusted_SV)
        is_valid = [math.isfinite(top) for top in tops]
        params = [point.sequence.request.params for point in points]
        drawing = [i for i, p in enumerate(params) if not p.is_greedy and is_valid[i]]
        for wants_filter in (False, True) if drawing else ():
            rows = [i for i in drawing if _has_filter(params[i]) == wants_filter]
            if rows:
                drawn = _draw(adjusted_SV[rows], [points[i] for i in rows], wants_filter)
                for row, token in zip(rows, drawn, strict=True):
                    tokens[row] = token
        logprobs = _logprobs(logits_SV, tokens, points)
        return list(map(Sampled, tokens, is_valid, logprobs))

    def describe(self, logits_RV: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprob]:
        """See `describe_tokens`."""
        return describe_tokens(logits_RV, tokens, num_top)

    def _adjust(self, logits_SV: Tensor, points: Rows[SamplingPoint]) -> Tensor:
        """Applies bias, minimum length and penalties, on a copy and only to rows that need it."""
        adjusted_SV = logits_SV
        for row, point in enumerate(points):
            params, bans_end = point.params, point.bans_end
            if not (params.logit_bias or params.has_penalties or bans_end):
                continue
            if adjusted_SV is logits_SV:
                adjusted_SV = logits_SV.clone()
            if params.logit_bias:
                ids = torch.tensor(list(params.logit_bias), device=logits_SV.device)
                adjusted_SV[row, ids] += torch.tensor(
                    list(params.logit_bias.values()), device=logits_SV.device
                )
            if params.has_penalties:
                _penalize(adjusted_SV[row], point)
            if bans_end:
                adjusted_SV[row, [*self._eos, *params.stop_token_ids]] = float("-inf")
        return adjusted_SV


def describe_tokens(logits_RV: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprob]:
    """Returns the log probability and rank of one token per row, and the row's likeliest tokens."""
    if not tokens:
        return []
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    ids_R1 = torch.tensor(tokens, device=logits_RV.device)[:, None]
    values_R1 = logprobs_RV.gather(1, ids_R1)
    ranks = ((logprobs_RV > values_R1).sum(dim=-1) + 1).tolist()
    tops = _likeliest(logprobs_RV, min(num_top, logits_RV.shape[-1]))
    rows = zip(tokens, values_R1[:, 0].tolist(), ranks, tops, strict=True)
    return [TokenLogprob(*row) for row in rows]


def _likeliest(logprobs_RV: Tensor, num: int) -> list[tuple[tuple[int, float], ...]]:
    """Returns each row's `num` likeliest tokens with their values, equal ones by ascending id.

    `torch.topk` alone promises no order among equals: its choice depends on `num`, the largest
    number in the batch, so a neighbouring row could change the result.
    """
    if not num:
        return [()] * len(logprobs_RV)
    least_R1 = logprobs_RV.topk(num, dim=-1).values[:, -1:]
    tops = []
    for row_V, is_in_V in zip(logprobs_RV, logprobs_RV >= least_R1, strict=True):
        ids = is_in_V.nonzero()[:, 0]
        values, order = row_V[ids].sort(descending=True, stable=True)
        tops.append(tuple(zip(ids[order[:num]].tolist(), values[:num].tolist(), strict=True)))
    return tops


def with_given(entry: TokenLogprob, logits_V: Tensor, given: Tokens[int]) -> TokenLogprob:
    """Replaces the entry's likeliest tokens by the chosen one and the `given` ones, if any are
    given."""
    if not given:
        return entry
    logprobs_1V = torch.log_softmax(logits_V[None], dim=-1)
    values: list[float] = logprobs_1V[0, list(given)].tolist()
    others = dict(zip(given, values, strict=True))
    others.pop(entry.token_id, None)
    return replace(entry, top=((entry.token_id, entry.logprob), *others.items()))


def _has_filter(params: SamplingParams) -> bool:
    return params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0


def _ban_others(logits_SV: Tensor, masks: TokenMasks) -> None:
    if logits_SV.device.type == "cpu":
        ban_others(logits_SV, masks)
        return
    parts = (masks.rows_C, masks.bits_CW.view(np.int32))
    ban_others_on_device(logits_SV, *(torch.from_numpy(p).to(logits_SV.device) for p in parts))


def _penalize(row_V: Tensor, point: SamplingPoint) -> None:
    """Applies OpenAI's presence and frequency penalties over the answer, and repetition over prompt
    and answer (CTRL)."""
    params = point.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(list(point.seen), device=row_V.device)
        values = row_V[seen]
        penalty = params.repetition_penalty
        row_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if found := point.output_counts:
        ids = torch.tensor(list(found), device=row_V.device)
        counts = torch.tensor(list(found.values()), device=row_V.device, dtype=row_V.dtype)
        row_V[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _draw(logits_SV: Tensor, points: Rows[SamplingPoint], has_filter: bool) -> list[int]:
    """Draws by inverse transform sampling: the first token whose cumulative probability exceeds the
    draw."""
    device, params = logits_SV.device, [p.params for p in points]
    temperature_S1 = torch.tensor([[p.temperature] for p in params], device=device)
    shifted_SV = logits_SV - logits_SV.amax(dim=-1, keepdim=True)
    probs_SV = torch.softmax(shifted_SV / temperature_S1, dim=-1)
    if has_filter:
        probs_SV = probs_SV * (probs_SV >= least_probabilities(probs_SV, params))
    cumulative_SV = probs_SV.double().cumsum(dim=-1)
    total_S1 = cumulative_SV[:, -1:].contiguous()
    draws = [uniform(p.sequence.seed, p.sequence.request.choice, p.position) for p in points]
    draw_S1 = torch.tensor(draws, dtype=torch.float64, device=device)[:, None]
    index_S1 = torch.searchsorted(cumulative_SV, draw_S1 * total_S1, right=True)
    # A draw next to 1 may round past the end: take the last token with any probability.
    last_S1 = torch.searchsorted(cumulative_SV, total_S1)
    tokens: list[int] = torch.minimum(index_S1, last_S1)[:, 0].tolist()
    return tokens


def _logprobs(
    logits_SV: Tensor, tokens: list[int], points: Rows[SamplingPoint]
) -> list[TokenLogprob | None]:
    wanted = [p.sequence.request.params.logprobs for p in points]
    rows = [row for row, num_top in enumerate(wanted) if num_top is not None]
    result: list[TokenLogprob | None] = [None] * len(points)
    if rows:
        most = max(wanted[row] or 0 for row in rows)
        described = describe_tokens(logits_SV[rows], [tokens[row] for row in rows], most)
        for row, entry in zip(rows, described, strict=True):
            natural = replace(entry, top=entry.top[: wanted[row]])
            given = points[row].params.logprob_token_ids
            result[row] = with_given(natural, logits_SV[row], given)
    return result


def least_probabilities(probs_SV: Tensor, params: Rows[SamplingParams]) -> Tensor:
    """Returns the smallest probability that each row keeps, [S, 1].

    Applies min_p, then top-k, then top-p to what is left. The likeliest token always stays.
    """
    vocab_size = probs_SV.shape[-1]
    most = max((p.top_k for p in params), default=0)
    least_S1, is_certain_S = _cut(probs_SV, params, min(vocab_size, max(_USUAL_NUCLEUS, most)))
    unsure = (~is_certain_S).nonzero()[:, 0].tolist()
    if unsure:
        exact, _ = _cut(probs_SV[unsure], [params[i] for i in unsure], vocab_size)
        least_S1[unsure] = exact
    return least_S1


def _cut(probs_SV: Tensor, params: Rows[SamplingParams], num: int) -> tuple[Tensor, Tensor]:
    """Returns the cuts by the `num` largest values, and whether those were enough [S]."""
    device = probs_SV.device
    min_p_S1 = torch.tensor([[p.min_p] for p in params], device=device)
    top_k_S1 = torch.tensor([[p.top_k if p.top_k > 0 else 2**31] for p in params], device=device)
    top_p_S1 = torch.tensor([[p.top_p] for p in params], dtype=torch.float64, device=device)
    sorted_SN = probs_SV.topk(num, dim=-1).values
    floor_S1 = min_p_S1 * sorted_SN[:, :1]
    keep_SN = (sorted_SN >= floor_S1) & (torch.arange(num, device=device)[None] < top_k_S1)
    kept_SN = (sorted_SN * keep_SN).double()
    cumulative_SN = kept_SN.cumsum(dim=-1)  # summed in order, so independent of N
    all_SV = (probs_SV * (probs_SV >= floor_S1)).double().cumsum(dim=-1)
    has_top_k_S1 = top_k_S1 <= num
    total_S1 = torch.where(has_top_k_S1, cumulative_SN[:, -1:], all_SV[:, -1:])
    keep_SN &= cumulative_SN - kept_SN < top_p_S1 * total_S1
    last_S1 = keep_SN.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    is_whole_S1 = has_top_k_S1 | (sorted_SN[:, -1:] < floor_S1) | (num == probs_SV.shape[-1])
    is_certain_S1 = is_whole_S1 | (cumulative_SN[:, -1:] >= top_p_S1 * total_S1)
    return sorted_SN.gather(1, last_S1), is_certain_S1[:, 0]


def uniform(seed: int, choice: int, position: int) -> float:
    """Returns one number in [0, 1) that depends on (seed, choice, position) only.

    It comes from the counter-based generator Philox (Salmon et al., SC 2011). There is no state to
    share or advance, so a neighbour, a preemption or a restart changes nothing.
    """
    key = np.array([seed & _MASK, choice], dtype=np.uint64)
    counter = np.array([position, 0, 0, 0], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw()
    return float(int(bits) >> 11) * 2.0**-53
