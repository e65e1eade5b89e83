"""Answers that follow grammars, on ranks: the same tokens as in one process, also after a loss."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace

import pytest

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.request import DecodingRules, FinishReason, GenerationRequest
from moe_serve.engine.request.thinking_markers import ThinkingMarkers
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.text.tokenizer import Tokenizer
from tests.support.cluster.fault_drive import FaultDrive, fault_config, undisturbed
from tests.support.cluster.layouts import colocated, config, on_ranks, requests

VOCAB_SIZE = 4096  # of the demonstration model
CONSTRAINTS = (
    Constraint("regex", "([a-z]{2,5}[0-9]){30}"),
    None,
    Constraint("json_schema", '{"type":"array","items":{"enum":["x","yy"]},"minItems":8}'),
    Constraint("choice", '["one","another"]'),
)
# Any text up to a star, and then digits: as reasoning is before an answer.
LEAD = 'start: thought @answer\nthought[suffix="*"]: /(?s:.*)/\n'
LED = Constraint("regex", "[0-9]{40}", LEAD)
END = (4000, 4001, 4002)  # of a reasoning, after four tokens
THINKING = ThinkingMarkers(end=END, closings=(END,), is_open=True)
TAGS = Constraint(
    "structural_tag",
    '{"structures":[{"begin":"e<","schema":{"enum":[1,22]},"end":">"}],"triggers":["e"]}',
)


def wanted(count: int, num_tokens: int) -> list[GenerationRequest]:
    """One is free, one but for tags, one after thinking; half of them are drawn; one can take no
    token at its second step, and with the choices ends are met while the next step is under way.
    Another one is led."""
    made = []
    for i, request in enumerate(requests(count, VOCAB_SIZE, num_tokens)):
        constraint = {0: TAGS, 6: LED}.get(i, CONSTRAINTS[i % len(CONSTRAINTS)])
        params = replace(request.params, constraint=constraint)
        if i == 5:
            params = replace(params, thinking_token_budget=4, thinking_markers=THINKING)
        if i == 4:
            letters = tuple(range(67, 93))
            pattern = Constraint("regex", "[a-z][0-9]")
            params = replace(params, constraint=pattern, allowed_token_ids=letters)
        rules = DecodingRules.of(params)
        if i % 2:  # as a front end resolves it
            params = replace(params, constraint=None, thinking_markers=None)
        made.append(replace(request, params=params, resolved=rules))
    return made


@pytest.mark.parametrize(("attention", "experts"), [(1, 1), (2, 1)])
def test_layouts(attention: int, experts: int) -> None:
    of = config(attention, experts, 2)
    found, expected = on_ranks(of, wanted(8, 12)), colocated(of, wanted(8, 12))
    assert found == expected, f"{attention}A{experts}E"
    ends = {key: answer.end for key, answer in found.items()}
    assert ends["r3"] is ends["r7"] is FinishReason.STOP, "a choice is complete"
    assert ends["r4"] is FinishReason.ERROR, "this one contradicts itself"
    led = Tokenizer.load(demo_model_folder()).decode(found["r6"].token_ids)
    assert re.fullmatch(r"[^*]+\*[0-9]+", led), "its grammar begins behind the star"
    assert found["r5"].token_ids[4:7] == [*END], "its budget is spent"
    tagged = Tokenizer.load(demo_model_folder()).decode(found["r0"].token_ids)
    assert re.fullmatch(r"[^e]*(e<(1|22)>[^e]*)*(e(<(1|22?)?)?)?", tagged), tagged
    assert found["r4"].error == "its parameters together allow no token here"


def test_a_lost_rank_and_the_grammars_go_on_elsewhere() -> None:
    of, answers = fault_config(2, 1), wanted(8, 30)
    with FaultDrive(of) as drive:
        pid = drive.pid("attention-1")
        found = drive.serve(answers, lambda: os.kill(pid, signal.SIGKILL))
        assert drive.hurt.detected.keys() == {"attention-1"}
    assert found == undisturbed(of, answers)
