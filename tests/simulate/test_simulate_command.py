"""`moe-serve simulate`: reports as of `bench`, the same for the same seed, and mistakes."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from moe_serve import __version__
from moe_serve.bench import plan_loads
from moe_serve.bench.report.report import Report, read_report
from moe_serve.cli.main import main
from moe_serve.pipeline.costs.whole_step import LayoutStep, WholeStep
from moe_serve.planning.calibration_file import Calibration, write_calibration
from tests.support.cluster.calibrations import cpu_calibration

Capture = pytest.CaptureFixture[str]
QWEN = ("--model", "qwen3-235b", "--precision", "fp8", "--device", "h100", "--devices", "8")
SMALL = ("--requests", "12", "--prompt-tokens", "50:200", "--output-tokens", "4:9")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["simulate", *arguments])
    return int(caught.value.code or 0)


def report_of(path: Path, *arguments: str) -> Report:
    assert run(*arguments, "--json", str(path)) == 0
    return read_report(path)


def here(path: Path, calibration: Calibration | None = None, **changes: str) -> str:
    """Writes a calibration that passes as one of this machine."""
    calibration = calibration or cpu_calibration()
    facts = {
        "host": f"{platform.system()} {platform.machine()}",
        "moe_serve": __version__,
    } | changes
    machine = replace(calibration.machine, **facts)  # type: ignore[arg-type]
    write_calibration(replace(calibration, machine=machine), path)
    return str(path)


def test_a_report_like_that_of_bench(tmp_path: Path, capsys: Capture) -> None:
    slo = ("--slo", "ttft=1s,tpot=50ms")
    closed = report_of(tmp_path / "a.json", *QWEN, *SMALL, "--concurrency", "4", *slo)
    again = report_of(tmp_path / "b.json", *QWEN, *SMALL, "--concurrency", "4", *slo)
    assert closed == again
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    s = closed.summary
    assert (s.num_ok, s.num_failed, s.peak_in_flight) == (12, 0, 4)
    assert s.output_tokens == s.wanted_tokens > 0
    assert s.ttft_ms is not None and s.tpot_ms is not None and s.ttft_ms.p99 > s.tpot_ms.p50 > 0
    assert s.goodput is not None and s.goodput.share == 1
    split = report_of(tmp_path / "c.json", *QWEN, *SMALL, "--rate", "20", "--layout", "2A6E", *slo)
    assert split.is_open and split.server is not None and split.server.steps_by_micro_batches
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "c.json")])
    assert not caught.value.code
    table = capsys.readouterr().out
    assert "output tokens/s" in table and "the runs differ in layout: colocated, 2A6E" in table


def test_cells_with_roles_and_their_number(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_loads, "_REQUESTS", 4)
    model = ("--model", "qwen3-30b", "--precision", "fp8", "--device", "h100")
    cells = ("--cells", "1x(1A1E prefill) 1x(1D decode)", "--hand-over", "always")
    load = ("--requests", "8", "--rate", "10", "--prompt-tokens", "900", "--output-tokens", "9")
    roles = report_of(tmp_path / "a.json", *model, *cells, *load, "--page-link", "20")
    assert roles.cells is not None and roles.summary.num_ok == 8
    assert [cell.num_devices for cell in roles.cells.cells] == [2, 1]
    assert roles.cells.num_hand_overs > 0 and roles.cells.scale is None
    assert "after prompts" in capsys.readouterr().out
    scale = (
        "--autoscale",
        "planned",
        "--scale-every",
        "1",
        "--cell-start",
        "1",
        "--max-cells",
        "2",
    )
    wave = ("--swing", "0.5", "--period", "4", "--slo", "ttft=1s,tpot=50ms")
    scaled = report_of(tmp_path / "b.json", *model, "--cells", "(1D)", *load, *scale, *wave)
    assert scaled.cells is not None and scaled.cells.scale is not None
    assert scaled.cells.scale.policy == "planned" and scaled.cells.scale.share <= 1
    capsys.readouterr()
    target = (*model, "--cells", "(1D)", *load, *scale[:1], "target", *scale[2:], *wave)
    assert run(*target) == 0
    assert "2 cells keep ttft 1000 ms, tpot 50 ms with up to 0." in " ".join(
        capsys.readouterr().err.split()
    )
    for arguments, message in (
        (("--cells", "(1D)", "--devices", "2"), "leave --devices out: --cells states"),
        (
            ("--cells", "(1D)", "--autoscale", "target", "--load", "2", "--trace", "T"),
            "--load is a share of the capacity of a fixed number of cells: leave --autoscale out",
        ),
        (("--cells", "(1D prefill)"), "has cells with the role prefill and none with the role"),
        (("--cells", "(3D tp2)"), "3 devices do not divide into attention ranks of 2"),
        (("--min-cells", "2"), "--min-cells belongs to --cells LAYOUT"),
        (("--cells", "(1D)", "--min-cells", "2"), "--min-cells belongs to --autoscale"),
        (("--cells", "(1D)", "--autoscale", "oracle"), "--autoscale oracle plans for limits"),
        (("--swing", "0.5"), "--swing only applies to --rate"),
    ):
        assert run(*model, *arguments, "--concurrency", "1") == 2, arguments
        assert message in capsys.readouterr().err.splitlines()[-1], arguments
    empty = ("--cells", "(1D)", "--autoscale", "target", "--slo", "ttft=1s", "--duration", "1")
    assert run(*model, *empty, "--rate", "0.001") == 2
    assert "the workload has no requests" in capsys.readouterr().err


def test_prefixes_of_a_trace_are_found(tmp_path: Path) -> None:
    """Blocks 1 and 2 come again in the second request, 1 024 of its 1 200 tokens."""
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 3]},
        {"timestamp": 500, "input_length": 1200, "output_length": 3, "hash_ids": [1, 2, 4]},
    ]
    trace.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    report = report_of(tmp_path / "r.json", *QWEN, "--trace", str(trace), "--layout", "colocated",
                       "--tensor-shards", "8", "--save-requests")  # fmt: skip
    cached = [record.cached_tokens for record in report.records]
    assert cached[0] in (0, None) and cached[1] == 1024
    assert report.records[1].scheduled_s == 0.5


def test_a_timeline_has_the_steps_and_requests(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    report = report_of(tmp_path / "a.json", *QWEN, *SMALL, "--layout", "colocated",
                       "--tensor-shards", "8", "--timeline", str(path))  # fmt: skip
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    steps = [event for event in events if event["name"] == "step"]
    assert report.server is not None and len(steps) == report.server.num_steps
    for before, after in zip(steps, steps[1:], strict=False):
        assert before["ts"] + before["dur"] <= after["ts"] + 0.01
    assert sum(event["ph"] == "b" for event in events) == 2 * 12
    assert max(e["ts"] for e in events if e["ph"] == "e") == pytest.approx(
        1e6 * report.summary.duration_s, rel=1e-6
    )


def test_a_calibration_in_place_of_a_device(tmp_path: Path) -> None:
    calibration = here(tmp_path / "here.json")
    whole = report_of(tmp_path / "a.json", "--calibration", calibration, *SMALL)
    split = report_of(
        tmp_path / "b.json", "--calibration", calibration, *SMALL, "--devices", "3",
        "--layout", "1A2E",
    )  # fmt: skip
    assert whole.model == split.model == "made-up"
    assert whole.summary.output_tokens == split.summary.output_tokens


def test_a_calibration_has_the_pages_of_a_server(tmp_path: Path) -> None:
    """A server's KV cache holds half of its sequences at the model's whole context. With as much,
    short requests are never preempted; one whose limit is the longest request has to."""
    calibration = here(tmp_path / "here.json")
    load = ("--requests", "24", "--prompt-tokens", "200", "--output-tokens", "60", "--seed", "2")
    flags = ("--calibration", calibration, *load, "--max-num-seqs", "8")
    default = report_of(tmp_path / "a.json", *flags)
    small = report_of(tmp_path / "b.json", *flags, "--max-model-len", "260")
    assert default.server is not None and default.server.num_preemptions == 0
    assert small.server is not None and small.server.num_preemptions > 0


def test_cells_of_measured_layouts_share_the_machine(tmp_path: Path, capsys: Capture) -> None:
    """Two cells that each take 0.8 of the machine are slower on one than on two machines. What was
    not measured is refused, with the command that measures it."""
    calibration, whole = cpu_calibration(), WholeStep(
        alpha_s=5e-3, row_s=1e-4, kv_token_s=0.0, pair_s=0.0, expert_s=0.0, sequence_s=0.0
    )  # fmt: skip
    step = LayoutStep(
        attention_ranks=1, expert_ranks=1, attention_tp=1, machine_share=0.8, whole=whole
    )
    costs = replace(calibration.costs, layouts=(step,))
    file = here(tmp_path / "here.json", replace(calibration, costs=costs))
    given = ("--calibration", file, *SMALL, "--concurrency", "4")
    cells = (*given, "--cells", "2x(1A1E)")
    shared = report_of(tmp_path / "a.json", *cells).summary.tpot_ms
    own = report_of(tmp_path / "b.json", *cells, "--own-machines").summary.tpot_ms
    assert shared is not None and own is not None
    assert shared.mean == pytest.approx(1.6 * own.mean, rel=0.1)
    for arguments, message in (
        (
            ("--cells", "1x(1A1E) 1x(1A2E)"),
            'measure them with moe-serve calibrate --layouts "1A2E"',
        ),
        (("--devices", "4", "--layout", "1A2E", "--tensor-shards", "2"), '--layouts "1A2E tp2"'),
        (("--own-machines",), "--own-machines belongs to --cells LAYOUT"),
    ):
        assert run(*given, *arguments) == 2, arguments
        error = capsys.readouterr().err.splitlines()[-1]
        assert message in error, error


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: Capture) -> None:
    empty, negative = tmp_path / "empty.csv", tmp_path / "negative.csv"
    empty.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n", "utf-8")
    negative.write_text("at_s,prompt_tokens,output_tokens\n-3,10,10\n", "utf-8")
    old = here(tmp_path / "old.json", moe_serve="0.0.1")
    elsewhere = here(tmp_path / "elsewhere.json", host="Darwin arm64")
    fitting = here(tmp_path / "fitting.json")
    for arguments, message in (
        ((), "give --model and --device, or --calibration"),
        (("--model", "llm", "--device", "h100"), "model 'llm' is neither a file nor one of"),
        ((*QWEN[:4], "--device", "tpu"), "device 'tpu' is neither a file nor one of"),
        ((*QWEN, "--trace", str(empty)), "has no request with a prompt and an answer"),
        ((*QWEN, "--trace", str(negative)), "has a request at -3 s: times must be 0 or more"),
        ((*QWEN, "--layout", "replicas"), "the weights of an attention device are "),
        ((*QWEN, "--layout", "2A4E"), "takes 6 devices, but devices is 8"),
        ((*QWEN, "--memory-bytes", "80GB"), "such as 80GiB"),
        ((*QWEN, "--num-pages", "9999999"), "pages of 16 tokens"),
        ((*QWEN, *SMALL, "--num-pages", "3"), "too small for one request of 189"),
        ((*QWEN, "--prompt-tokens", "41000"), "has 41000 + 64 tokens, but the context is 40960"),
        ((*QWEN, "--concurrency", "4", "--rate", "1"), "cannot be combined"),
        ((*QWEN, "--concurrency", "4", "--duration", "9"), "--duration only applies to --rate"),
        ((*QWEN, "--duration", "9"), "--duration only applies to --rate and --trace"),
        (("--calibration", old), "the calibration is of moe-serve 0.0.1 on "),
        (("--calibration", elsewhere), "on Darwin arm64, but this is"),
        (("--calibration", fitting, "--devices", "2"), "cannot be simulated from a calibration"),
        (("--calibration", fitting, "--device", "h100"), "leave out --model, --device"),
        (("--calibration", str(tmp_path / "no.json")), "cannot read the calibration"),
    ):
        assert run(*arguments) == 2, arguments
        error = capsys.readouterr().err
        last = error.splitlines()[-1]
        assert message in last and last.startswith("error: ") and "Traceback" not in error, error


TIERS = """
tiers:
  fast: {weight: 4, ttft_s: 0.2}
  slow: {weight: 1, ttft_s: 20}
