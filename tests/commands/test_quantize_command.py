"""`moe-serve quantize`: the demonstration model, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import moe_serve
from moe_serve.cli.main import main
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.model.checkpoint.checkpoint import demo_model_folder

Capture = pytest.CaptureFixture[str]
TEXT = "The bill was read twice and sent to the committee of the whole house. "


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["quantize", *arguments])
    code = exit_info.value.code
    assert code is None or isinstance(code, int)
    return code or 0


def test_the_demonstration_model_is_quantised_and_served(tmp_path: Path, capsys: Capture) -> None:
    out, report, texts = tmp_path / "out", tmp_path / "report.json", tmp_path / "law.txt"
    texts.write_text("\n<|endoftext|>\n".join(f"{i}. {TEXT}" for i in range(20)))
    model = str(demo_model_folder())
    flags = ["--out", str(out), "--texts", str(texts), "--report", str(report)]
    assert run(model, *flags, "--num-threads", "1", "--held-out-tokens", "64") == 0
    shown = capsys.readouterr().out
    assert "int8 rows, int4 groups of 32" in shown and "| mean |" in shown
    written = json.loads(report.read_text())
    assert written["method"] == "rtn" and written["domains"][0]["domain"] == "law"
    assert 0.9 < written["domains"][0]["ratio"] < 1.1
    params = SamplingParams(max_tokens=4, temperature=0)
    with moe_serve.LLM(str(out), max_model_len=64) as llm:
        (output,) = llm.generate(["Once upon a"], params, use_progress_bar=False)
    assert output.outputs[0].token_ids


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scheme", "w2a16"], "--scheme must be one of w4a16, w8a16, mxfp4; got 'w2a16'."),
        (["--scheme", "mxfp4"], "those of qwen3_moe are stored in another way"),
        (["--scheme", "mxfp4", "--attention", "w8"], "--scheme mxfp4 quantises only experts"),
        (["--group", "48"], "--group must be one of 32, 64, 128; got 48."),
        (["--group", "64"], "does not divide the 96 inputs of model.layers.0.mlp.experts.0.down"),
        (["--method", "awq"], "--method must be one of rtn, gptq; got 'awq'"),
        (["--method", "gptq"], "--method gptq needs --texts"),
        (["--method", "gptq", "--texts", "nowhere"], "nowhere does not exist"),
        (["--held-out", "somewhere"], "--held-out needs --texts"),
        (["--attention", "w2"], "--attention must be one of w8, w4, keep; got 'w2'"),
        (["--head", "w8"], "its embedding (tie_word_embeddings)"),
        (["--int8-layers", "3"], "--int8-layers must be auto:BUDGET"),
        (["--int8-layers", "auto:0.1"], "--int8-layers needs --texts"),
        (["--scheme", "w8a16", "--int8-layers", "auto:1"], "has no effect with --scheme w8a16"),
        (["--keep", "["], "--keep is '[', which is not a pattern"),
        (["--report", "/nowhere/report.json"], "/nowhere is not a folder"),
    ],
)
def test_mistakes(flags: list[str], message: str, tmp_path: Path, capsys: Capture) -> None:
    assert run(str(demo_model_folder()), "--out", str(tmp_path / "out"), *flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error
    assert not list(tmp_path.iterdir())


def test_no_checkpoint_and_no_place(tmp_path: Path, capsys: Capture) -> None:
    assert run(str(tmp_path / "no"), "--out", str(tmp_path / "out")) == 2
    assert "is not a folder: give a local checkpoint" in capsys.readouterr().err
    assert run(str(demo_model_folder()), "--out", str(tmp_path)) == 2
    assert "exists: name another folder, or remove it" in capsys.readouterr().err
