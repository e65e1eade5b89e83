"""`moe-serve predictor`: training and judging on the demonstration model, and mistakes."""

from __future__ import annotations

import json
import lzma
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_serve.cli.main import main
from moe_serve.config.sections import ModelConfig
from moe_serve.engine.opened_model import model_folder
from moe_serve.engine.schedule.policy.policy_maker import open_request_predictor
from moe_serve.errors import ConfigError
from moe_serve.learn.documents import cut_into_pieces, read_documents
from moe_serve.learn.predictor_data import PredictorModel
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.text.tokenizer import Tokenizer
from routing_predictor.judge import rivals
from routing_predictor.traces.trace import RoutingTrace
from routing_predictor.traces.trace_file import write_trace

TEXT = "The bill was read twice and sent to the committee. " * 8
CODE = "static int next(struct list *l) { return l->head + 1; }\n" * 8

Capture = pytest.CaptureFixture[str]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["predictor", *arguments])
    code = exit_info.value.code
    assert code is None or isinstance(code, int)
    return code or 0


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for label, text in (("law", TEXT), ("code", CODE)):
        (folder / label).mkdir()
        documents = "\n<|endoftext|>\n".join(f"{number} {text}" for number in range(5))
        (folder / label / "train.txt").write_text(documents)
        with lzma.open(folder / label / "valid.txt.xz", "wt") as file:
            file.write(f"{text} and an end.\n<|endoftext|>\n\nagain {text}")
    return folder


def test_documents_of_a_folder(texts: Path) -> None:
    train, valid = read_documents([texts], "train"), read_documents([texts], "valid")
    assert [d.label for d in train] == ["code"] * 5 + ["law"] * 5 and len(valid) == 4
    assert valid[1].text == f"again {CODE}".strip("\n")
    one = read_documents([texts / "law" / "train.txt"], "valid")
    assert len(one) == 5, "a file that is named is read"
    tokenizer = Tokenizer.load(demo_model_folder())
    pieces = cut_into_pieces(train, tokenizer, 400, 64, seed=0)
    assert max(len(piece.tokens) for piece in pieces) == 64
    assert {piece.label for piece in pieces} == {"law", "code"}
    names = [piece.request_id for piece in pieces]
    assert len(set(names)) == len(names), "no piece twice"