priorities: {slow: 3}
"""


def burst(folder: Path, num: int) -> str:
    """Writes a trace of requests in even gaps, from three tenants."""
    path = folder / "trace.csv"
    rows = [f"{0.5 * i},{300 + 37 * (i % 5)},{12 + i % 7},t{i % 3}" for i in range(num)]
    path.write_text("at_s,prompt_tokens,output_tokens,tenant\n" + "\n".join(rows), "utf-8")
    return str(path)


@pytest.mark.parametrize(
    "layout",
    [
        ("--devices", "8", "--layout", "colocated", "--tensor-shards", "8"),
        ("--cells", "1x(8D tp8 prefill) 1x(8D tp8 decode)"),
    ],
)
def test_tiers_reach_the_scheduler_and_the_report(
    tmp_path: Path, capsys: Capture, layout: tuple[str, ...]
) -> None:
    """At twice the capacity the order decides which tier keeps its target, in all cells alike."""
    tiers = tmp_path / "tiers.yaml"
    tiers.write_text(TIERS, "utf-8")
    common = (
        *QWEN[:-2], *layout, "--trace", burst(tmp_path, 36), "--tiers", str(tiers),
        "--load", "2", "--max-num-seqs", "2", "--max-batched-tokens", "256",
    )  # fmt: skip
    met = {}
    for order in ("fifo", "atc"):
        report = report_of(tmp_path / f"{order}.json", *common, "--order", order)
        assert report.service is not None and report.summary.num_ok == 36
        assert [tier.name for tier in report.service.tiers] == ["fast", "slow"]
        assert {tenant.name for tenant in report.service.tenants} == {"t0", "t1", "t2"}
        met[order] = report.service.tiers[0].attained
    assert met["atc"] > 2 * met["fifo"]
    assert "weighted tardiness" in capsys.readouterr().out
    strict = report_of(tmp_path / "s.json", *common, "--order", "atc", "--strict")
    assert strict.service is not None and strict.service.num_refused > 0
    assert strict.summary.errors["deadline_unmeetable"] == strict.service.num_refused
    assert (
        "its first token would come after" in strict.summary.error_examples["deadline_unmeetable"]
    )


def test_runaway_answers_are_counted(tmp_path: Path, capsys: Capture) -> None:
    """After 80 answers of 4 tokens, the limit is 8; three of 40 tokens reach it."""
    tiers, trace = tmp_path / "tiers.yaml", tmp_path / "trace.csv"
    tiers.write_text("tiers:\n  chat: {ttft_s: 20, predicted_output_limit: 2}\n", "utf-8")
    lengths = [4] * 80 + [40] * 3
    rows = [f"{0.5 * i},64,{length}" for i, length in enumerate(lengths)]
    trace.write_text("at_s,prompt_tokens,output_tokens\n" + "\n".join(rows), "utf-8")
    given = ("--trace", str(trace), "--tiers", str(tiers))
    report = report_of(tmp_path / "r.json", *QWEN, *given)
    assert report.server is not None and report.server.runaways == {"chat": 3.0}
    assert "runaway answers: 3 of chat" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--strict",), "--strict only applies with --tiers FILE"),
        (("--patience", "3"), "--patience only applies with --tiers FILE"),
        (("--load", "1.2"), "--load sets the speed of --trace FILE"),
        (("--load", "1.2", "--trace", "TRACE", "--rate", "3"), "leave out --scale-time, --rate"),
        (("--load", "1.2", "--trace", "TRACE"), "a trace of 20 requests or more, got 3"),
    ],
)
def test_options_that_would_do_nothing(
    tmp_path: Path, capsys: Capture, arguments: tuple[str, ...], said: str
) -> None:
    given = [burst(tmp_path, 3) if each == "TRACE" else each for each in arguments]
    assert run(*QWEN, *given) == 2
    assert said in " ".join(capsys.readouterr().err.split())
