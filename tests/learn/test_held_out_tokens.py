"""Tokens that are held out to stop the training between layers: whole documents, never all."""

from __future__ import annotations

import numpy as np
import pytest

from moe_serve.learn.training import held_out_tokens
from routing_predictor.requests.texts import PIECE
from routing_predictor.traces.routing_error import TraceError
from routing_predictor.traces.trace import PREFILL, RoutingTrace


def trace_of(*request_ids: str) -> RoutingTrace:
    """Makes a trace with three tokens of each request."""
    num_tokens = 3 * len(request_ids)
    return RoutingTrace(
        expert_ids_NLK=np.zeros((num_tokens, 1, 1), np.int16),
        request_N=np.repeat(np.arange(len(request_ids)), 3).astype(np.int32),
        position_N=np.tile(np.arange(3), len(request_ids)).astype(np.int32),
        phase_N=np.full(num_tokens, PREFILL, np.uint8),
        token_N=np.zeros(num_tokens, np.int32),
        num_experts=2,
        layers=(0,),
        request_ids=request_ids,
    )


def test_all_pieces_of_a_document_are_held_out_or_none() -> None:
    trace = trace_of(f"a{PIECE}0", f"b{PIECE}0", f"a{PIECE}1")
    assert held_out_tokens(trace).tolist() == [True] * 3 + [False] * 3 + [True] * 3


def test_one_document_leaves_nothing_to_learn_from() -> None:
    """It was once held out as a whole, and the predictor's loss was no number."""
    with pytest.raises(TraceError, match="1 document is too few"):
        held_out_tokens(trace_of(f"a{PIECE}0", f"a{PIECE}1"))
