"""Plans in the formats of other engines: written by hand, converted back, and refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.placement.formats.engine_plan import EnginePlan, PlanFacts
from experts.placement.formats.plan_text import WRITERS, parse_content, parse_text, render_plan
from experts.placement.placement_error import PlacementError
from experts.placement.problem.placement import Placement

# Three experts and a replica of the first, or of the second, on two devices of two slots each.
SLOTS = [[0, 1, 2, 0], [1, 2, 0, 1]]
RANKS = (((0, 1), (0,), (1,)), ((1,), (0, 1), (0,)))
# A model whose layer 0 of three is dense.
FACTS = PlanFacts(layers=(1, 2), num_layers=3, num_experts=3, num_devices=2)


def sglang(*rows: list[int]) -> str:
    return json.dumps({"physical_to_logical_map": [[0, 1, 2, 0], *(rows or SLOTS)]})


def vllm(**changes: Any) -> str:
    """Returns a plan as vLLM's generator writes it: one line."""
    record = {
        "record_type": "eplb_initial_mapping",
        "version": 1,
        "num_redundant_experts": 1,
        "num_slots": 4,
        "initial_global_assignments": {"0": SLOTS[0], "1": SLOTS[1]},
    }
    return json.dumps(record | changes) + "\n"


def trtllm(**changes: Any) -> Any:
    """Returns a plan as TensorRT-LLM's example script writes it (sorted keys, inline lists),
    parsed."""
    text = (
        "initial_global_assignments:\n  1: [0, 1, 2, 0]\n  2: [1, 2, 0, 1]\n"
        "layer_updates_per_iter: 0\nnum_slots: 4\n"
    )
    return yaml.safe_load(text) | changes


def ascend(*layers: list[list[int]]) -> str:
    """Returns a plan as vLLM-Ascend records it, indented by four."""
    rows = layers or [[[0, 1], [2, 0]], [[1, 2], [0, 1]]]
    record: dict[str, Any] = {"moe_layer_count": len(rows), "layer_list": []}
    for number, devices in enumerate(rows):
        listed = [{"device_id": i, "device_expert": held} for i, held in enumerate(devices)]
        record["layer_list"].append(
            {"layer_id": number, "device_count": len(devices), "device_list": listed}
        )
    return json.dumps(record, indent=4)


EXFLOW = "Expert,Node\n0,0\n0,1\n1,0\n2,1\n3,1\n4,0\n4,1\n5,0\n"


def check(plan: EnginePlan, name: str) -> None:
    assert plan.format == name
    assert dict(plan.placement.ranks_of) == {1: RANKS[0], 2: RANKS[1]}
    assert plan.placement.num_ranks == 2 and plan.num_doubled == 0


def test_what_engines_write_is_read() -> None:
    check(parse_text(sglang(), FACTS), "sglang")
    check(parse_text(vllm(), FACTS), "vllm")
    check(parse_content(trtllm(), FACTS), "trtllm")
    check(parse_text(ascend(), FACTS), "ascend")
    check(parse_text(EXFLOW, FACTS), "csv")


def test_what_is_written_is_what_engines_take() -> None:
    plan = Placement(num_ranks=2, num_experts=3, ranks_of={1: RANKS[0], 2: RANKS[1]})
    texts = {name: render_plan(name, plan, FACTS) for name in WRITERS}
    slots = [[0, 1, 0, 2], [1, 2, 0, 1]]  # ascending on each device
    mapping = json.loads(texts["sglang"])
    assert mapping == {"physical_to_logical_map": [[0, 1, 2, 0], *slots]}, "and no other key"
    assert texts["vllm"].count("\n") == 1
    assert json.loads(texts["vllm"]) == json.loads(
        vllm(initial_global_assignments={"0": slots[0], "1": slots[1]})
    )
    assert yaml.safe_load(texts["trtllm"]) == {
        "num_slots": 4,
        "initial_global_assignments": {1: slots[0], 2: slots[1]},
        "layer_updates_per_iter": 0,
    }
    assert json.loads(texts["ascend"]) == json.loads(ascend([[0, 1], [0, 2]], [[1, 2], [0, 1]]))
    assert texts["csv"] == EXFLOW


@st.composite
def plans(draw: st.DrawFn) -> tuple[Placement, PlanFacts]:
    """Draws plans with equal, used slots and no expert twice on a device; some layers are dense."""
    num_devices, per_device = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    num_experts = draw(st.integers(per_device, num_devices * per_device))
    layers = tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=4))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks_of = {}
    for layer in layers:
        held: list[list[int]] = [[] for _ in range(num_experts)]
        room = np.full(num_devices, per_device)
        for expert in rng.permutation(num_experts):  # each once, on the device with most room
            device = int(np.argmax(room + rng.random(num_devices)))
            held[expert].append(device)
            room[device] -= 1
        for device in range(num_devices):
            others = [e for e in range(num_experts) if device not in held[e]]
            for expert in rng.permutation(others)[: room[device]]:
                held[expert].append(device)
        ranks_of[layer] = tuple(tuple(sorted(ranks)) for ranks in held)
    plan = Placement(num_ranks=num_devices, num_experts=num_experts, ranks_of=ranks_of)
    facts = PlanFacts(
        layers=layers, num_layers=11, num_experts=num_experts, num_devices=num_devices
    )
    return plan, facts


