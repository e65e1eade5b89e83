"""The benchmarks `gpu_engine` and `gpu_all` run without a GPU and keep their results."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_bench import gpu_all, gpu_engine
from gpu_bench.gpu_all import Piece, Record
from gpu_bench.job import ENTRANTS, Job, Outcome, entrant_of
from gpu_bench.model import (
    EXPERT_FORMATS,
    RandomWeights,
    model_names,
    model_size,
    stored_weights,
    write_model,
)
from gpu_bench.report import ModelReport, figures_of
from gpu_bench.worker import run_job
from harness.machine import MachineLimits, roofline
from harness.work import Work

CPU = torch.device("cpu")
QWEN = "Qwen3-30B-A3B"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder, QWEN, is_tiny=True)
    return folder


def test_tiny_engines_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """moe-serve in floats and packed, and transformers, give the same tokens; the result file
    grows."""
    path = tmp_path / "engine.json"
    names = ["moe-serve", "moe-serve fp8", "moe-serve int4", "transformers grouped_mm"]

    def measure(*entrants: str) -> dict[str, dict[str, dict[str, object]]]:
        command = ["gpu_engine.py", "--tiny", "--device", "cpu", "--json", str(path)]
        monkeypatch.setattr(sys, "argv", [*command, "--entrants", *entrants])
        assert gpu_engine.main() == 0
        found: dict[str, dict[str, dict[str, object]]] = json.loads(path.read_text("utf-8"))[
            "models"
        ][f"{QWEN} (tiny)"]["entrants"]
        return found

    measure(*names[:3])
    found = measure(*names)
    assert list(found) == names, f"measured {list(found)}"
    for name, entry in found.items():
        outcome = entry["outcome"]
        assert isinstance(outcome, dict)
        assert outcome["is_done"] and not outcome["failures"], f"{name}: {outcome}"
    shown = capsys.readouterr()
    assert "transformers grouped_mm: the first 4 of 4 tokens are those of moe-serve" in shown.out
    assert "moe-serve int4: measured before" in shown.err, "it was there"
    assert "experts int4 groups of 128 packed" in str(found["moe-serve int4"]["outcome"])


def test_a_process_of_its_own_answers_or_says_why_not(tiny: Path) -> None:
    job = tiny_job(tiny, "moe-serve")
    outcome = gpu_engine.run_apart(job, tiny, 100.0)
    assert outcome.is_done and set(outcome.samples_s) == {k.name for k in job.work.kinds()}
    late = gpu_engine.run_apart(job, tiny, 0.0)
    assert late.error == "nothing was measured in 0 s" and not late.is_done


def tiny_job(folder: Path, entrant: str) -> Job:
    return Job(
        entrant=entrant_of(entrant),
        folder=str(folder),
        device="cpu",
        dtype="float32",
        vocab_size=256,
        num_bytes=1.0,
        max_batched_tokens=64,
        work=Work(
            single_prompt=8, single_output=2, batch_size=2, batch_prompt=8, batch_output=2,
            prefill_prompt=9, repeat=1,
        ),
    )  # fmt: skip


def test_what_is_missing_is_said_in_one_line(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = run_job(tiny_job(tiny, "transformers grouped_mm"), lambda _: None)
    assert outcome.error == "transformers is not installed here" and not outcome.is_done
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (2**30, 2**31))
    job = replace(tiny_job(tiny, "moe-serve"), device="cuda", num_bytes=3.0 * 2**30)
    said = run_job(job, lambda _: None).error
    assert said.startswith("the weights take 3.0 GiB, and the device has 1.0 GiB free"), said


def test_a_weight_depends_on_its_name_alone() -> None:
    one, other = (RandomWeights(CPU, torch.bfloat16, 4) for _ in range(2))
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    want = one.read(name, (32, 64), torch.bfloat16)
    one.read("model.norm.weight", (64,), torch.bfloat16)
    assert torch.equal(other.read(name, (32, 64), torch.float32), want.float()), "dtype or order"
    assert not torch.equal(other.read(name.replace("1", "2"), (32, 64), torch.bfloat16), want)
    fused = one.read("x.experts.gate_up_proj", (3, 8, 16), torch.float32)
    assert torch.equal(one.read("x.experts.gate_up_proj", (3, 8, 16), torch.float32, 2), fused[2])


@pytest.mark.parametrize("name", EXPERT_FORMATS)
def test_packed_weights_have_the_scale_of_floats(name: str) -> None:
    """1 / sqrt(K), to a tenth (mxfp4: scales are powers of two)."""
    weights = RandomWeights(CPU, torch.float32, 4, name)
    stored = "model.layers.0.mlp.experts.1.up_proj.weight"
    matrix = weights.read_packed(stored, (128, 256))
    assert matrix.form == weights.form(stored, (128, 256)), "another form than said"
    std = matrix.dequantised(torch.float32).std().item() * 16
    low, high = (0.65, 1.45) if name == "mxfp4" else (0.9, 1.1)
    assert low < std < high, f"{name}: {std} times what it should be"
    assert weights.form("model.layers.0.self_attn.q_proj.weight", (8, 8)) is None


def test_every_format_is_as_small_as_the_kernels_hold_it() -> None:
    from_matrix = pytest.importorskip("moe_kernels.gpu.grouped_gemm.from_matrix")
    for name, made in EXPERT_FORMATS.items():
        layout = from_matrix.layout_of(made.form)
        assert abs(layout.bits - made.bits) < 0.01, f"{name}: {layout}"


def test_sizes_and_limits_of_a_large_model(tmp_path: Path) -> None:
    """Qwen3-30B-A3B by hand: 48 layers of 128 experts of 3 x 2048 x 768; no weights are made."""
    write_model(tmp_path, QWEN, is_tiny=False)
    size = model_size(tmp_path, "bfloat16")
    assert size.expert == 3 * 2048 * 768 and size.head == 151936 * 2048
    assert 30.4e9 < size.num_parameters < 30.7e9, f"{size.num_parameters}"
    assert size.kv_width == 2 * 4 * 128
    machine = MachineLimits(
        num_threads=0, read_gb_s=4800.0, gemm_bf16_gflop_s=8e5, gemm_fp32_gflop_s=8e5
    )
    work = gpu_engine._WORK
    floats = roofline(machine, size, work).single_decode_tok_s
    packed = roofline(machine, model_size(tmp_path, "bfloat16", 4.125), work).single_decode_tok_s
    assert 750 < floats < 850, f"3 B activated weights of 2 bytes at 4.8 TB/s: {floats}"
    assert 1.5 < packed / floats < 3.0, "attention and head stay in floats"


def test_other_families_have_a_size(tmp_path: Path) -> None:
    for name in (
        "Mixtral-8x7B-Instruct-v0.1",
        "OLMoE-1B-7B-0924",
        "gpt-oss-20b",
        "DeepSeek-V2-Lite",
    ):
        assert name in model_names(), f"{name} has no config"
        write_model(tmp_path, name, is_tiny=False)
        assert stored_weights(tmp_path), f"{name} has no weights"
        assert model_size(tmp_path, "bfloat16").num_parameters > 1e9, f"{name} is too small"


def test_verdicts(tmp_path: Path) -> None:
    """The bars are 80 of 100 tokens per second, and four times and twice the peer."""
    work = Work(single_output=81, batch_size=2, batch_output=41)
    report = ModelReport(
        model="m", dtype="d", work=work, device="x", environment={}, machine={}
    )  # fmt: skip
    for name, factor in (("moe-serve", 1.0), ("transformers grouped_mm", 4.0)):
        report.outcomes[name] = Outcome(
            samples_s={
                "ttft": [0.5],
                "single": [0.5 + factor],
                "batch_first": [1.0],
                "batch": [1.0 + factor / (1.0 if factor == 1.0 else 2.0)],
            },
            failures={"prefill": "no memory"},
            is_done=True,
        )
        report.limits[name] = dict.fromkeys(
            ("single_decode_tok_s", "batch_decode_tok_s", "batch_total_tok_s", "prefill_tok_s"),
            100.0,
        )
    figures = figures_of(report.outcomes["moe-serve"], work)
    assert figures.single_decode_tok_s == pytest.approx(80) and figures.prefill_tok_s is None
    assert list(report.verdicts().values()) == [
        "met (0.80 of the limit)",
        "met (4.00 x of it)",
        "met (0.80 of the limit)",
        "missed (2.00 x of it)",
    ]
    report.write(tmp_path / "engine.json")
    other = replace(report, outcomes={}, limits={})
    other.merge(tmp_path / "engine.json")
    assert other == report, "what was written is read"
    replace(report, model="n").write(tmp_path / "engine.json")
    assert set(json.loads((tmp_path / "engine.json").read_text())["models"]) == {"m", "n"}


class TestPieces:
    def test_order(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["gpu_all.py", "--list"])
        assert gpu_all.main() == 0
        shown = capsys.readouterr().out.splitlines()
        assert shown[0].startswith("tests: test_graphed_steps"), shown[0]
        parts = list(dict.fromkeys(line.split(":")[0] for line in shown))
        assert parts == ["tests", "tuning", "kernels", "engine"], parts
        names = [piece.name for piece in gpu_all.all_pieces()]
        assert len(names) == len(set(names)), "records go by name"
        assert {piece.part for piece in gpu_all.all_pieces()} == set(parts)
        assert len(ENTRANTS) >= sum(name.startswith("engine") for name in names) > 3

    def test_each_is_run_once_and_a_cut_one_again(self, tmp_path: Path) -> None:
        slow = "import time; print('begun', flush=True); time.sleep(60)"
        pieces = [
            Piece(name="tests: slow", part="tests", command=("-c", slow), limit_s=0.5),
            Piece(name="tests: good", part="tests", command=("-c", "print('1 passed')")),
            Piece(name="tests: bad", part="tests", command=("-c", "raise SystemExit('no')")),
            Piece(name="tests: bare", part="tests", command=("-c", ""), needs=("no_such_package",)),
        ]
        assert gpu_all.run(pieces, tmp_path, None, is_again=False) == 1, "one failed"
        path = tmp_path / "progress.json"
        records = gpu_all.read_records(path)
        assert [records[piece.name].state for piece in pieces] == [
            "cut", "done", "failed", "left out"
        ]  # fmt: skip
        assert records["tests: good"].last_line == "1 passed"
        assert records["tests: bad"].last_line == "no"
        assert "no_such_package missing" in records["tests: bare"].last_line
        turn = gpu_all.in_turn(pieces, records, is_again=False)
        assert [piece.name for piece in turn] == ["tests: bare", "tests: slow"]
        assert gpu_all.run(pieces, tmp_path, 0.0, is_again=True) == 1, "no time: nothing is run"
        assert gpu_all.read_records(path) == records

    def test_without_a_gpu_it_says_so(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["gpu_all.py"])
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        assert gpu_all.main() == 1
        assert "no CUDA GPU" in capsys.readouterr().err
        assert Record(state="done", seconds=0.0, last_line="").state == "done"
