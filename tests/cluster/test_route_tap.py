"""What listeners hear of the routing is the same in every layout, and changes no token."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_serve.cluster.ranks.choice_packing import pack_choices, unpack_choices
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.build import build_engine
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.routes.route_records import RouteListeners, RouteRecord
from moe_serve.pipeline.route_tap import StepChoices
from tests.support.cluster.layouts import Answer, config, random_placement, requests, serve
from tests.support.cluster.thread_starter import ThreadStarter

VOCAB_SIZE, NUM_LAYERS, NUM_EXPERTS, TOP_K = 4096, 6, 32, 4


class Heard:
    """A listener that keeps everything, by request and position."""

    def __init__(self, only: Collection[str] = (), has_weights: bool = True) -> None:
        self.only, self.has_weights = frozenset(only), has_weights
        self.choices: dict[tuple[str, int], tuple[int, bytes, bytes | None]] = {}
        self.num_records = 0

    def wants(self, step: int, sequences: Mapping[int, Sequence]) -> list[int]:
        wanted = self.only
        return [k for k, s in sequences.items() if not wanted or s.request.request_id in wanted]

    def take(self, records: list[RouteRecord]) -> None:
        self.num_records += len(records)
        for record in records:
            assert record.expert_ids_NLK.shape[1:] == (NUM_LAYERS, TOP_K)
            assert record.expert_ids_NLK.dtype == np.uint8
            assert int(record.expert_ids_NLK.max()) < NUM_EXPERTS
            weights_NLK = record.weights_NLK
            for row, token in enumerate(record.token_ids_N.tolist()):
                weights = None if weights_NLK is None else weights_NLK[row].tobytes()
                key = record.request_id, record.start + row
                self.choices[key] = token, record.expert_ids_NLK[row].tobytes(), weights


def heard(
    of: EngineConfig, listeners: list[Heard], count: int = 7
) -> tuple[list[Heard], dict[str, Answer]]:
    """What listeners hear of some requests, and the answers."""
    build = build_cluster if of.cluster.is_disaggregated else build_engine
    built = build(of, make_starter=ThreadStarter) if build is build_cluster else build(of)
    for listener in listeners:
        built.routes.add(listener)
    try:
        answers = serve(built.engine, requests(count, VOCAB_SIZE))
    finally:
        built.engine.close()
    return listeners, answers


@pytest.fixture(scope="module")
def alone() -> tuple[Heard, dict[str, Answer]]:
    """Of one process, without prefix cache: every token of every request is computed."""
    of = config(0, 0, 1)
    (listener,), answers = heard(
        replace(of, cache=replace(of.cache, prefix_cache=False)), [Heard()]
    )
    return listener, answers


def test_every_computed_token_is_told(alone: tuple[Heard, dict[str, Answer]]) -> None:
    listener, answers = alone
    for request in requests(7, VOCAB_SIZE):
        answer = answers[request.request_id].token_ids
        whole = [*request.prompt_token_ids, *answer]
        told = {p: t for (r, p), (t, _, _) in listener.choices.items() if r == request.request_id}
        assert told == dict(enumerate(whole[:-1])), "the last token is never computed"


def test_listening_changes_no_token(alone: tuple[Heard, dict[str, Answer]]) -> None:
    _, answers = heard(config(0, 0, 1), [])
    assert answers == alone[1]


@pytest.mark.parametrize(
    ("attention", "experts", "micro_batches", "router"),
    [(0, 0, 3, "auto"), (1, 1, 1, "experts"), (1, 1, 2, "attention"), (2, 1, 2, "experts")],
)
def test_layouts_tell_the_same(
    alone: tuple[Heard, dict[str, Answer]],
    tmp_path: Path,
    attention: int,
    experts: int,
    micro_batches: int,
    router: str,
) -> None:
    of = config(attention, experts, micro_batches, router=router)
    if attention == 2:
        file = tmp_path / "placement.json"
        random_placement(file, range(NUM_LAYERS), NUM_EXPERTS, experts, 1)
        of = replace(of, cluster=replace(of.cluster, placement=str(file)))
    (listener,), answers = heard(
        replace(of, cache=replace(of.cache, prefix_cache=False)), [Heard()]
    )
    assert answers == alone[1]
    assert listener.choices == alone[0].choices


def test_only_what_is_asked_for(alone: tuple[Heard, dict[str, Answer]]) -> None:
    """One listener without weights, of one request: nothing else is told, and no weights."""
    of = config(1, 1, 2)
    (listener,), answers = heard(of, [Heard({"r2"}, has_weights=False)])
    assert answers == alone[1]
    expected = {k: (t, i, None) for k, (t, i, _) in alone[0].choices.items() if k[0] == "r2"}
    assert listener.choices == expected


def test_listeners_come_and_go() -> None:
    listeners, one = RouteListeners(), Heard()
    listeners.add(one)
    listeners.remove(Heard())
    listeners.remove(one)
    built = build_engine(config(0, 0, 1))
    built.routes.add(one)
    (request,) = requests(1, VOCAB_SIZE)
    built.engine.add(request)
    built.engine.step()
    assert one.num_records == 1
    built.routes.remove(one)
    while built.engine.has_work:
        built.engine.step()
    assert one.num_records == 1


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_choices_survive_the_message(dtype: type[np.integer]) -> None:
    ids = np.arange(24, dtype=dtype).reshape(3, 2, 4)
    weights = ids.astype(np.float16) / 7
    packed = pack_choices(StepChoices((5, 9), (1, 2), ids, weights))
    found = unpack_choices(packed)
    assert found is not None and found.sequence_ids == (5, 9) and found.counts == (1, 2)
    assert np.array_equal(found.expert_ids_NLK, ids) and found.expert_ids_NLK.dtype == dtype
    assert found.weights_NLK is not None and np.array_equal(found.weights_NLK, weights)


def test_choices_of_the_wrong_size_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    ids = np.zeros((3, 2, 4), dtype=np.uint8)
    packed = pack_choices(StepChoices((5, 9), (1, 2), ids))
    for wrong in (
        {"counts": (1, 3)},
        {"num_layers": -2},
        {"weights": b"a"},
        {"sequence_ids": (5,)},
    ):
        fields = {name: getattr(packed, name) for name in packed.__struct_fields__} | wrong
        assert unpack_choices(type(packed)(*fields.values())) is None
    assert "ignored a rank's 24 bytes of choices" in caplog.text