@given(drawn=plans())
def test_every_format_there_and_back(drawn: tuple[Placement, PlanFacts]) -> None:
    plan, facts = drawn
    for name in WRITERS:
        text = render_plan(name, plan, facts)
        again = parse_content(yaml.safe_load(text), facts) if name == "trtllm" else None
        found = again or parse_text(text, facts)
        assert (found.format, found.placement) == (name, plan), name
        assert render_plan(name, found.placement, facts) == text, "and the same again"


def test_our_own_file() -> None:
    content = {
        "format": "moe-serve placement",
        "version": 1,
        "num_ranks": 2,
        "num_experts": 3,
        "layers": {"1": [[0, 1], [0], [1]]},
    }
    found = parse_text(json.dumps(content), PlanFacts())
    assert found.format == "moe-serve" and found.placement.ranks_of == {1: RANKS[0]}


def test_an_expert_twice_on_a_device_is_counted() -> None:
    """EPLB writes such plans: device 0 holds expert 0 twice."""
    found = parse_text(sglang([0, 0, 1, 2], [0, 1, 2, 0]), FACTS)
    assert found.num_doubled == 1 and found.placement.ranks_of[1] == ((0,), (1,), (1,))
    assert found.copies_LED[:, 0].tolist() == [[2, 0], [1, 1]]
    assert found.only([2]).num_doubled == 0 and list(found.only([2]).placement.ranks_of) == [2]


