"""Estimates answer lengths for the scheduler with a predictor (`scheduler.length_prediction:
on`).
"""

from __future__ import annotations

import importlib.util
from collections import OrderedDict

from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.service.lengths.features import RequestFacts
from moe_serve.engine.service.lengths.length_fit import ProcessFitter
from moe_serve.engine.service.lengths.length_predictor import LengthForecast, LengthPredictor
from moe_serve.errors import ConfigError

_LONGEST = 32_768  # tokens; longer answers are in the last bin
_MOST_KEPT = 20_000  # forecasts of requests that have not ended


class PredictedLengths:
    """Implements AnswerLengths. A request is predicted when its length is first asked for, else
    when its answer ends, so that every answer is learnt from."""

    def __init__(self, predictor: LengthPredictor) -> None:
        self.predictor = predictor
        self._forecasts: OrderedDict[str, LengthForecast] = OrderedDict()

    def p90(self, sequence: Sequence, tier: int) -> float:
        """See `AnswerLengths.p90`. Never more than the request allows. For an answer that has
        begun, nine of ten that are longer than it do not exceed this."""
        so_far = sequence.num_output_tokens
        forecast = self._forecast(sequence)
        length = forecast.p90
        if so_far >= length:
            length = forecast.followed.quantile(0.9, so_far)
        most = sequence.rules.max_tokens
        return length if most is None else min(length, float(most))

    def note(self, sequence: Sequence, tier: int, *, is_complete: bool) -> None:
        """See `AnswerLengths.note`."""
        request_id = sequence.request.request_id
        self._forecast(sequence)
        del self._forecasts[request_id]
        self.predictor.ended(request_id, sequence.num_output_tokens, is_cut=not is_complete)

    def _forecast(self, sequence: Sequence) -> LengthForecast:
        request_id = sequence.request.request_id
        found = self._forecasts.get(request_id)
        if found is None:
            found = self.predictor.predict(request_id, facts_of(sequence))
            self._forecasts[request_id] = found
            if len(self._forecasts) > _MOST_KEPT:
                old, _ = self._forecasts.popitem(last=False)
                self.predictor.forget(old)
        return found


def predicted_lengths() -> PredictedLengths:
    """Makes the estimates of a server. Raises ConfigError without scikit-learn."""
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError(
            "scheduler.length_prediction is on, which needs scikit-learn: install "
            "moe-serve[train], or set it to off."
        )
    return PredictedLengths(LengthPredictor(_LONGEST, ProcessFitter()))


def facts_of(sequence: Sequence) -> RequestFacts:
    """Returns the facts that the engine knows about a request. Tools and turns are already part of
    the prompt's tokens.
    """
    request, rules = sequence.request, sequence.rules
    return RequestFacts(
        prompt_ids=request.prompt_token_ids,
        max_tokens=rules.max_tokens,
        temperature=request.params.temperature,
        tenant=request.service.tenant,
        has_grammar=rules.constraint is not None,
        has_thinking=rules.thinking_markers is not None,
        has_stop=bool(request.params.stop or request.params.stop_token_ids),
    )
