"""The file of a trace reads back, and a damaged one gives one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from routing_predictor.traces.routing_error import TraceError
from routing_predictor.traces.trace import RoutingTrace
from routing_predictor.traces.trace_file import join_traces, read_trace, read_traces, write_trace
from tests.support.routing.traces import make_trace, same


@pytest.mark.parametrize(
    "trace",
    [
        make_trace(recording="abc"),
        make_trace(is_full=False),
        make_trace(num_experts=300),
        make_trace().select(slice(0, 0)),
    ],
)
def test_round_trip(tmp_path: Path, trace: RoutingTrace) -> None:
    path = tmp_path / "trace.safetensors"
    assert write_trace(trace, path) == path.stat().st_size
    assert same(read_trace(path), trace)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.safetensors"], "nothing is left"


def test_any_cut_is_said(tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    write_trace(make_trace(), path)
    content = path.read_bytes()
    for length in (0, 3, 9, len(content) // 3, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(TraceError, match="cannot be read as a safetensors file"):
            read_trace(path)


def rewritten(
    path: Path, tensors: dict[str, object], facts: object, metadata: dict[str, str]
) -> None:
    """Returns the file with other tensors and facts."""
    content = path.read_bytes()
    head = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    kept = {k: v for k, v in (load(content) | tensors).items() if v is not None}
    changed = head | ({} if facts is None else {"facts": json.dumps(facts)}) | metadata
    path.write_bytes(save(kept, changed))


GOOD = {
    "num_experts": 8, "layers": [1, 3], "request_ids": ["a", "b", "c", "d"], "labels": [],
    "model": "", "model_identity": "", "placement_version": "", "recording": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "facts", "metadata", "message"),
    [
        ({}, None, {"format": "a cake"}, "is not a moe-serve routing trace, but a cake"),
        ({}, None, {"version": "2"}, "has version 2 of its format, but only version 1 can be read"),
        ({}, None, {"facts": "{"}, "its metadata is not JSON"),
        ({}, [1], {}, "its metadata is not a JSON object"),
        ({}, GOOD | {"num_experts": True}, {}, "num_experts must be a count, got True"),
        ({}, GOOD | {"num_experts": 3}, {}, "expert ids must be 0 to 2, got 0 to 7"),
        ({}, GOOD | {"layers": [1]}, {}, "expert ids of 2 layers, but 1 layer numbers"),
        ({}, GOOD | {"layers": ["x", 1]}, {}, "a value that is not a layer number"),
        ({}, GOOD | {"request_ids": ["a"]}, {}, "tokens belong to 4 requests, but 1 request ids"),
        ({}, GOOD | {"labels": ["a"]}, {}, "1 labels for 4 requests"),
        ({}, GOOD | {"labels": [1]}, {}, "labels holds something that is not text"),
        ({"expert_ids": None}, None, {}, "the tensor expert_ids is missing"),
        ({"position": np.zeros(3, np.int32)}, None, {}, "position_N has the shape"),
        (
            {"phase": np.zeros((24, 1), np.uint8)},
            None,
            {},
            "phase has an invalid dtype or shape, uint8",
        ),
        ({"phase": np.full(24, 2, np.uint8)}, None, {}, "or 1 .a generated token., got 2 to 2"),
        ({"phase": np.full(24, 256, np.int32)}, None, {}, "got 256 to 256"),
        ({"position": np.arange(24)[::-1].copy()}, None, {}, "'r0' has position 22 after 23"),
        ({"position": np.zeros(24, np.int32)}, None, {}, "position 0 after 0; the positions"),
    ],
)
def test_damage_is_said(
    tmp_path: Path,
    tensors: dict[str, object],
    facts: object,
    metadata: dict[str, str],
    message: str,
) -> None:
    path = tmp_path / "trace.safetensors"
    write_trace(make_trace(), path)
    rewritten(path, tensors, facts, metadata)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        read_trace(tmp_path / "nothing")
    with pytest.raises(TraceError, match="is a folder"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="contains no recording"):
        read_traces([tmp_path])
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace(make_trace(), tmp_path / "none" / "trace.safetensors")


def test_parts_of_a_recording_are_one_trace(tmp_path: Path) -> None:
    whole = make_trace(recording="abc")
    order = np.argsort(whole.position_N, kind="stable")  # as steps record: requests in turn
    whole = whole.select(order)
    for number, part in enumerate(np.array_split(np.arange(24), 3)):
        write_trace(whole.select(part), tmp_path / f"part-{number:06}.safetensors")
    assert same(read_traces([tmp_path]), whole)


def test_recordings_are_not_mixed_up() -> None:
    one, other = make_trace(recording="x"), make_trace(recording="y", seed=1)
    joined = join_traces([one, other])
    assert joined.num_tokens == 48
    assert joined.request_ids == tuple(f"{n}:r{i}" for n in "xy" for i in range(4))
    assert joined.labels == ("a", "b") * 4
    assert np.array_equal(joined.request_N[24:], other.request_N + 4)
    nameless = join_traces([make_trace(), make_trace()])
    assert len(nameless.request_ids) == 8, "files of no recording have requests of their own"


def test_what_not_all_have_is_left_out() -> None:
    joined = join_traces([make_trace(), make_trace(is_full=False)])
    assert joined.token_N is None and joined.weights_NLK is None
    assert joined.labels == ("a", "b", "a", "b", "", "", "", "")


def test_adapters_of_requests_are_kept(tmp_path: Path) -> None:
    one = replace(make_trace(), adapters=("", "sql@00ff", "", "sql@00ff"))
    write_trace(one, tmp_path / "one.safetensors")
    assert read_trace(tmp_path / "one.safetensors").adapters == one.adapters
    assert join_traces([one, make_trace()]).adapters == (*one.adapters, "", "", "", "")
    write_trace(make_trace(), tmp_path / "old.safetensors")  # as before there were adapters
    assert b"adapters" not in (tmp_path / "old.safetensors").read_bytes()
    assert read_trace(tmp_path / "old.safetensors").adapters == ()
    with pytest.raises(TraceError, match="1 adapters for 4 requests"):
        replace(one, adapters=("sql",))


def test_traces_of_different_models_are_not_joined() -> None:
    with pytest.raises(TraceError, match="num_experts 8 and 16 cannot be joined"):
        join_traces([make_trace(), make_trace(num_experts=16)])
    with pytest.raises(TraceError, match="model_identity '00ff' and '11' cannot be joined"):
        join_traces([make_trace(), replace(make_trace(), model_identity="11")])