def test_layers_without_a_model_are_as_the_file_counts_them() -> None:
    facts = PlanFacts(num_devices=2)
    assert sorted(parse_text(sglang(), facts).placement.ranks_of) == [0, 1, 2]
    assert sorted(parse_text(vllm(), facts).placement.ranks_of) == [0, 1]
    assert sorted(parse_content(trtllm(), facts).placement.ranks_of) == [1, 2]
    assert parse_text(ascend(), PlanFacts()).placement.num_ranks == 2, "the file says it"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"physical_to_logical_map": [[0]], "note": 1}', r"unknown \(\['note'\]\)"),
        (sglang([0, 1, 2, 0]), "has 2 rows, but the model has 3 layers: every layer needs a row"),
        (sglang([0, 1, 2], [0, 1, 2, 0]), "rows of 3 and of 4 slots"),
        (sglang([0, 1, 2, 3], SLOTS[1]), "places expert 3, but experts are 0 to 2"),
        (sglang([0, 1, 2, 10**9], SLOTS[1]), "for experts 0 to 1000000000: each expert needs one"),
        (sglang([0, 1, 1, 0], SLOTS[1]), "no slot for 1 of 3 experts; the first is expert 2"),
        (sglang([0, 1, 2, -1], SLOTS[1]), "Row 1, slot 3: -1 is not an expert number"),
        ('{"physical_to_logical_map": [[0, 1, 2]], "physical_to_logical_map": 1}', "occurs twice"),
        (vllm(version=2), "and version 1, got .* and 2"),
        (vllm(num_slots=5), "are 5 and 1, but its layers have 4 slots and 1 redundant"),
        (vllm(num_redundant_experts=2), "are 4 and 2, but"),
        (vllm(initial_global_assignments={"1": SLOTS[0], "2": SLOTS[1]}), "numbered 0 to 1 among"),
        (
            vllm(initial_global_assignments={"0": SLOTS[0]}),
            "1 layers, but the model has 2 with routed",
        ),
        (ascend([[0, 1], [2, 2]], [[0, 1], [2, 0]]), "device 1 holds expert 2 twice"),
        (ascend([[0, 1], [2]], [[0, 1], [2, 0]]), "has 1 experts and another 2"),
        (ascend([[0], [1], [2]], [[0], [1], [2]]), r"for \[3\] devices, but there are 2"),
        ("Expert,Node\n0,1\n0,1\n", "Line 3 repeats expert 0 on node 1"),
        ("Expert,Node\n0,1\n1,x\n", "Line 3 must be two whole numbers, got '1,x'"),
        ("Expert,Node\n0,1\n1,0\n", "which do not make whole layers of 3"),
        ("Expert,Device\n0,1\n", "first line must be Expert,Node"),
        ('{"layers": []}', "Its keys are not those of any known plan: 'layers'"),
        ("[1]", "must be a JSON or YAML object"),
        ("{", "neither JSON nor a table"),
    ],
)
def test_what_an_engine_would_refuse(text: str, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        parse_text(text, FACTS)


def test_yaml_that_the_engine_would_refuse() -> None:
    for changes, message in (
        ({"num_slots": [4]}, r"num_slots is \[4\], but its layers"),
        ({"num_slots": 5}, r"num_slots is 5, but its layers have \[4\] slots"),
        ({"initial_global_assignments": {0: SLOTS[0]}}, r"missing \(\[1, 2\]\)"),
        ({"initial_global_assignments": {"a": [0]}}, "must be layer numbers, got 'a'"),
        ({"layer_updates_per_iter": -1}, "must be a whole number, 0 or more, got -1"),
        ({"ep_size": 2}, r"unknown \(\['ep_size'\]\)"),
    ):
        with pytest.raises(PlacementError, match=message):
            parse_content(trtllm(**changes), FACTS)


def test_yaml_keys_may_be_anything() -> None:
    """A plan that a person rewrote in YAML may have layer numbers that are numbers."""
    ours = {"format": "moe-serve placement", "version": 1, "num_ranks": 2, "num_experts": 3}
    record = json.loads(vllm())
    assignments = record["initial_global_assignments"]
    for content, message in (
        ({**ours, "layers": {1: [[0], [1], [1]]}}, "layer numbers as text, got '1'"),
        ({**ours, "layers": {None: []}}, "layer numbers as text, got 'None'"),
        ({**ours, "layers": {}, 7: 1, None: 2}, r"unknown \(\['7', 'None'\]\)"),
        ({**record, "initial_global_assignments": {**assignments, 7: 0}}, r"\['0', '1', '7'\]"),
    ):
        with pytest.raises(PlacementError, match=message):
            parse_content(content, FACTS)


def test_a_model_without_experts_has_no_plan() -> None:
    nothing = PlanFacts(layers=(), num_layers=3, num_devices=2)
    for text in (sglang(), vllm(), ascend()):
        with pytest.raises(PlacementError, match="layers is empty|has no layers|has 0 with routed"):
            parse_text(text, nothing)


def test_slots_that_do_not_divide() -> None:
    facts = PlanFacts(num_devices=3)
    with pytest.raises(PlacementError, match="4 slots of a layer .* over 3 devices: 1 are left"):
        parse_text(vllm(), facts)
    with pytest.raises(PlacementError, match="does not state its number of devices"):
        parse_text(vllm(), PlanFacts())


@pytest.mark.parametrize("name", ["sglang", "vllm", "trtllm", "ascend"])
def test_unequal_slots_are_said(name: str) -> None:
    uneven = Placement(num_ranks=2, num_experts=3, ranks_of={1: ((0,), (0,), (1,)), 2: RANKS[1]})
    with pytest.raises(PlacementError, match="has 1 copies of experts on one device and 2 on"):
        render_plan(name, uneven, FACTS)


def test_what_only_the_model_says() -> None:
    plan = Placement(num_ranks=2, num_experts=3, ranks_of={1: RANKS[0], 2: RANKS[1]})
    with pytest.raises(PlacementError, match="SGLang needs a row for every layer of the model"):
        render_plan("sglang", plan, PlanFacts(layers=(1, 2)))
    with pytest.raises(PlacementError, match="TensorRT-LLM uses the model's layer numbers"):
        render_plan("trtllm", plan, PlanFacts())
    with pytest.raises(PlacementError, match="format must be one of .* got 'tensorrt'"):
        render_plan("tensorrt", plan, FACTS)


def test_a_small_file_is_no_large_plan() -> None:
    content = {
        "format": "moe-serve placement",
        "version": 1,
        "num_ranks": 10**9,
        "num_experts": 1,
        "layers": {"0": [[0]]},
    }
    with pytest.raises(PlacementError, match="1 layers of 1 experts on 1000000000 devices exceed"):
        parse_text(json.dumps(content), PlanFacts())
    with pytest.raises(PlacementError, match="on 100000001 devices exceed"):
        parse_text("Expert,Node\n0,1\n1,2\n2,100000000\n", PlanFacts(num_experts=3))


SHAPES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["0", "1", "layer_id", "device_list", "x"]), inner)
    ),
    max_leaves=12,
)
KEYS = (
    ("physical_to_logical_map",),
    ("record_type", "version", "num_redundant_experts", "num_slots", "initial_global_assignments"),
    ("num_slots", "initial_global_assignments", "layer_updates_per_iter"),
    ("moe_layer_count", "layer_list"),
)


@settings(max_examples=40)
@given(keys=st.sampled_from(KEYS), data=st.data())
def test_anything_else_is_one_sentence(keys: tuple[str, ...], data: st.DataObject) -> None:
    content = {key: data.draw(SHAPES, label=key) for key in keys}
    with pytest.raises(PlacementError, match=r"\S.*[.\]]$"):
        parse_content(content, FACTS)