@pytest.mark.timeout(300)  # trains all three kinds
def test_train_evaluate_and_refuse(
    texts: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How well the regression fits is asked in test_evaluate.py; here, that it is judged.
    monkeypatch.setattr(rivals, "_MAX_ITERATIONS", 3)
    monkeypatch.setattr(rivals, "_CUTS_TO_FIT", 200)
    out, report = tmp_path / "out", tmp_path / "report.json"
    quick = ("--max-tokens", "2400", "--epochs", "1")
    assert run("train", "all", "--texts", str(texts), "--out", str(out), *quick) == 0
    printed = capsys.readouterr().out
    assert "next-layer: 0.93 MB" in printed and "pre-attention: 3.25 MB" in printed
    card = json.loads((out / "request.json").read_text())
    assert card["data"]["documents"] == 10 and card["data"]["tokens"].keys() == {"code", "law"}
    assert card["sizes"]["windows"] == [512, 128, 32, 8, 1]
    judged = ("evaluate", str(out), "--texts", str(texts), "--json", str(report))
    assert run(*judged, "--max-tokens", "600") == 0
    assert "request predictor" in capsys.readouterr().out
    verdicts = json.loads(report.read_text())["verdicts"]
    assert verdicts["next-layer"]["frozen router"]["overlap"]["layers"].keys() == set("12345")
    assert run(*judged, "--max-tokens", "600", "--baselines", str(texts)) == 0
    verdicts = json.loads(report.read_text())["verdicts"]
    by_token = {"frozen router", "marginal", "previous token"}
    assert verdicts["request"].keys() == {
        "request predictor", "marginal", "previous token", "history of the prefix",
        "history + marginal", "half the answer (no baseline)", "logistic regression",
    }  # fmt: skip
    assert verdicts["next-layer"].keys() == {"next-layer predictor", *by_token}
    assert verdicts["pre-attention"].keys() == {"pre-attention predictor", *by_token}
    capsys.readouterr()
    predictor = open_request_predictor(out, demo_model_folder())
    assert predictor.predict([np.array([5, 6])]).shape == (1, 6, 32)
    other = tmp_path / "other"
    shutil.copytree(demo_model_folder(), other, ignore=shutil.ignore_patterns("predictor"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    with pytest.raises(ConfigError, match=r"for the model demo_model \(.*not for other \("):
        open_request_predictor(out, other)
    assert run("evaluate", str(out), "--texts", str(texts), "--model", str(other)) == 2
    assert "predictor is for the model demo_model" in capsys.readouterr().err


def test_a_trace_trains_and_is_judged(texts: Path, tmp_path: Path, capsys: Capture) -> None:
    model = PredictorModel(None)
    tokenizer = Tokenizer.load(model_folder(ModelConfig()))
    pieces = cut_into_pieces(read_documents([texts], "train"), tokenizer, 900, 128, seed=0)
    captured = model.capture(pieces, has_hidden=False, progress=lambda *_: None)
    path = tmp_path / "trace.safetensors"
    write_trace(captured.trace, path)
    arguments = ("--trace", str(path), "--out", str(tmp_path / "out"), "--epochs", "1")
    assert run("train", "request", *arguments) == 0
    assert (tmp_path / "out" / "request.json").is_file()
    capsys.readouterr()
    assert run("evaluate", "--trace", str(path), "--drop-label", "law") == 0
    printed = capsys.readouterr().out
    for name in ("MLP on the history", "decaying histogram", "previous token"):
        assert printed.count(name) == 1, name
    assert run("evaluate", "--trace", str(path), "--drop-label", "") == 0


def test_what_cannot_be_learnt_from_is_told(tmp_path: Path, capsys: Capture) -> None:
    """One document is too few, and so are traces of another model that do not name it."""
    (tmp_path / "one.txt").write_text(TEXT)
    arguments = ("--texts", str(tmp_path / "one.txt"), "--out", str(tmp_path / "out"))
    for kind in ("next-layer", "pre-attention", "request"):
        assert run("train", kind, *arguments, "--max-tokens", "100") == 2
        assert "1 document is too few" in capsys.readouterr().err
    ids = np.tile(np.arange(4), (80, 6, 1)).astype(np.uint8)
    good = RoutingTrace(
        expert_ids_NLK=ids,
        request_N=np.repeat([0, 1], 40).astype(np.int32),
        position_N=np.tile(np.arange(40), 2).astype(np.int32),
        phase_N=np.zeros(80, dtype=np.uint8),
        token_N=np.arange(80, dtype=np.int32),
        num_experts=32,
        layers=tuple(range(6)),
        request_ids=("a", "b"),
    )
    path = tmp_path / "trace.safetensors"
    for trace, message in (
        (replace(good, token_N=np.full(80, 10**6, np.int32)), "token ids from 1000000 to 1000000"),
        (replace(good, num_experts=64), "has 64 experts in 6 layers, top-4, but the model demo_m"),
        (replace(good, layers=tuple(range(1, 7))), "or numbers its layers differently"),
        (replace(good, expert_ids_NLK=ids[:, :, :2]), "has 32 experts in 6 layers, top-2, but"),
    ):
        write_trace(trace, path)
        assert run("train", "request", "--trace", str(path), "--out", str(tmp_path / "out")) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "oracle", "--texts", "x", "--out", "o"), "all; got 'oracle'"),
        (("train", "all", "--out", "o"), "give either --texts or --trace"),
        (("train", "all", "--trace", "x", "--out", "o"), "a trace has no hidden states"),
        (("train", "request", "--trace", "x", "--out", "o"), "x does not exist"),
        (("train", "request", "--texts", "x", "--out", "o"), "x does not exist"),
        (
            ("train", "all", "--texts", "x", "--loss", "mse", "--out", "o"),
            "one of router, ranked; got 'mse'",
        ),
        (("train", "all", "--texts", "x", "--out", "no/such"), "no is not a folder"),
        (("train", "all", "--texts", "x", "--out", "taken"), "--out taken is a file"),
        (("evaluate", "--texts", "x"), "give a folder of predictors and --texts"),
        (("evaluate", "o", "--trace", "x"), "or --trace alone"),
        (("evaluate", "o", "--texts", "x"), "there is no predictor in o"),
        (("evaluate", "o", "--texts", "x", "--json", "no/such/x"), "no/such is not a folder"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...],
    message: str,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
