"""Files as other engines and scripts write them, read as traces and loads."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from routing_predictor.importers.importer import detect, import_files
from routing_predictor.importers.tables import ImportOptions
from routing_predictor.traces.load_file import RecordedLoad, read_load, write_load
from routing_predictor.traces.routing_error import TraceError
from routing_predictor.traces.trace import DECODE, PREFILL, RoutingTrace
from routing_predictor.traces.trace_stats import windows
from tests.support.routing.traces import make_trace

DATA = Path(__file__).parent / "data"
SLOTS = np.array([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2], [0, 1, 2, 3, 1, 1]])  # of 4 experts


def load(*paths: Path, kind: str = "auto", **options: object) -> RecordedLoad:
    found = import_files(paths, kind, ImportOptions(**options))  # type: ignore[arg-type]
    assert isinstance(found, RecordedLoad)
    return found


def trace(*paths: Path, kind: str = "auto", **options: object) -> RoutingTrace:
    found = import_files(paths, kind, ImportOptions(**options))  # type: ignore[arg-type]
    assert isinstance(found, RoutingTrace)
    return found


def by_expert(counts_P: np.ndarray, slots_P: np.ndarray) -> list[float]:
    return [float(counts_P[slots_P == expert].sum()) for expert in range(4)]


def test_sglang_stat() -> None:
    found = load(DATA / "sglang_stat.pt", model="m")
    assert found.layers == (1, 2, 3), "the dense layer is left out"
    assert found.source == "sglang" and found.model == "m"
    assert np.array_equal(found.counts_SLE, np.arange(72).reshape(3, 4, 6)[:, 1:])


def test_sglang_json(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"logical_count": [[1, 2], [0, 0], [3, 4]]}))
    found = load(path)
    assert found.layers == (0, 2) and found.counts_SLE.tolist() == [[[1, 2], [3, 4]]]


def test_sglang_per_pass_adds_up_ranks() -> None:
    found = load(DATA / "sglang_per_pass_0.pt", DATA / "sglang_per_pass_1.pt")
    assert found.layers == (1, 2) and found.counts_SLE.shape == (2, 2, 4)
    base = np.arange(18).reshape(3, 6)
    for step in (0, 1):
        both = base + 100 * step + (base + 100 * step + 1000)
        expected = [by_expert(both[layer], SLOTS[layer]) for layer in (1, 2)]
        assert found.counts_SLE[step].tolist() == expected


def test_sglang_per_token() -> None:
    """Two prompts of 3 and 2 tokens, then a token of each; layer 0 is dense, and k is 2 of 8."""
    found = trace(DATA / "sglang_per_token.pt")
    assert found.layers == (1, 2) and found.num_experts == 4 and found.top_k == 2
    assert found.request_ids == ("0-5-0", "0-5-1", "0-6-0", "0-6-1")
    assert found.request_N.tolist() == [0, 0, 0, 1, 1, 2, 3]
    assert found.position_N.tolist() == [0, 1, 2, 0, 1, 3, 2]
    assert found.phase_N.tolist() == [PREFILL] * 5 + [DECODE] * 2
    assert found.token_N is not None and found.token_N.tolist() == [7, 8, 9, 10, 11, 12, 13]
    for token, (start, place) in enumerate([(0, j) for j in range(5)] + [(3, 0), (3, 1)]):
        for row, layer in enumerate((1, 2)):
            slots = [(start + layer + place) % 6, (start + layer + place + 1) % 6]
            assert found.expert_ids_NLK[token, row].tolist() == SLOTS[layer, slots].tolist()


def test_sglang_answers(tmp_path: Path) -> None:
    parts = [np.arange(n * 6, dtype="<i4").reshape(n, 3, 2) % 8 for n in (4, 2)]
    entries: list[dict[str, object]] = [
        {
            "text": "one\u2028answer",
            "meta_info": {
                "routed_experts": base64.b64encode(p.tobytes()).decode(),
                "prompt_tokens": 3,
            },
        }
        for p in parts
    ]
    path = tmp_path / "answers.jsonl"
    lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
    path.write_text("\n".join(lines), encoding="utf-8")
    found = trace(path, num_layers=3, top_k=2)
    assert found.request_N.tolist() == [0, 0, 0, 0, 1, 1]
    assert found.phase_N.tolist() == [PREFILL] * 3 + [DECODE] + [PREFILL] * 2
    assert np.array_equal(found.expert_ids_NLK, np.concatenate(parts))
    with pytest.raises(TraceError, match="give --num-layers and --top-k"):
        trace(path)
    with pytest.raises(
        TraceError, match="96 bytes, which is not a multiple of int32 for 5 layers x 2 choices"
    ):
        trace(path, num_layers=5, top_k=2)
    (tmp_path / "none.json").write_text("[]")
    with pytest.raises(TraceError, match="the file contains no answers"):
        trace(tmp_path / "none.json", num_layers=3, top_k=2)
    none = base64.b64encode(np.array([3, -1], "<i4").tobytes()).decode()
    path.write_text(json.dumps({"meta_info": {"routed_experts": none}}))
    with pytest.raises(TraceError, match="expert ids must be 0 to 255, got -1 to 3"):
        trace(path, num_layers=1, top_k=2, num_experts=256)  # not expert 255


def test_vllm_lines(tmp_path: Path) -> None:
    counts = np.arange(18).reshape(3, 6)
    lines: list[dict[str, object]] = [{"record_type": "eplb_load_meta", "model": "m"}]
    for step in (7, 9):
        lines.append(
            {
                "record_type": "eplb_load_stats",
                "version": 1,
                "step": step,
                "num_ranks": 2,
                "expert_load": (counts * step).tolist(),
                "p2l_map": SLOTS.tolist(),
            }
        )
    path = tmp_path / "stats.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = load(path)
    assert found.layers == (0, 1, 2) and found.source == "vllm"
    for index, step in enumerate((7, 9)):
        expected = [by_expert(counts[layer] * step, SLOTS[layer]) for layer in range(3)]
        assert found.counts_SLE[index].tolist() == expected
    path.write_text(json.dumps(lines[1] | {"version": 2}))
    with pytest.raises(
        TraceError, match="version 2 of eplb_load_stats, but only version 1 can be read"
    ):
        load(path)


def test_vllm_snapshots(tmp_path: Path) -> None:
    counts = np.arange(18).reshape(3, 6)
    snapshot = {
        "step": 5,
        "window_expert_load": counts.tolist(),
        "latest_expert_load": counts.tolist(),
        "physical_to_logical_map": SLOTS.tolist(),
    }
    path = tmp_path / "dump.json"
    path.write_text(json.dumps({"model_name": "m", "snapshots": [snapshot]}))
    found = load(path)
    assert found.model == "m" and found.counts_SLE.sum() == counts.sum()


def test_trtllm(tmp_path: Path) -> None:
    (tmp_path / "meta_info.json").write_text(json.dumps({"num_experts": 4}))
    for rank in (0, 1):
        tensors = {
            f"{i}_{layer}": np.arange(4, dtype=np.int32) + i + layer
            for i in (100, 101)
            for layer in (3, 4)
            if (i, layer) != (101, 3)
        }
        save_file(tensors, tmp_path / f"rank{rank}.safetensors")
    save_file({"tokens": np.zeros(3)}, tmp_path / "rank0_raw.safetensors")
    found = load(tmp_path)
    assert found.layers == (3, 4)
    assert found.counts_SLE[0, 0].tolist() == [206, 208, 210, 212]
    assert found.counts_SLE[1].tolist() == [[0] * 4, [210, 212, 214, 216]]


def test_npz_with_samples(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    experts = rng.permuted(np.tile(np.arange(8), (6, 3, 1)), axis=2)[:, :, :2].astype(np.uint8)
    path = tmp_path / "tokens.npz"
    np.savez(
        path,
        experts=experts,
        pos=np.array([4, 5, 6, 0, 1, 2], np.int32),
        sample=np.array([0, 0, 0, 1, 1, 1], np.int32),
        sample_name=np.array(["math|True", "code|False"]),
    )
    found = trace(path, num_experts=8)
    assert found.request_ids == ("0", "1") and found.labels == ("math|True", "code|False")
    assert found.position_N.tolist() == [4, 5, 6, 0, 1, 2]
    assert np.array_equal(found.expert_ids_NLK, experts)
    names = np.array(["a|é".encode(), b"b"])
    np.savez(path, experts=experts[:2], sample=np.array([0, 1]), sample_name=names)
    assert trace(path).labels == ("a|é", "b"), "bytes are text, too"


def test_npz_and_npy_alone(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 300, (6, 3, 2))
    np.savez(tmp_path / "a.npz", routed_experts=ids)
    assert np.array_equal(trace(tmp_path / "a.npz", num_experts=300).expert_ids_NLK, ids)
    np.save(tmp_path / "b.npy", ids[:, :, 0])
    found = trace(tmp_path / "b.npy")
    assert found.top_k == 1 and np.array_equal(found.expert_ids_NLK[:, :, 0], ids[:, :, 0])


def test_npz_with_large_numbers(tmp_path: Path) -> None:
    path, ids = tmp_path / "a.npz", np.zeros((4, 2, 1), np.uint8)
    np.savez(path, ids=ids, sample=np.array([7, 7, 2**40, 2**40]))
    found = trace(path)
    assert found.request_ids == ("7", str(2**40)) and found.request_N.tolist() == [0, 0, 1, 1]
    assert found.position_N.tolist() == [0, 1, 0, 1]
    np.savez(path, ids=ids, pos=np.arange(4) + 2**32)
    with pytest.raises(
        TraceError, match="position must be below 2147483648 in a trace, got 4294967299"
    ):
        trace(path)


def test_an_object_array_is_refused(tmp_path: Path) -> None:
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (117 - len(header)) + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "a.npy").write_bytes(content + b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(TraceError, match="cannot be read as numpy arrays"):
        trace(tmp_path / "a.npy")


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("expert0,expert1,expert2\n1,2,3.5\n\n4,5,6\n")
    assert load(path).counts_SLE.tolist() == [[[1, 2, 3.5], [4, 5, 6]]]


def test_a_spreadsheets_csv_keeps_its_first_row(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_bytes(b"\xef\xbb\xbf1,2\n3,4\n")  # the mark is no word of a heading
    assert load(path).counts_SLE.tolist() == [[[1, 2], [3, 4]]]


def test_token_lines(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(8), (3, 2, 1)), axis=2)[:, :, :2]
    lines = [
        {"layer": (5, 9)[layer], "token_idx": token, "topk_ids": ids[token, layer].tolist()}
        for layer in range(2)
        for token in range(3)
    ]
    path = tmp_path / "tokens.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    found = trace(path)
    assert found.layers == (5, 9) and np.array_equal(found.expert_ids_NLK, ids)
    path.write_text("\n".join(map(json.dumps, lines[:-1])))
    with pytest.raises(TraceError, match="5 lines, but 3 tokens in 2 layers"):
        trace(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.json", "{}", "has no routed_experts|give --num-layers"),
        ("a.json", "[]", "give --num-layers"),
        ("a.json", '{"logical_count": [[1, "x"]]}', "is not a table of numbers"),
        ("a.json", '{"logical_count": [[0, 0]]}', "all counts are 0"),
        ("a.json", '{"logical_count": [[-1, 2]]}', "negative, not finite or above"),
        ("a.json", '{"snapshots": []}', "has no record of a load"),
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", "[1]", "is not a JSON object"),
        (
            "a.jsonl",
            '{"topk_ids": [1], "layer": "x", "token_idx": 0}',
            "layer and token_idx must be integers",
        ),
        ("a.jsonl", '{"topk_ids": [0.5], "layer": 0, "token_idx": 0}', "that is not an expert id"),
        ("a.csv", "1,2\n3\n", "row 2 must have 2 counts"),
        ("a.csv", "layer\n", "has no rows of counts"),
        ("a.npz", "no", "cannot be read as numpy arrays"),
        ("a.txt", "", "its format is not known from its name"),
        ("a.pt", "", "is not a zip"),
        ("a.json", f'{{"logical_count": [[{10**400}]]}}', "is not a table of numbers"),
        ("a.jsonl", '{"record_type": "eplb_load_stats", "version": [1]}', r"version \[1\] of"),
        (
            "a.json",
            '{"records": [{"forward_pass_id": 1, "global_physical_count": [[1]]}], '
            '"last_physical_to_logical_map": [[1000000000]]}',
            "a trace can have at most 32768 experts, got 1000000001",
        ),
        (
            "a.jsonl",
            f'{{"topk_ids": [1], "layer": 0, "token_idx": {2**31}}}',
            "layer and token_idx must be integers",
        ),
        ("a.csv", "x,y\n" + "9" * 200_000, "is not valid CSV: field larger"),
        (
            "a.json",
            '{"logical_count": [[1, "2"]]}',
            r'not a table of numbers: it has "2" at \[0, 1\]',
        ),
        (
            "a.json",
            '{"logical_count": [["1", "2"]]}',
            r'has "1" at \[0, 0\]; write numbers without',
        ),
        ("a.json", '{"logical_count": [[1, true]]}', r"has true at \[0, 1\]"),
        ("a.json", '{"logical_count": [[1, null]]}', "has NoneType"),
        ("a.json", '{"logical_count": [[1e308, 1e308]]}', r"above 2\^53; the first is 1e\+308"),
        (
            "a.json",
            '{"snapshots": [{"window_expert_load": [[1e308, 1e308]], '
            '"physical_to_logical_map": [[0, 0]]}]}',
            r"above 2\^53; the first is inf",
        ),
        ("a.json", '{"snapshots": [{"window_expert_load": [[1, "2"]]}]}', 'has "2"'),
        ("a.jsonl", '{"topk_ids": ["1", 2], "layer": 0, "token_idx": 0}', 'has "1"'),
        ("a.jsonl", '{"topk_ids": [true, 2], "layer": 0, "token_idx": 0}', "has true"),
        (
            "a.jsonl",
            '{"topk_ids": [3, 3], "layer": 7, "token_idx": 0}',
            "expert 3 twice in layer 7",
        ),
        ("a.csv", '1,2\n3,"4"\n', "row 2 has a value in quotes"),
        ("a.csv", "1,2\n3,x\n", "row 2 has 'x', which is not a count"),
        ("a.csv", "layer,2\n3,4\n", "row 1 has 'layer', which is not a count"),
        ("a.csv", "1,1_0\n", "row 1 has '1_0', which is not a count"),
        ("a.csv", "1,\n", "row 1 has '', which is not a count"),
    ],
)
def test_mistakes_are_sentences(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(TraceError, match=message):
        import_files([tmp_path / name], "auto", ImportOptions())


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        detect(tmp_path / "none")
    with pytest.raises(TraceError, match="tiff is not a known format: use auto, sglang, vllm"):
        import_files([tmp_path], "tiff", ImportOptions())
    with pytest.raises(TraceError, match="a slot holds expert 3, but there are 2 experts"):
        load(DATA / "sglang_per_pass_0.pt", num_experts=2)
    with pytest.raises(TraceError, match="expert ids must be 0 to 1, got 0 to 3"):
        trace(DATA / "sglang_per_token.pt", num_experts=2)


def test_a_load_survives_its_file(tmp_path: Path) -> None:
    trace_of = make_trace()
    counts_SLE = windows(trace_of, 3).astype(np.float64)
    whole = RecordedLoad(
        counts_SLE=counts_SLE, layers=trace_of.layers, source="trace", model="tiny"
    )
    assert np.array_equal(whole.total(), trace_of.load())
    path = tmp_path / "load.safetensors"
    write_load(whole, path)
    found = read_load(path)
    assert np.array_equal(found.counts_SLE, whole.counts_SLE)
    assert (found.layers, found.source, found.model) == ((1, 3), "trace", "tiny")
    with pytest.raises(TraceError, match="shape"):
        RecordedLoad(counts_SLE=np.zeros((1, 2, 0)), layers=(0, 1))
