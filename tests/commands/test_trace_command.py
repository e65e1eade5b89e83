"""`moe-serve trace`: commands, their output, and mistakes of users."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moe_serve.cli.main import main
from moe_serve.cli.trace import trace_record
from moe_serve.cli.trace.trace_record import TracePrompt, read_prompts
from moe_serve.errors import InvalidRequestError
from routing_predictor.traces import trace_file
from routing_predictor.traces.load_file import read_load
from routing_predictor.traces.routing_error import TraceError
from routing_predictor.traces.trace import RoutingTrace
from routing_predictor.traces.trace_file import read_trace, read_traces, write_trace
from tests.support.routing.traces import make_trace

Capture = pytest.CaptureFixture[str]


def run(*arguments: object) -> int:
    """Returns the exit code of `moe-serve trace ARGUMENTS`."""
    with pytest.raises(SystemExit) as exit_info:
        main(["trace", *map(str, arguments)])
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_SERVE_MODEL_NUM_THREADS", "1")


def test_record_and_show(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_record, "_PART_BYTES", 300)  # several parts become one file
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "Once upon a time", "label": "story"}\n\n'
        '{"prompt": [5, 6, 7], "label": "ids"}\n'
    )
    out = tmp_path / "trace.safetensors"
    assert run("record", "--prompts", prompts, "--out", out, "--max-tokens", 5, "--weights") == 0
    assert not (tmp_path / "trace.parts").exists()
    trace = read_trace(out)
    assert trace.labels == ("story", "ids") and trace.model == "moe-serve-demo"
    assert trace.token_N is not None and trace.weights_NLK is not None
    second = trace.select(trace.request_N == 1)
    assert second.token_N is not None and second.token_N[:3].tolist() == [5, 6, 7]
    assert second.phase_N.tolist() == [0] * 3 + [1] * (second.num_tokens - 3)
    assert f"{trace.num_tokens} tokens are in {out}" in capsys.readouterr().out
    figures, picture = tmp_path / "figures.json", tmp_path / "load.png"
    assert run("show", out, "--json", figures, "--heatmap", picture, "--windows", 2) == 0
    shown = capsys.readouterr().out
    assert "balancedness on 4 ranks" in shown and "story" in shown
    content = json.loads(figures.read_text())
    assert [layer["layer"] for layer in content["layers"]] == list(range(6))
    assert content["activated_experts"][0]["any_tokens"] == 4.0
    assert len(content["drift"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_keeps_what_was_recorded(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_serve.engine.engine import Engine

    step, calls = Engine.step, iter(range(1000))

    def interrupted(engine: Engine) -> object:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    assert run("record", "--prompts", prompts, "--out", tmp_path / "parts", "--no-tokens") == 130
    assert "interrupted: " in capsys.readouterr().out
    trace = read_traces([tmp_path / "parts"])
    assert trace.num_tokens > 4 and trace.token_N is None


def test_what_was_recorded_outlives_a_file_that_cannot_be_written(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(trace: RoutingTrace, path: Path) -> int:
        raise TraceError(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr(trace_file, "write_trace", full)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n")
    out = tmp_path / "x.safetensors"
    assert run("record", "--prompts", prompts, "--out", out, "--max-tokens", 2) == 2
    assert "No space left on device; the tokens recorded so far are in" in capsys.readouterr().err
    assert read_traces([tmp_path / "x.parts"]).num_tokens > 1


def test_import_and_show_a_load(tmp_path: Path, capsys: Capture) -> None:
    source, out = tmp_path / "counts.csv", tmp_path / "load.safetensors"
    source.write_text("1,2,3,4\n4,3,2,1\n")
    assert run("import", source, "--out", out, "--model", "mine") == 0
    assert "loads of 1 step, 2 layers, 4 experts" in capsys.readouterr().out
    assert read_load(out).model == "mine"
    assert run("show", out, "--ranks", 2) == 0
    assert "0.714" in capsys.readouterr().out, "5 / 7"


def test_import_a_trace(tmp_path: Path, capsys: Capture) -> None:
    np.save(tmp_path / "a.npy", np.arange(24).reshape(6, 2, 2) % 5)
    assert run("import", tmp_path / "a.npy", "--out", tmp_path / "a.safetensors") == 0
    assert "a trace of 6 tokens, 1 request, 2 layers, top-2 of 5" in capsys.readouterr().out


def test_mistakes_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    prompts, trace = tmp_path / "prompts.txt", tmp_path / "trace.safetensors"
    prompts.write_text("one\n")
    write_trace(make_trace(), trace)
    (tmp_path / "cut.safetensors").write_bytes(trace.read_bytes()[:100])
    np.savez(tmp_path / "back.npz", ids=np.zeros((3, 1, 1), np.int64), pos=np.array([0, 2, 1]))
    np.save(tmp_path / "a.npy", np.zeros((1, 1, 1), np.int64))
    (tmp_path / "left.parts").mkdir()
    cases: list[tuple[tuple[object, ...], str]] = [
        (("record", "--prompts", prompts, "--out", trace), "already exists"),
        (("record", "--prompts", tmp_path / "no", "--out", tmp_path / "x"), "cannot be read"),
        (("record", "--prompts", prompts, "--out", tmp_path / "a" / "b"), "is not a folder"),
        (("show", tmp_path / "none"), "does not exist"),
        (("show", tmp_path / "cut.safetensors"), "cannot be read as a safetensors file"),
        (("show", tmp_path / "cut.safetensors", trace), "cannot be read as a safetensors file"),
        (
            ("show", trace, "--ranks", 9),
            "--ranks must be at most 8, the number of experts in a layer; got 9",
        ),
        (("show", trace, "--json", tmp_path / "a" / "b"), "cannot be written"),
        (("import", tmp_path / "none.npz", "--out", tmp_path / "x"), "does not exist"),
        (("import", prompts, "--out", trace), "already exists"),
        (
            ("record", "--prompts", prompts, "--out", tmp_path / "left.safetensors"),
            "left.parts already exists",
        ),
        (("import", tmp_path / "back.npz", "--out", tmp_path / "x"), "has position 1 after 2"),
        (("import", tmp_path / "a.npy", "--out", prompts / "x"), "cannot be written: Not a dir"),
        (
            ("import", prompts, "--from", "word", "--out", tmp_path / "x"),
            "word is not a known format",
        ),
        (("status", "--url", "ftp://nowhere"), "is not a URL"),
        (("status", "--url", "http://127..0.1:8"), "is not a URL"),
        (("start", "--sample-rate", "nan"), "--sample-rate must be above 0 and at most 1, got nan"),
    ]
    for arguments, message in cases:
        assert run(*arguments) == 2, arguments
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert run("status", "--url", "http://127.0.0.1:9") == 1
    assert "no server answers at" in capsys.readouterr().err


def test_what_cannot_be_written_is_said_before_anything_else(
    tmp_path: Path, capsys: Capture
) -> None:
    trace = tmp_path / "trace.safetensors"
    write_trace(make_trace(), trace)
    for flags, message in (
        (("--json", tmp_path), "cannot be written: it is a folder"),
        (("--json", tmp_path / "a" / "b"), "a is not a folder"),
        (("--heatmap", tmp_path / "a" / "b.png"), "a is not a folder"),
        (("--heatmap", tmp_path / "load.txt"), "--heatmap must be a file *.png, got "),
    ):
        assert run("show", trace, *flags) == 2, flags
        printed = capsys.readouterr()
        assert message in printed.err and not printed.out, flags
    assert not (tmp_path / "load.txt").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "\n \n", "has no prompts"),
        ("a.jsonl", "x", "a.jsonl:1 is not JSON"),
        ("a.jsonl", '\n{"text": "x"}', "a.jsonl:2 is not an object"),
        ("a.jsonl", '{"prompt": [1, true]}', "neither text nor a list of token ids"),
        ("a.jsonl", '{"prompt": ""}', "or it is empty"),
        ("a.jsonl", '{"prompt": "x", "label": 5}', "label is 5, not text"),
    ],
)
def test_wrong_prompts(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidRequestError, match=message):
        read_prompts(tmp_path / name)


def test_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    assert read_prompts(tmp_path / "a.txt") == [TracePrompt("one"), TracePrompt("two")]
    text = json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False)
    (tmp_path / "b.jsonl").write_text(f"{text}\n", encoding="utf-8")
    assert read_prompts(tmp_path / "b.jsonl") == [TracePrompt("a\u2028b")]
